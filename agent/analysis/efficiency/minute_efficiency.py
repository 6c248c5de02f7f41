"""How well an engine's GPUs were used in one minute: its seconds, tokens, work and roofline."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agent.analysis.efficiency.busy_time import time_parts
from agent.analysis.efficiency.disagreement import (
    Conditions,
    Disagreement,
    SourceUtilisation,
    clock_ratio,
    counters_utilisation,
    disagreements,
    engine_utilisation,
    hardware_utilisation,
    requests_utilisation,
)
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import Activities, TimeRange, TimeRanges, covered_s
from agent.analysis.efficiency.work import (
    RequestWorks,
    Serving,
    Steps,
    StepSource,
    TokenWork,
    count_steps,
    seen_work,
    unseen_tokens,
    unseen_work,
)
from agent.records.columns import over
from agent.records.gpu import GpuSample
from agent.records.minute import EngineWork
from agent.records.model import ModelShape, WeightBlock, Work

# Of all tokens. Below this, a part without known times is small enough to ignore, and unseen
# output tokens may be those that the cuts between minutes blur.
_FEW = 0.05


# Figures that are the engine's own counts.
_ENGINES_COUNTS = (
    *("preemptions", "drafts", "draft_tokens", "accepted_draft_tokens"),
    *("prefix_query_tokens", "prefix_hit_tokens"),
)


def engine_work(
    observed: EngineObservation,
    active: Activities,
    works: RequestWorks,
    serving: Serving,
) -> tuple[EngineWork, StepSource | None]:
    """What the engine did, and how its steps were counted; `works` are those in the observed time.

    Work of the phases is unknown if the model is, or if no request with a row worked and the
    engine was not idle for at least half of the time; with weights alone but for decode's bytes.
    """
    time, increase = observed.time, observed.increase
    parts = time_parts(observed, active)
    output_tokens = float(works.output_tokens.sum())
    found = EngineWork(
        **parts._asdict(),
        computed_tokens=float(works.computed.tokens.sum()),
        cached_tokens=float(works.cached_tokens.sum()),
        output_tokens=output_tokens,
        counted_output_tokens=output_tokens + unseen_tokens(observed, active).output,
        cache_full_s=min(observed.cache_full_s, parts.busy_s),
        **{name: getattr(increase, name) for name in _ENGINES_COUNTS},
        **observed.batch._asdict(),
    )
    unseen = not works.active.rows.size and parts.idle_s < time.length_s / 2
    if unseen or not serving.knows_weights:
        return found, None
    totals, decode_s = _totals(observed, active, works, serving), covered_s(_decoding(works), time)
    decoded = replace(found, decode_s=decode_s, decode_bytes=totals.decode.bytes_moved)
    if serving.model is None:
        return decoded, totals.steps
    phases = replace(
        decoded,
        prefill_s=_prefill_s(works, time),
        prefill_flops=totals.prefill.flops,
        prefill_bytes=totals.prefill.bytes_moved,
        decode_flops=totals.decode.flops,
        shared_bytes=totals.shared_bytes,
    )
    return phases, totals.steps


def _prefill_s(works: RequestWorks, time: TimeRange) -> float | None:
    """Seconds in which any prompt was computed; None if too many have no length."""
    tokens, prefill = works.computed.tokens, works.active.prefill
    untimed = float(tokens[prefill.length_s == 0].sum())
    return None if untimed > _FEW * float(tokens.sum()) else covered_s(prefill, time)


def _decoding(works: RequestWorks) -> TimeRanges:
    return works.active.decode.chosen(works.decodes)


class _Totals(NamedTuple):
    """The rows' work by phase, and the bytes of weights that are in both."""

    prefill: Work
    decode: Work
    shared_bytes: float
    steps: StepSource


def _totals(
    observed: EngineObservation,
    active: Activities,
    works: RequestWorks,
    serving: Serving,
) -> _Totals:
    """Prefill and decode of the rows, with the weights that steps read for them."""
    seen = seen_work(works)
    unseen = unseen_work(seen, unseen_tokens(observed, active), serving)
    prompts = seen.prefill.tokens + unseen.prefill.tokens
    decoded = seen.decode.tokens + unseen.decode.tokens
    steps = count_steps(observed, works, decoded)
    prompts_of_rows, decode_of_rows = _share(seen.prefill.tokens, prompts), 1.0
    if unseen.decode.tokens > _FEW * decoded:
        of_rows = _steps_of_rows(works, observed.time)
        decode_of_rows = min(_share(of_rows, steps.decode), 1.0)
    prefilling = _prefilling_steps(works, prompts_of_rows, steps, observed.time)
    prefill_bytes = serving.weight_bytes(prefilling, prompts)
    decode_bytes = serving.weight_bytes(steps.decode, decoded)
    shared_bytes = min(
        prefill_bytes - serving.weight_bytes(steps.prefill, prompts),
        decode_bytes * _share(min(prefilling - steps.prefill, steps.decode), steps.decode),
    )
    return _Totals(
        _with_weights(seen.prefill, prefill_bytes * prompts_of_rows),
        _with_weights(seen.decode, decode_bytes * decode_of_rows),
        shared_bytes * prompts_of_rows * decode_of_rows,
        steps.source,
    )


def _prefilling_steps(works: RequestWorks, of_rows: float, steps: Steps, time: TimeRange) -> float:
    """Steps that computed prompts, including those that decoded too.

    Prompts that were computed at the same time are taken to share one step. Each prompt took at
    least one step: engines do not count steps that compute only a part of a prompt.
    """
    tokens, whole = works.computed.tokens, works.active.computed_tokens
    prompts = float(over(tokens, whole).sum())
    ranges = works.active.prefill.chosen(tokens > 0)
    together_s = float(ranges.within_s(time).sum())
    at_once = _share(together_s, covered_s(ranges, time))
    at_most = max(steps.prefill + steps.decode, 1.0)
    return max(steps.prefill, min(_share(prompts / max(at_once, 1.0), of_rows), at_most))


def _steps_of_rows(works: RequestWorks, time: TimeRange) -> float:
    """Steps in which a request with a row decoded: their tokens over how many did so at once."""
    decoding, tokens = _decoding(works), float(works.decode.tokens.sum())
    together_s = float(decoding.within_s(time).sum())
    return tokens * _share(covered_s(decoding, time), together_s)


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _with_weights(work: TokenWork, weight_bytes: float) -> Work:
    return Work(work.flops, work.kv_bytes + weight_bytes)


# From this prompt length on, scores without the causal half add more than a tenth of the FLOPs.
_LONG_PROMPT = 8000
# Of the tokens that the engine counted; below this the cuts between minutes blur the difference.
_MANY_UNSEEN = 0.05
_SLOW_CLOCK = 0.9
# Of a minute; with more of it unknown, the requests' figures are over less time than the others'.
_MUCH_UNKNOWN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteEfficiency:
    """The figures of one minute. `counters` is (MFU, MBU).

    `steps` is None if the work of its phases is unknown.
    """

    work: EngineWork
    steps: StepSource | None
    requests: SourceUtilisation
    counters: tuple[float | None, float | None]
    engine: SourceUtilisation
    hardware: SourceUtilisation
    disagreements: tuple[Disagreement, ...]


def minute_efficiency(
    observed: EngineObservation,
    works: RequestWorks,
    serving: Serving,
    gpu_samples: Sequence[GpuSample] = (),
) -> MinuteEfficiency:
    """The minute by its requests, its engine and its GPUs.

    `works` are whole, of all requests that overlap an interval of `observed`. `gpu_samples` are
    those of the engine's GPUs; only samples in the minute count.
    """
    in_minute = _in_time(gpu_samples, observed.time)
    active = works.active
    work, steps = engine_work(observed, active, works.part_in(observed.time), serving)
    requests = requests_utilisation(work, serving)
    engine = engine_utilisation(observed, serving)
    hardware = hardware_utilisation(in_minute)
    conditions = _conditions(observed, active, serving, in_minute, hardware)
    much_known = work.known_s >= (1 - _MUCH_UNKNOWN) * observed.time.length_s
    comparable = (requests, engine, hardware) if much_known else (engine, hardware)
    return MinuteEfficiency(
        work=work,
        steps=steps,
        requests=requests,
        counters=counters_utilisation(observed, serving),
        engine=engine,
        hardware=hardware,
        disagreements=disagreements(comparable, conditions),
    )


def _in_time(samples: Iterable[GpuSample], time: TimeRange) -> list[GpuSample]:
    """The samples in a time, with its end: a sample is of the moments before it."""
    return [sample for sample in samples if time.from_at < sample.at <= time.until]


def _conditions(
    observed: EngineObservation,
    active: Activities,
    serving: Serving,
    gpu_samples: Sequence[GpuSample],
    hardware: SourceUtilisation,
) -> Conditions:
    increase, model = observed.increase, serving.model
    clocks = [ratio for sample in gpu_samples if (ratio := clock_ratio(sample)) is not None]
    return Conditions(
        drafts=bool(increase.draft_tokens),
        preempted=bool(increase.preemptions),
        unseen=_many_unseen(observed, active),
        long_prompts=bool((active.computed_tokens >= _LONG_PROMPT).any()),
        experts=model is not None and _any_block(model, lambda block: block.copies > 1),
        latents=model is not None
        and any(each.expand_flops for group in model.groups for each in group.attentions),
        replicas=serving.parallelism.data > 1,
        quantised=model is not None
        and _any_block(model, lambda block: block.format.bits < model.precision.bits),
        slow_clock=bool(clocks) and min(clocks) < _SLOW_CLOCK,
        still_counters=hardware.mfu == 0 or hardware.mbu == 0,
    )


def _many_unseen(observed: EngineObservation, active: Activities) -> bool:
    counted = (observed.increase.computed_tokens or 0.0, observed.increase.output_tokens or 0.0)
    unseen = unseen_tokens(observed, active)
    pairs = zip((unseen.computed, unseen.output), counted, strict=True)
    return any(more > _MANY_UNSEEN * all_ for more, all_ in pairs)


def _any_block(model: ModelShape, holds: Callable[[WeightBlock], bool]) -> bool:
    return any(holds(block) for group in model.groups for block in group.blocks)
