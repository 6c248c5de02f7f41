"""Checks of the engine's GPUs."""

from collections.abc import Sequence
from functools import partial
from math import prod

from agent.analysis.audit.cache_checks import cache_size
from agent.analysis.audit.checks import (
    AuditCheck,
    AuditFinding,
    CheckResult,
    failed,
    passed,
    unknown,
    warned,
)
from agent.analysis.audit.known_values import flag, flags_are_known, value_of, without_flags
from agent.analysis.efficiency.source_utilisation import clock_ratio
from agent.analysis.physics.parameters import placed_blocks
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog.hardware import Precision, recognise_gpu
from agent.records.audit import AuditEvidence, EvidencePart
from agent.records.gpu import GpuSample

_CHECK = partial(AuditCheck, "GPUs")

_BUSY = 0.8
_PLAIN_BITS = 16
# With these the GPU protects itself.
_BRAKES = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake"})
# These keep it within power and temperature as designed: a full GPU has them at most of its clock.
_LIMITS = frozenset({"sw_power_cap", "sw_thermal"})
# Below this share of the highest clock a limit is a warning.
_SLOW_CLOCK = 0.9
_PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


def engine_gpus(evidence: AuditEvidence) -> Sequence[GpuSample]:
    """The GPUs that the engine's processes are on; all of them where no list shows that."""
    readable = [gpu for gpu in evidence.gpus or () if gpu.problem is None]
    return [gpu for gpu in readable if gpu.pids() & evidence.pids] or readable


def _without_gpus(evidence: AuditEvidence) -> str:
    if evidence.gpus is None:
        return evidence.why_unread(EvidencePart.GPUS)
    return "no GPU is there"


def memory_errors(evidence: AuditEvidence) -> CheckResult:
    """Whether memory of a GPU breaks."""
    gpus = engine_gpus(evidence)
    if not gpus:
        return unknown(_without_gpus(evidence))
    bad, doubtful, counted = [], [], 0
    for gpu in gpus:
        lost = gpu.fact(gpu_facts.ECC_ERRORS.name, "uncorrected", "driver_load")
        counted += lost is not None
        unmapped = gpu.fact(gpu_facts.ROW_REMAP_FAILED.name)
        if lost or unmapped:
            bad.append(
                f"GPU {gpu.index}: {lost or 0:.0f} uncorrected, remapping failed: {unmapped}"
            )
        elif gpu.fact(gpu_facts.ROW_REMAP_PENDING.name):
            doubtful.append(f"GPU {gpu.index}: a row is to be replaced")
    if bad:
        return failed("; ".join(bad), "drain the GPU, reset it, and replace it if it goes on")
    if doubtful:
        return warned("; ".join(doubtful), "reset the GPU when it is idle: nvidia-smi -r")
    if not counted:
        return unknown("the GPU does not count ECC errors")
    return passed(f"no uncorrected error on {counted} of {len(gpus)} GPUs since the driver's start")


def throttling(evidence: AuditEvidence) -> CheckResult:
    """Whether something holds the clocks down now."""
    gpus = engine_gpus(evidence)
    if not gpus:
        return unknown(_without_gpus(evidence))
    known = any(name == gpu_facts.THROTTLE_ACTIVE.name for gpu in gpus for name, _ in gpu.facts)
    if not known:
        return unknown("the GPU does not say what holds its clocks down")
    for found, judged in (
        ([gpu for gpu in gpus if _held_by(gpu) & _BRAKES], failed),
        ([gpu for gpu in gpus if _held_by(gpu) & _LIMITS and _is_slowed(gpu)], warned),
    ):
        if found:
            seen = "; ".join(map(_in_words, found))
            return judged(seen, "check cooling and power supply; nvidia-smi -q -d PERFORMANCE")
    limited = [gpu for gpu in gpus if _held_by(gpu) & _LIMITS]
    return passed("; ".join(map(_in_words, limited)) or f"nothing on {len(gpus)} GPUs now")


def _held_by(gpu: GpuSample) -> frozenset[str]:
    """Which of _BRAKES and _LIMITS hold its clocks down now."""
    active = {
        labels[0]
        for (name, labels), value in gpu.facts.items()
        if name == gpu_facts.THROTTLE_ACTIVE.name and value
    }
    return frozenset(active & (_BRAKES | _LIMITS))


def _is_slowed(gpu: GpuSample) -> bool:
    ratio = clock_ratio(gpu)
    return ratio is None or ratio < _SLOW_CLOCK


def _in_words(gpu: GpuSample) -> str:
    ratio = clock_ratio(gpu)
    at = "" if ratio is None else f" at {100 * ratio:.0f} % of its highest clock"
    return f"GPU {gpu.index}{at}: {', '.join(sorted(_held_by(gpu)))}"


def persistence(evidence: AuditEvidence) -> CheckResult:
    """Whether the driver stays loaded without a program on the GPU."""
    gpus = engine_gpus(evidence)
    states = [gpu.fact(gpu_facts.PERSISTENCE.name) for gpu in gpus]
    known = [state for state in states if state is not None]
    if not known:
        return unknown("the GPU does not report it" if gpus else _without_gpus(evidence))
    if all(known):
        return passed(f"on for {len(known)} GPUs")
    off = [str(gpu.index) for gpu, state in zip(gpus, states, strict=True) if state == 0]
    return warned(f"off for GPU {', '.join(off)}", "systemctl enable --now nvidia-persistenced")


def utilisation(evidence: AuditEvidence) -> CheckResult:
    """Whether the GPUs work while requests wait."""
    gpus = engine_gpus(evidence)
    used = [gpu.fact(gpu_facts.UTILIZATION.name) for gpu in gpus]
    known = [each for each in used if each is not None]
    if not known:
        return unknown(_without_gpus(evidence) if not gpus else "the GPU does not report it")
    waiting = value_of(evidence, fact.REQUESTS_WAITING)
    if not waiting:
        return unknown("no request waits now, so the GPUs need not be busy")
    seen = f"{100 * min(known):.0f} % of the least busy GPU, {waiting:.0f} requests wait"
    if min(known) >= _BUSY:
        return passed(seen)
    return warned(seen, "raise --max-num-seqs or --max-num-batched-tokens; see the host's CPU")


def parallelism(evidence: AuditEvidence) -> CheckResult:
    """Whether the engine has as many GPUs as its flags say."""
    if not engine_gpus(evidence):
        return unknown(_without_gpus(evidence))
    if not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    own = [gpu for gpu in evidence.gpus or () if gpu.pids() & evidence.pids]
    if not own:
        return unknown("the driver does not show which GPUs the engine's processes are on")
    degrees = [flag(evidence, name) or "1" for name in _PARALLEL]
    if not all(degree.isdecimal() for degree in degrees):
        return unknown(f"the flags are no numbers: {', '.join(degrees)}")
    wanted = prod(map(int, degrees))
    seen = f"{len(own)} GPUs, {' x '.join(degrees)} (tensor, pipeline, data)"
    idle = len([gpu for gpu in evidence.gpus or () if gpu not in own and not gpu.pids()])
    if len(own) != wanted:
        return warned(seen, f"{' '.join(_PARALLEL)}: their product must be the number of GPUs")
    if idle:
        return warned(f"{seen}; {idle} more are idle", _use_of(idle, *map(int, degrees)))
    return passed(seen)


def _use_of(idle: int, tensor: int, pipeline: int, data: int) -> str:
    """What to do with idle GPUs, of which a replica of the model needs tensor x pipeline."""
    more = idle // (tensor * pipeline)
    if more:
        return f"--data-parallel-size {data + more}"
    return "they are too few for one more replica: give them to another engine"


def cuda_graphs(evidence: AuditEvidence) -> CheckResult:
    """Whether the engine runs without CUDA graphs."""
    if not engine_gpus(evidence):
        return unknown(_without_gpus(evidence))
    if flag(evidence, "--enforce-eager") is not None:
        return warned("off", "remove --enforce-eager")
    if not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    return passed("not switched off")


def quantisation(evidence: AuditEvidence) -> CheckResult:
    """Whether the format of the weights suits the GPU, and leaves enough memory for the cache."""
    model, gpus = evidence.model, engine_gpus(evidence)
    if model is None:
        return unknown(
            evidence.why_unread(EvidencePart.WEIGHTS),
            "name `model_config` of the engine in --config",
        )
    if not gpus:
        return unknown(_without_gpus(evidence))
    gpu = recognise_gpu(gpus[0].name)
    if gpu is None:
        return unknown(f"what {gpus[0].name} multiplies in is not known")
    bits = min(block.format.bits for _, block in placed_blocks(model))
    seen = f"{bits:.3g} bits a weight, products in {model.compute}"
    if model.compute.bits < _PLAIN_BITS and model.compute not in gpu.units:
        return warned(
            f"{seen}, for which {gpu.name} has no unit: they run in 16 bits",
            f"weights in {_narrow(gpu.units) or '4 bits for products in 16'}",
        )
    narrow = _narrow(gpu.units)
    if bits < _PLAIN_BITS or narrow is None:
        return passed(seen)
    return _in_full(evidence, seen, narrow)


def _narrow(units: frozenset[Precision]) -> str | None:
    """The 8-bit precision of products to choose on a GPU with these units."""
    return next((each for each in (Precision.FP8, Precision.INT8) if each in units), None)


def _in_full(evidence: AuditEvidence, seen: str, narrow: str) -> CheckResult:
    """Weights in 16 bits are well as long as the cache has room beside them."""
    size = cache_size(evidence)
    if size.finding is AuditFinding.UNKNOWN:
        return unknown(f"{seen}; whether the KV cache has room beside them is not known")
    if size.finding is AuditFinding.PASS:
        return passed(f"{seen}; the KV cache has room beside them")
    return warned(
        f"{seen}; the KV cache is too small for the traffic",
        f"weights in {narrow}, half as large: a quantised build of the model, whose answers you "
        "compare, or --quantization fp8",
    )


GPU_CHECKS = (
    _CHECK(
        "parallelism", "a GPU without a part of the model costs money and does nothing", parallelism
    ),
    _CHECK(
        "memory errors", "an uncorrected error ends the engine, and they come again", memory_errors
    ),
    _CHECK("clocks held down", "a GPU at half its clock decodes at half its speed", throttling),
    _CHECK(
        "persistence mode",
        "without it the driver is loaded anew at each start of an engine, which takes seconds",
        persistence,
    ),
    _CHECK(
        "quantisation",
        "weights fill memory that the KV cache lacks, and each step of decode reads them all",
        quantisation,
    ),
    _CHECK("utilisation", "requests wait although the GPU has time", utilisation),
    _CHECK(
        "CUDA graphs",
        "without them the CPU starts each kernel, and decoding waits for it",
        cuda_graphs,
    ),
)
