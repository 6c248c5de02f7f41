"""The `estimate` command: a model's memory, work and best latencies from its config.json."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from agent.analysis.estimate import (
    MEMORY_FRACTION,
    Estimate,
    PlannedDeployment,
    estimate_of_weights,
)
from agent.analysis.estimate import estimate as estimate_of
from agent.analysis.physics import ACTIONS, Bound
from agent.catalog.hardware import (
    CacheDtype,
    GpuModel,
    Precision,
    WeightDtype,
    find_gpu,
    gpu_models,
)
from agent.command_options import AsJson
from agent.errors import AgentError
from agent.records.model import ModelShape, Parallelism, StoredWeights
from agent.settings.values import did_you_mean
from agent.sources.model_config import ArchitectureUnknown, read_model, read_weights
from agent.terminal import TerminalConsole, echo


class GpuUnknown(AgentError):
    """No figures of the GPU are known, neither by its name nor by options."""

    def __init__(self, name: str | None) -> None:
        known = [model.name for model in gpu_models()]
        what = "the GPU has no name" if name is None else f"the GPU {name!r} is unknown"
        listed = did_you_mean(name or "", known) or f"; --gpu knows {', '.join(known)}."
        super().__init__(
            f"{what}{listed} For another, give --peak-tflops, --bandwidth-gb-per-s and --memory-gb"
        )


@dataclass(frozen=True, slots=True)
class _Given:
    """Figures of a GPU that replace the table's, in the units of the options."""

    peak_tflops: float | None
    bandwidth_gb_per_s: float | None
    memory_gb: float | None


ConfigFile = Annotated[
    Path,
    typer.Argument(parser=Path, metavar="CONFIG", help="A model's config.json, or its folder."),
]
GpuName = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="The GPU, such as H100-SXM.")
]
Tensor = Annotated[
    int, typer.Option("--tp", min=1, max=10_000, metavar="N", help="Tensor-parallel GPUs.")
]
Stages = Annotated[
    int, typer.Option("--pp", min=1, max=10_000, metavar="N", help="Pipeline stages.")
]
Replicas = Annotated[
    int, typer.Option("--dp", min=1, max=10_000, metavar="N", help="Data-parallel replicas.")
]
Context = Annotated[
    int, typer.Option(min=1, max=10**8, metavar="N", help="Tokens of a request: prompt and output.")
]
Weights = Annotated[
    WeightDtype | None,
    typer.Option(
        metavar="DTYPE",
        help="Format of the weights, instead of the config's: "
        f"{', '.join(each.value for each in WeightDtype)}.",
    ),
]
Cache = Annotated[
    CacheDtype | None, typer.Option(help="Format of the KV cache, instead of the config's.")
]
Fraction = Annotated[
    float,
    typer.Option(
        min=0.01,
        max=1.0,
        metavar="SHARE",
        help="Share of GPU memory the engine may take, 0.01 to 1.",
    ),
]
Peak = Annotated[
    float | None,
    typer.Option(
        min=0.001, max=1e6, metavar="TFLOPS", help="Dense peak of one GPU, instead of the table's."
    ),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(min=0.001, max=1e6, metavar="GB/S", help="Memory bandwidth of one GPU."),
]
Memory = Annotated[
    float | None,
    typer.Option(min=0.001, max=1e6, metavar="GB", help="Memory of one GPU, in decimal GB."),
]


def estimate(
    config: ConfigFile,
    *,
    gpu: GpuName = None,
    tensor: Tensor = 1,
    stages: Stages = 1,
    replicas: Replicas = 1,
    context: Context = 8192,
    dtype: Weights = None,
    kv_dtype: Cache = None,
    memory_fraction: Fraction = MEMORY_FRACTION,
    peak_tflops: Peak = None,
    bandwidth_gb_per_s: Bandwidth = None,
    memory_gb: Memory = None,
    as_json: AsJson = False,
) -> None:
    """Estimate memory, FLOPs, bytes and best latencies of a model, from its config.json.

    Example: `estimate config.json --gpu H100-SXM --tp 2 --context 8192`. Nothing is downloaded.
    """
    cache_bits = None if kv_dtype is None else Precision(kv_dtype.value).bits
    model = _model(config, dtype, cache_bits)
    deployment = PlannedDeployment(
        context=context,
        parallelism=Parallelism(tensor=tensor, pipeline=stages, data=replicas),
        gpu=_gpu(gpu, _Given(peak_tflops, bandwidth_gb_per_s, memory_gb)),
        memory_fraction=memory_fraction,
    )
    found = (
        estimate_of_weights(model, deployment)
        if isinstance(model, StoredWeights)
        else estimate_of(model, deployment)
    )
    if as_json:
        echo(json.dumps(asdict(found)))
    else:
        _show(found)


def _model(config: Path, dtype: str | None, cache_bits: float | None) -> ModelShape | StoredWeights:
    """The model; of an unknown architecture what its files tell. Raises AgentError."""
    try:
        return read_model(config, dtype=dtype, cache_bits=cache_bits)
    except ArchitectureUnknown as error:
        weights = None if dtype is not None else read_weights(config, error)
        if weights is None:
            raise
        return weights


def _gpu(name: str | None, given: _Given) -> GpuModel | None:
    """The GPU by its name, with the given figures. Raises GpuUnknown."""
    if name is None and given == _Given(None, None, None):
        return None
    known = None if name is None else find_gpu(name)
    if known is None and None in (given.peak_tflops, given.bandwidth_gb_per_s, given.memory_gb):
        raise GpuUnknown(name)
    return _with_given(known or _blank(name), given)


def _blank(name: str | None) -> GpuModel:
    return GpuModel(
        name=name or "given",
        memory_bytes=0,
        bandwidth_bytes_per_s=0.0,
        peak_flops_per_s={},
    )


def _with_given(gpu: GpuModel, given: _Given) -> GpuModel:
    if given.peak_tflops is not None:
        peaks = dict.fromkeys(Precision, given.peak_tflops * 1e12)
        gpu = replace(gpu, peak_flops_per_s=peaks)
    if given.bandwidth_gb_per_s is not None:
        gpu = replace(gpu, bandwidth_bytes_per_s=given.bandwidth_gb_per_s * 1e9)
    if given.memory_gb is not None:
        gpu = replace(gpu, memory_bytes=round(given.memory_gb * 1e9))
    return gpu


def _show(found: Estimate) -> None:
    console = TerminalConsole()
    table = Table(title=f"{found.architecture}, estimated", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    for name, figure in _rows(found):
        table.add_row(name, figure)
    console.print(table)
    for bound in dict.fromkeys((found.prefill_bound, found.full_decode_bound)):
        if bound is not None:
            console.print(f"{bound}: {'; '.join(ACTIONS[bound])}")
    for sentence in (*found.remarks, found.note):
        console.print(f"Note: {sentence}.")


def _rows(found: Estimate) -> Iterator[tuple[str, str]]:
    yield "parameters", _scaled(found.parameters)
    yield "active parameters", _scaled(found.active_parameters)
    yield "weights", _scaled(found.weight_bytes, "B")
    yield "KV cache of a token", _scaled(found.kv_bytes_per_token, "B")
    yield f"KV cache of {found.context} tokens", _scaled(found.kv_bytes_per_request, "B")
    yield f"prefill of {found.context} tokens", _scaled(found.prefill_flops, "FLOP")
    yield "decode of a token", _scaled(found.decode_flops_per_token, "FLOP")
    yield "decode of a token, one request", _scaled(found.decode_bytes_per_token, "B")
    yield "GPUs", f"{found.gpus} x {found.gpu or 'unknown'}"
    yield "memory of a GPU", _scaled(found.gpu_memory_bytes, "B")
    yield "weights on a GPU", _scaled(found.weight_bytes_per_gpu, "B")
    yield "left for KV cache on a GPU", _scaled(found.cache_bytes_per_gpu, "B")
    yield f"requests of {found.context} tokens that fit", _count(found.max_concurrent_requests)
    yield "best TTFT, one request", _milliseconds(found.min_ttft_s)
    yield "best TPOT, one request", _milliseconds(found.min_tpot_s)
    yield "prefill is", _word(found.prefill_bound)
    yield "decode of one request is", _word(found.decode_bound)
    yield "decode with a full cache is", _word(found.full_decode_bound)


_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _scaled(value: float | None, unit: str = "") -> str:
    if value is None:
        return "unknown"
    for scale, prefix in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def _milliseconds(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1000:.2f} ms"


def _count(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _word(bound: Bound | None) -> str:
    return "unknown" if bound is None else bound.value
