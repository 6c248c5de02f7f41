"""How well an engine's GPUs were used in one minute, and why the sources disagree."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from agent.analysis.efficiency.disagreement import Conditions, Disagreement, disagreements
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.phase_work import engine_work
from agent.analysis.efficiency.request_activity import Activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.source_utilisation import (
    SourceUtilisation,
    clock_ratio,
    engine_utilisation,
    hardware_utilisation,
    requests_utilisation,
)
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.efficiency.work import RequestWorks, StepSource, unseen_tokens
from agent.records.gpu import GpuSample
from agent.records.minute import EngineWork
from agent.records.model import ModelShape, WeightBlock

# From this prompt length on, scores without the causal half add more than a tenth of the FLOPs.
_LONG_PROMPT = 8000
# Of the tokens that the engine counted; below this the cuts between minutes blur the difference.
_MANY_UNSEEN = 0.05
_SLOW_CLOCK = 0.9
# Of a minute; with more of it unknown, the requests' figures are over less time than the others'.
_MUCH_UNKNOWN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteEfficiency:
    """The figures of one minute. `steps` is None where the work of its phases is unknown."""

    work: EngineWork
    steps: StepSource | None
    requests: SourceUtilisation
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
    growth, model = observed.growth, serving.model
    clocks = [ratio for sample in gpu_samples if (ratio := clock_ratio(sample)) is not None]
    return Conditions(
        drafts=bool(growth.draft_tokens),
        preempted=bool(growth.preemptions),
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
    counted = (observed.growth.computed_tokens or 0.0, observed.growth.output_tokens or 0.0)
    unseen = unseen_tokens(observed, active)
    pairs = zip((unseen.computed, unseen.output), counted, strict=True)
    return any(more > _MANY_UNSEEN * all_ for more, all_ in pairs)


def _any_block(model: ModelShape, holds: Callable[[WeightBlock], bool]) -> bool:
    return any(holds(block) for group in model.groups for block in group.blocks)
