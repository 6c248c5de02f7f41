"""MFU and MBU of a minute by each source, and why requests, engine and hardware can differ."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import permutations
from math import fsum
from typing import NamedTuple

from agent.analysis.efficiency.engine_observation import EngineObservation, IntervalState
from agent.analysis.efficiency.work import Role, Serving
from agent.catalog import gpu_facts
from agent.records.gpu import GpuSample
from agent.records.minute import EngineWork
from agent.records.model import Work


class Source(StrEnum):
    """Where a figure comes from."""

    REQUESTS = "requests"
    ENGINE = "engine"
    HARDWARE = "hardware"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceUtilisation:
    """MFU and MBU of a minute with its idle time, as ratios; None if the source has no figure.

    `requests` counts what the requests with a row needed at least, over the time that is known.
    `engine` is the engine's own estimate. `hardware` is the activity of the tensor cores at their
    clock, and of the memory.
    """

    source: Source
    mfu: float | None = None
    mbu: float | None = None


def requests_utilisation(work: EngineWork, serving: Serving) -> SourceUtilisation:
    """By what the requests needed, over the known seconds."""
    if work.needed is None:
        return SourceUtilisation(source=Source.REQUESTS)
    mfu, mbu = serving.utilisation(work.needed, work.known_s)
    return SourceUtilisation(source=Source.REQUESTS, mfu=mfu, mbu=mbu)


def counters_utilisation(
    observed: EngineObservation, serving: Serving
) -> tuple[float | None, float | None]:
    """(MFU, MBU) by the engine's token counters, as if all requests were of the mean lengths.

    An estimate without any row: where lengths differ, attention needs somewhat more.
    """
    work = _counted_work(observed, serving)
    read = [each for each in observed.intervals if each.state is not IntervalState.UNREAD]
    seconds = fsum(each.time.within(observed.time).length_s for each in read)
    return (None, None) if work is None else serving.utilisation(work, seconds)


def _counted_work(observed: EngineObservation, serving: Serving) -> Work | None:
    """None if tokens or the model are unknown, or while no request began: then no prompt is known.

    Output tokens are shared by as many requests as began, ended or ran, whichever are most: in
    a burst that drains, few begin.
    """
    increase = observed.increase
    computed, output = increase.computed_tokens, increase.output_tokens
    if serving.model is None or computed is None or output is None:
        return None
    if not computed + output:
        return Work(0.0, 0.0)
    known = increase.first_tokens is not None
    began = increase.first_tokens if known else increase.finished
    if not began:
        return None
    prompt, cached = (round(n / began) for n in (computed, increase.cached_tokens or 0.0))
    generating = max(began, increase.finished or 0.0, _mean_running(observed))
    each = max(round(output / generating), 2)
    decoded = max(output - began, 0.0)
    prefill, decode = Work(0.0, 0.0), Work(0.0, 0.0)
    if serving.role is not Role.DECODE and prompt:
        prefill = _times(computed / prompt, serving.prefill(prompt, cached))
    if serving.role is not Role.PREFILL:
        decode = _times(decoded / (each - 1), serving.decode(prompt + cached, each))
    weights = serving.weight_bytes(_steps(observed, decoded), computed + decoded)
    moved = prefill.bytes_moved + decode.bytes_moved + weights
    return Work(prefill.flops + decode.flops, moved)


def _times(factor: float, work: Work) -> Work:
    return Work(work.flops * factor, work.bytes_moved * factor)


def _steps(observed: EngineObservation, decoded: float) -> float:
    """As the engine counted them, else as many as decode takes with the requests that ran."""
    if observed.increase.steps is not None:
        return observed.increase.steps
    return decoded / max(_mean_running(observed), 1.0)


def _mean_running(observed: EngineObservation) -> float:
    """How many requests ran at once; 0 if that is unknown."""
    known = [each for each in observed.intervals if each.mean_running is not None]
    length_s = fsum(each.time.length_s for each in known)
    together_s = fsum((each.mean_running or 0.0) * each.time.length_s for each in known)
    return together_s / length_s if length_s else 0.0


def engine_utilisation(observed: EngineObservation, serving: Serving) -> SourceUtilisation:
    """By the engine's own counters, over the time in which it counted."""
    seconds = fsum(
        interval.time.within(observed.time).length_s
        for interval in observed.intervals
        if interval.increase.flops is not None
    )
    increase = observed.increase
    if increase.flops is None:
        return SourceUtilisation(source=Source.ENGINE)
    moved = (increase.read_bytes or 0.0) + (increase.written_bytes or 0.0)
    # The counters are of one GPU of each rank, summed over the ranks.
    gpus = serving.parallelism.gpus / observed.ranks
    mfu, mbu = serving.utilisation(Work(increase.flops * gpus, moved * gpus), seconds)
    known = increase.read_bytes is not None
    return SourceUtilisation(source=Source.ENGINE, mfu=mfu, mbu=mbu if known else None)


def hardware_utilisation(samples: Iterable[GpuSample]) -> SourceUtilisation:
    """By the GPUs' counters: the mean over the samples of each GPU, then over the GPUs."""
    of_gpu: defaultdict[str, list[GpuSample]] = defaultdict(list)
    for sample in samples:
        of_gpu[sample.gpu].append(sample)
    return SourceUtilisation(
        source=Source.HARDWARE,
        mfu=_mean([_activity(of_one, _tensor_share) for of_one in of_gpu.values()]),
        mbu=_mean([_activity(of_one, _memory_share) for of_one in of_gpu.values()]),
    )


def _activity(
    samples: Sequence[GpuSample], share_in: Callable[[GpuSample], float | None]
) -> float | None:
    """The mean over one GPU's samples.

    None if all are 0 although kernels ran: profiling counters that stand still read 0.
    """
    shares = [share_in(sample) for sample in samples]
    if not any(shares) and any(map(_in_use, samples)):
        return None
    return _mean(shares)


def _in_use(sample: GpuSample) -> bool:
    return bool(sample.fact(gpu_facts.UTILIZATION.name))


def _tensor_share(sample: GpuSample) -> float | None:
    active, speed = sample.fact(gpu_facts.TENSOR_ACTIVE.name), clock_ratio(sample)
    return None if active is None or speed is None else active * speed


def _memory_share(sample: GpuSample) -> float | None:
    return sample.fact(gpu_facts.DRAM_ACTIVE.name)


def clock_ratio(sample: GpuSample) -> float | None:
    """The SM clock over its maximum, at which peaks are stated; at most 1, None if unknown."""
    now = sample.fact(gpu_facts.CLOCK.name, "sm")
    highest = sample.fact(gpu_facts.CLOCK_MAX.name, "sm")
    return min(now / highest, 1.0) if now is not None and highest else None


def _mean(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return fsum(known) / len(known) if known else None


# How much larger the first source's figure may be than the second's before they disagree. What the
# requests needed at least cannot be more than what the hardware did, so that margin is small.
MARGIN = 0.25
MARGINS = {(Source.REQUESTS, Source.HARDWARE): 0.05}

# Below this share of a peak, kernel launches and the rounding of counters decide.
FLOOR = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What was true in the minute that can make its figures differ."""

    drafts: bool = False
    preempted: bool = False
    unseen: bool = False
    long_prompts: bool = False
    experts: bool = False
    latents: bool = False
    replicas: bool = False
    quantised: bool = False
    slow_clock: bool = False
    still_counters: bool = False


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A figure (`mfu` or `mbu`) that is `times` as high by one source as by another.

    `times` is None if the lower figure is 0. `causes` are sentences, likely ones first: those
    with a condition that held in the minute, then those that leave no trace. `cause` is the name of
    the first.
    """

    figure: str
    higher: Source
    lower: Source
    times: float | None
    cause: str
    causes: tuple[str, ...]


class _LikelyCause(NamedTuple):
    """A name, a sentence, and whether its condition held; None if it leaves no trace."""

    name: str
    text: str
    holds: Callable[[Conditions], bool] | None = None


_R, _E, _H = Source.REQUESTS, Source.ENGINE, Source.HARDWARE

# From vLLM's estimator (vllm/v1/metrics/perf.py, 0.33) and from what GPUs count.
_BEYOND_ROWS = (
    _LikelyCause(
        "rejected_drafts",
        "rejected drafted tokens are work, but belong to no request",
        lambda seen: seen.drafts,
    ),
    _LikelyCause(
        "preemptions", "preempted requests were computed again", lambda seen: seen.preempted
    ),
    _LikelyCause(
        "requests_without_a_row",
        "requests without a row were at work: given up, refused or still running",
        lambda seen: seen.unseen,
    ),
)
_SQUARE = _LikelyCause(
    "masked_scores",
    "the engine counts attention to later tokens too, twice the scores of a long prompt",
    lambda seen: seen.long_prompts,
)
_OTHERS = _LikelyCause(
    "padding_or_adapters", "the engine counts padding, or the work of adapters and encoders"
)
_ALL_EXPERTS = _LikelyCause(
    "experts_counted_apart",
    "the engine assumes that each token reads experts of its own",
    lambda seen: seen.experts,
)
_ACTIVATIONS = _LikelyCause(
    "activations", "the engine counts activations, which kernels mostly keep on the chip"
)
_GUESSED = _LikelyCause(
    "guessed_weight_width",
    "the engine guesses the width of quantised weights from the method's name",
    lambda seen: seen.quantised,
)
_SPREAD = _LikelyCause(
    "divided_by_ranks",
    "the engine divides the work of feed-forward layers by its data-parallel ranks",
    lambda seen: seen.replicas,
)
_EXPANDED = _LikelyCause(
    "latents_counted_expanded",
    "the engine counts latent attention (MLA) as if keys and values were cached: decode attends to "
    "the longer latents, and a prefill expands those of its cached tokens again",
    lambda seen: seen.latents,
)
_DROPPED = _LikelyCause(
    "part_of_the_model", "the engine leaves out a part of the model that its estimate cannot read"
)
_PADDING = _LikelyCause(
    "padding_or_other_programs",
    "tiles and CUDA graphs are padded, other programs share the GPU, or its peak is a sparse one",
)
_REREADS = _LikelyCause(
    "activations_or_other_programs",
    "activations, re-reads of the cache or other programs move bytes",
)
_CLOCK = _LikelyCause(
    "slow_clock",
    "the clock was below its maximum, and the samples caught it at another moment",
    lambda seen: seen.slow_clock,
)
_STILL = _LikelyCause(
    "counters_stand_still",
    "the GPU's counters stand still: NVIDIA's profiling interface may need a restart",
    lambda seen: seen.still_counters,
)
_FEW_EXPERTS = _LikelyCause(
    "fewer_experts",
    "fewer experts were read than if each token chose at random",
    lambda seen: seen.experts,
)
_L2 = _LikelyCause("l2_cache", "the L2 cache served bytes that are counted as read from memory")
_WRONG = _LikelyCause(
    "wrong_configuration",
    "the model, its precision or the GPU's peak is not the one that is configured",
)

_CAUSES: Mapping[tuple[str, Source, Source], tuple[_LikelyCause, ...]] = {
    ("mfu", _E, _R): (*_BEYOND_ROWS, _SQUARE, _OTHERS),
    ("mbu", _E, _R): (*_BEYOND_ROWS, _ALL_EXPERTS, _ACTIVATIONS),
    ("mfu", _H, _R): (*_BEYOND_ROWS, _PADDING),
    ("mbu", _H, _R): (*_BEYOND_ROWS, _REREADS),
    ("mfu", _R, _E): (_EXPANDED, _SPREAD, _DROPPED),
    ("mbu", _R, _E): (_GUESSED, _SPREAD, _DROPPED),
    ("mfu", _H, _E): (_EXPANDED, _SPREAD, _DROPPED),
    ("mbu", _H, _E): (_GUESSED, _SPREAD, _DROPPED),
    ("mfu", _R, _H): (_STILL, _CLOCK, _WRONG),
    ("mbu", _R, _H): (_STILL, _FEW_EXPERTS, _L2, _WRONG),
    ("mfu", _E, _H): (_STILL, _SQUARE, _WRONG),
    ("mbu", _E, _H): (_STILL, _ALL_EXPERTS, _ACTIVATIONS, _WRONG),
}


def disagreements(
    sources: Sequence[SourceUtilisation], conditions: Conditions
) -> tuple[Disagreement, ...]:
    """Each pair of sources that both know a figure and differ by more than the margin."""
    return tuple(
        found
        for higher, lower in permutations(sources, 2)
        for found in (
            *_compared("mfu", (higher.source, higher.mfu), (lower.source, lower.mfu), conditions),
            *_compared("mbu", (higher.source, higher.mbu), (lower.source, lower.mbu), conditions),
        )
    )


def _compared(
    figure: str,
    higher: tuple[Source, float | None],
    lower: tuple[Source, float | None],
    conditions: Conditions,
) -> Iterator[Disagreement]:
    (more, high), (less, low) = higher, lower
    if high is None or low is None or high < FLOOR:
        return
    if high <= low * (1 + MARGINS.get((more, less), MARGIN)):
        return
    times = high / low if low > 0 else None
    likely = _likely_first(_CAUSES[figure, more, less], conditions)
    texts = tuple(cause.text for cause in likely)
    yield Disagreement(figure, more, less, times, likely[0].name, texts)


def _likely_first(causes: Sequence[_LikelyCause], conditions: Conditions) -> list[_LikelyCause]:
    held = [cause for cause in causes if cause.holds is not None and cause.holds(conditions)]
    return held + [cause for cause in causes if cause.holds is None]
