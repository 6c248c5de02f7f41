"""Checks of the engine's GPUs, of its prefix cache and of the memory for KV values."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

from agent.analysis.audit.checks import (
    AuditCheck,
    AuditFinding,
    CheckResult,
    cache_capacity,
    failed,
    finished,
    flag,
    flags_are_known,
    max_length,
    max_running,
    mean_length,
    passed,
    ranks,
    share,
    total_of,
    unknown,
    value_of,
    warned,
    without_exposition,
    without_flags,
)
from agent.analysis.efficiency.disagreement import clock_ratio
from agent.analysis.physics import placed_blocks
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog.definitions import FULL_CACHE
from agent.catalog.engine_flags import NARROW_CACHES
from agent.catalog.hardware import Precision, recognise_gpu
from agent.records.audit import AuditEvidence, EvidencePart
from agent.records.gpu import GpuSample

_CACHE_CHECK = partial(AuditCheck, "KV cache")

# Below this share of preempted requests the cache is full now and then, not as a rule.
_FEW_PREEMPTED = 0.01
# With fewer requests of the mean length in the cache, hardly anything is batched.
_FEWEST_REQUESTS = 2
# Memory of the GPU for the engine: below, the cache is small; above, other users of it may fail.
_LOWEST_FRACTION, _HIGHEST_FRACTION = 0.85, 0.95

# Values of --dtype. Source: vLLM 0.32 `vllm/config/model.py`.
_DTYPES: Mapping[str, Precision] = {
    "bfloat16": Precision.BF16,
    "float": Precision.FP32,
    "float16": Precision.FP16,
    "float32": Precision.FP32,
    "half": Precision.FP16,
}

_MORE_CACHE = (
    "raise --gpu-memory-utilization (on a CPU VLLM_CPU_KVCACHE_SPACE), or --kv-cache-dtype fp8, "
    "or more GPUs with --tensor-parallel-size"
)


def prefix_caching(evidence: AuditEvidence) -> CheckResult:
    """Whether prompts reuse KV values of earlier ones."""
    # A later flag may switch it on again, so the flag counts only if the engine says nothing.
    switch = "--no-enable-prefix-caching"
    by_flag = None if flag(evidence, switch) is None else "False"
    state = evidence.engine.cache_config.get("enable_prefix_caching", by_flag)
    if state == "False":
        return failed("off", f"remove {switch}")
    if state != "True":
        return unknown(without_exposition(evidence))
    asked = value_of(evidence, fact.PREFIX_CACHE_QUERY_TOKENS)
    found = value_of(evidence, fact.PREFIX_CACHE_HIT_TOKENS)
    if not asked or found is None:
        return passed("on")
    return passed(f"on; found {share(found, asked)} prompt tokens")


def cache_size(evidence: AuditEvidence) -> CheckResult:
    """Whether the cache holds as many requests of the traffic's length as the batch may."""
    capacity = cache_capacity(evidence)
    if capacity is None:
        return unknown(without_exposition(evidence))
    override = evidence.engine.cache_config.get("num_gpu_blocks_override", "None")
    seen = f"{capacity:,.0f} tokens"
    if override != "None":
        return failed(
            f"{seen}, cut to {override} blocks by a flag", "remove --num-gpu-blocks-override"
        )
    return _against_traffic(evidence, capacity, seen)


def _against_traffic(evidence: AuditEvidence, capacity: float, seen: str) -> CheckResult:
    longest, mean, batch = max_length(evidence), mean_length(evidence), max_running(evidence)
    count = ranks(evidence)
    if longest is not None:
        seen += f", {capacity / longest:,.1f} requests of --max-model-len {longest}"
    if mean is None:
        if longest and batch and capacity >= longest * batch * count:
            return passed(f"{seen}, and {_batch(batch, count)}")
        return unknown(f"{seen}; no request has finished, so the traffic's length is unknown")
    fit = capacity / mean
    seen += f", {fit:,.1f} of the mean {mean:,.0f} tokens"
    if fit < _FEWEST_REQUESTS:
        return failed(seen, _MORE_CACHE)
    if batch is None:
        return passed(seen)
    seen += f"; {_batch(batch, count)}"
    if fit < batch * count:
        fewer = max(int(fit / count), 1)
        return warned(seen, f"{_MORE_CACHE}; or lower --max-num-seqs to {fewer}")
    return passed(seen)


def _batch(batch: int, count: int) -> str:
    return f"--max-num-seqs {batch}" + (f" on each of {count} ranks" if count > 1 else "")


def preemptions(evidence: AuditEvidence) -> CheckResult:
    """How often running requests were preempted since the engine's start."""
    lost = total_of(evidence, fact.PREEMPTIONS)
    if lost is None:
        return unknown(without_exposition(evidence))
    ended = finished(evidence)
    if not ended:
        return unknown("no request has finished since the engine's start")
    seen = f"{lost:,.0f} in {ended:,.0f} requests since the engine's start"
    if not lost:
        return passed(seen)
    change = f"{_MORE_CACHE}; or lower --max-num-seqs"
    return warned(seen, change) if lost / ended < _FEW_PREEMPTED else failed(seen, change)


def cache_usage(evidence: AuditEvidence) -> CheckResult:
    """Whether requests wait now because the cache is full."""
    used = value_of(evidence, fact.KV_CACHE_USAGE)
    waiting = value_of(evidence, fact.REQUESTS_WAITING)
    if used is None or waiting is None:
        return unknown(without_exposition(evidence))
    seen = f"{100 * used:.0f} % now, {waiting:.0f} requests wait"
    if used < FULL_CACHE:
        return passed(seen)
    return failed(seen, _MORE_CACHE) if waiting else warned(seen, _MORE_CACHE)


def memory_fraction(evidence: AuditEvidence) -> CheckResult:
    """Whether the engine may take a sensible share of the GPU's memory."""
    text = evidence.engine.cache_config.get("gpu_memory_utilization", "")
    try:
        fraction = float(text)
    except ValueError:
        return unknown(without_exposition(evidence))
    if evidence.gpus is not None and not evidence.gpus:
        return unknown("the engine has no GPU")
    seen = f"{fraction:g}"
    if _LOWEST_FRACTION <= fraction <= _HIGHEST_FRACTION:
        return passed(seen)
    nearest = max(_LOWEST_FRACTION, min(_HIGHEST_FRACTION, fraction))
    return warned(seen, f"--gpu-memory-utilization {nearest:g}, unless others share the GPU")


def cache_dtype(evidence: AuditEvidence) -> CheckResult:
    """Whether the format of KV values costs answers or memory without need."""
    chosen = evidence.engine.cache_config.get("cache_dtype", flag(evidence, "--kv-cache-dtype"))
    if chosen is None and (evidence.engine.sample is None or not flags_are_known(evidence)):
        return unknown(without_exposition(evidence))
    if chosen in (None, "auto"):
        return passed("auto, that of the model")
    if chosen in NARROW_CACHES:
        return warned(f"{chosen}, under 8 bits", "--kv-cache-dtype fp8, or compare the answers")
    if chosen == "fp8_e5m2":
        return warned(f"{chosen}: 2 bits of mantissa", "--kv-cache-dtype fp8, which has 3")
    if chosen == "float16" and _weights_dtype(evidence) is Precision.BF16:
        return warned(f"{chosen}, and the model computes in bfloat16", "remove --kv-cache-dtype")
    return passed(chosen)


def _weights_dtype(evidence: AuditEvidence) -> Precision | None:
    """The format that the weights are kept in, if a flag or the model's configuration says."""
    given = flag(evidence, "--dtype")
    if given not in (None, "auto"):
        return _DTYPES.get(given)
    model = evidence.model
    return None if model is None or not flags_are_known(evidence) else model.precision


CACHE_CHECKS = (
    _CACHE_CHECK(
        "prefix caching",
        "without it the engine computes a system prompt or a conversation anew for each request",
        prefix_caching,
    ),
    _CACHE_CHECK(
        "size for the traffic",
        "a cache that holds fewer requests than the batch leaves the GPU half empty",
        cache_size,
    ),
    _CACHE_CHECK(
        "preemptions",
        "a preempted request loses its KV values and computes them again, while its client waits",
        preemptions,
    ),
    _CACHE_CHECK("usage", "requests wait in the queue while the cache is full", cache_usage),
    _CACHE_CHECK(
        "cache dtype",
        "fewer bits hold more requests, and change the answers",
        cache_dtype,
    ),
    _CACHE_CHECK(
        "memory fraction",
        "what is left of the GPU's memory is not cache; with too little left, others run out of it",
        memory_fraction,
    ),
)

_CHECK = partial(AuditCheck, "GPUs")

_BUSY = 0.8
_PLAIN_BITS = 16
# With these the GPU protects itself.
_BRAKES = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake"})
# These keep it within power and temperature as designed: a full GPU has them at most of its clock.
_LIMITS = frozenset({"sw_power_cap", "sw_thermal"})
# Below this share of the highest clock a limit is a warning.
_SLOW_CLOCK = 0.9
_NAME_CONFIG = "name `model_config` of the engine in --config"
_PARALLEL = ("--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size")


def engine_gpus(evidence: AuditEvidence) -> Sequence[GpuSample]:
    """The GPUs that the engine's processes are on; all of them if no list shows that."""
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
            seen = "; ".join(map(_clock_text, found))
            return judged(seen, "check cooling and power supply; nvidia-smi -q -d PERFORMANCE")
    limited = [gpu for gpu in gpus if _held_by(gpu) & _LIMITS]
    return passed("; ".join(map(_clock_text, limited)) or f"nothing on {len(gpus)} GPUs now")


def _held_by(gpu: GpuSample) -> frozenset[str]:
    active = {
        labels[0]
        for (name, labels), value in gpu.facts.items()
        if name == gpu_facts.THROTTLE_ACTIVE.name and value
    }
    return frozenset(active & (_BRAKES | _LIMITS))


def _is_slowed(gpu: GpuSample) -> bool:
    ratio = clock_ratio(gpu)
    return ratio is None or ratio < _SLOW_CLOCK


def _clock_text(gpu: GpuSample) -> str:
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
        return unknown(f"the flags are not numbers: {', '.join(degrees)}")
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


def dtype(evidence: AuditEvidence) -> CheckResult:
    """Whether weights and activations have the format that the model was made for."""
    given = flag(evidence, "--dtype")
    if given is None and not flags_are_known(evidence):
        return unknown(without_flags(evidence))
    chosen = _DTYPES.get(given or "")
    if chosen is Precision.FP32:
        return _in_32_bits(evidence)
    if chosen is not Precision.FP16:
        return passed(given or "not given: that of the model")
    model = evidence.model
    if model is None:
        return unknown(f"{given}; the model's own is not known", _NAME_CONFIG)
    if model.precision is not Precision.BF16 or not _has_bf16(evidence):
        return passed(given or "")
    return warned(
        f"{given}, and the model's own is bfloat16: values over 65,504 become infinite",
        "remove --dtype, or set it to bfloat16",
    )


def _in_32_bits(evidence: AuditEvidence) -> CheckResult:
    if evidence.gpus is None:
        return unknown(f"float32; on a GPU that is slow: {_without_gpus(evidence)}")
    if not evidence.gpus:
        return passed("float32, without a GPU")
    return warned("float32 on a GPU", "remove --dtype: weights take half, and products are faster")


def _has_bf16(evidence: AuditEvidence) -> bool:
    models = [recognise_gpu(gpu.name) for gpu in engine_gpus(evidence)]
    return all(model is None or Precision.BF16 in model.units for model in models)


def quantisation(evidence: AuditEvidence) -> CheckResult:
    """Whether the format of the weights suits the GPU, and leaves enough memory for the cache."""
    model, gpus = evidence.model, engine_gpus(evidence)
    if model is None:
        return unknown(
            evidence.why_unread(EvidencePart.WEIGHTS),
            _NAME_CONFIG,
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
    """Passes weights in 16 bits if the KV cache fits beside them."""
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
    _CHECK(
        "dtype",
        "wider ones cost memory and time, and one with a smaller range changes the answers",
        dtype,
    ),
    _CHECK("utilisation", "requests wait although the GPU has time", utilisation),
    _CHECK(
        "CUDA graphs",
        "without them the CPU starts each kernel, and decoding waits for it",
        cuda_graphs,
    ),
)
