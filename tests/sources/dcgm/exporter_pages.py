"""The fixture expositions, rows for expositions of a test, and the GPUs of both."""

from collections.abc import Sequence
from pathlib import Path

from agent.catalog.dcgm_fields import DCGM_FIELDS, DcgmField
from agent.sources.dcgm.exporter_gpus import (
    ExporterGpu,
    ExporterGpus,
    read_gpus,
    wanted_series,
)
from agent.sources.engines.exposition import read_exposition

PAGES = Path(__file__).parent / "pages"
MIB = 1024 * 1024


def uuid_of(index: int) -> str:
    """The UUID of a GPU on the pages."""
    return f"GPU-1f2e3d4c-aaaa-bbbb-cccc-{index:012x}"


def body(name: str) -> bytes:
    """The bytes of one fixture page."""
    return (PAGES / f"{name}.txt").read_bytes()


def row(series: str, value: object, index: int = 0, **labels: str) -> str:
    """A row as the exporter writes it; `labels` come beside those of the GPU or replace them."""
    own = {"gpu": str(index), "UUID": uuid_of(index), "modelName": "NVIDIA H200", **labels}
    inside = ",".join(f'{name}="{text}"' for name, text in own.items())
    return f"{series}{{{inside}}} {value}"


def page_of(*rows: str) -> bytes:
    """A page with these rows."""
    return "".join(f"{line}\n" for line in rows).encode()


def gpus_of(page: bytes, *extra_fields: DcgmField, known: Sequence[str] = ()) -> ExporterGpus:
    """The GPUs of an exposition."""
    fields = (*extra_fields, *DCGM_FIELDS)
    return read_gpus(read_exposition(page, wanted_series(fields)), fields, known)


def gpu_of(page: bytes, *extra_fields: DcgmField) -> ExporterGpu:
    """The only GPU of an exposition."""
    (gpu,) = gpus_of(page, *extra_fields).gpus
    return gpu
