"""Expositions of a GPU exporter: the recorded ones, those of a test, and a source over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.catalog.dcgm_fields import DCGM_FIELDS, DcgmField
from agent.catalog.rocm_fields import ROCM_FIELDS
from agent.records.gpu import GpuSample, GpuSamples, XidError
from agent.sources.dcgm.exporter_gpus import ExporterGpu, ExporterGpus, read_gpus, wanted_series
from agent.sources.dcgm.source import DcgmSource
from agent.sources.engines.exposition import read_exposition
from tests.sources.engines.wire import EngineServer

PAGES = Path(__file__).parent / "pages"
MIB = 1024 * 1024


def uuid_of(index: int) -> str:
    return f"GPU-1f2e3d4c-aaaa-bbbb-cccc-{index:012x}"


def body(name: str) -> bytes:
    return (PAGES / f"{name}.txt").read_bytes()


def row(series: str, value: object, index: int = 0, **labels: str) -> str:
    """A row as the exporter writes it; `labels` come beside those of the GPU or replace them."""
    own = {"gpu": str(index), "UUID": uuid_of(index), "modelName": "NVIDIA H200", **labels}
    inside = ",".join(f'{name}="{text}"' for name, text in own.items())
    return f"{series}{{{inside}}} {value}"


def page_of(*rows: str) -> bytes:
    return "".join(f"{line}\n" for line in rows).encode()


def gpus_of(page: bytes, *extra_fields: DcgmField, known: Sequence[str] = ()) -> ExporterGpus:
    fields = (*extra_fields, *DCGM_FIELDS, *ROCM_FIELDS)
    return read_gpus(read_exposition(page, wanted_series(fields)), fields, known)


def gpu_of(page: bytes, *extra_fields: DcgmField) -> ExporterGpu:
    (gpu,) = gpus_of(page, *extra_fields).gpus
    return gpu


PLENTY_S = 20.0


@dataclass
class ScriptedExporter:
    """Each poll is ten seconds after the last, by the source's clocks."""

    exporter: EngineServer
    extra_fields: tuple[DcgmField, ...] = ()
    timeout_s: float = PLENTY_S
    pod: str | None = None
    last: GpuSamples = field(default_factory=GpuSamples)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.source = DcgmSource(
            url=self.exporter.url,
            extra_fields=self.extra_fields,
            timeout_s=self.timeout_s,
            pod=self.pod,
            monotonic=lambda: self.now,
        )

    @property
    def samples(self) -> list[GpuSample]:
        return list(self.last.samples)

    @property
    def xids(self) -> list[XidError]:
        return list(self.last.xids)

    @property
    def failures(self) -> list[str]:
        return list(self.last.failures)

    def poll(self, *rows: str, page: bytes | None = None, status: int = 200) -> None:
        if rows or page is not None:
            text = page_of(*rows) if page is None else page
            self.exporter.answers("/metrics", text, status=status)
        self.now += 10
        self.last = self.source.read(self.now)

    def of(self, index: int = 0) -> GpuSample:
        (found,) = [sample for sample in self.samples if sample.gpu == uuid_of(index)]
        return found

    def fact(self, name: str, *labels: str, index: int = 0) -> float | None:
        return self.of(index).fact(name, *labels)
