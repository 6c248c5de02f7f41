"""Everything that can be said of how well a window's GPUs were used."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from agent.analysis.efficiency.disagreement import Conditions, Disagreement, disagreements
from agent.analysis.efficiency.observation import Observation
from agent.analysis.efficiency.phase_work import PhaseTotals, phases
from agent.analysis.efficiency.request_activity import RequestActivity, request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.source_utilisation import (
    Source,
    SourceUtilisation,
    clock_ratio,
    engine_utilisation,
    hardware_utilisation,
    requests_utilisation,
)
from agent.analysis.efficiency.work import requests_work, unseen_tokens
from agent.records.gpu import GpuSample
from agent.records.model import ModelShape, WeightBlock
from agent.records.request import RequestRecord

# From here on counting scores without the causal half adds more than a tenth to a prefill's FLOPs.
_LONG_PROMPT = 8000
# Of the tokens that the engine counted; less is what the edges of windows blur.
_MANY_UNSEEN = 0.05
_SLOW_CLOCK = 0.9
# Of a window; with more of it unknown, the requests are told for another time than the others.
_MUCH_UNKNOWN = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteEfficiency:
    """A window. `phases` is None where the model is not known."""

    phases: PhaseTotals | None
    requests: SourceUtilisation
    engine: SourceUtilisation
    hardware: SourceUtilisation
    disagreements: tuple[Disagreement, ...]


def minute_efficiency(
    observed: Observation,
    rows: Iterable[RequestRecord],
    serving: Serving,
    gpu_samples: Sequence[GpuSample] = (),
) -> MinuteEfficiency:
    """The window as its requests, its engine and its GPUs tell it.

    `rows` are one for each request that overlaps `observed.reach`; the samples are those of the
    engine's GPUs.
    """
    active = request_activities(rows, observed.growth.cached_share)
    loads = requests_work(active, serving, observed.window)
    found = phases(observed, active, loads, serving)
    views = (
        requests_utilisation(found, serving),
        engine_utilisation(observed, serving),
        hardware_utilisation(gpu_samples, observed.window),
    )
    requests, engine, hardware = views
    signs = replace(
        _signs(observed, active, serving, gpu_samples),
        still_counters=hardware.mfu == 0 or hardware.mbu == 0,
    )
    return MinuteEfficiency(
        phases=found,
        requests=requests,
        engine=engine,
        hardware=hardware,
        disagreements=disagreements(_comparable(views, found, observed), signs),
    )


def _comparable(
    views: Sequence[SourceUtilisation], found: PhaseTotals | None, observed: Observation
) -> Sequence[SourceUtilisation]:
    """Those that tell of the same time."""
    length_s = observed.window.length_s
    if found is None or found.known_s >= (1 - _MUCH_UNKNOWN) * length_s:
        return views
    return [view for view in views if view.source is not Source.REQUESTS]


def _signs(
    observed: Observation,
    active: Sequence[RequestActivity],
    serving: Serving,
    gpu_samples: Sequence[GpuSample],
) -> Conditions:
    growth, model = observed.growth, serving.model
    clocks = [ratio for sample in gpu_samples if (ratio := clock_ratio(sample)) is not None]
    return Conditions(
        drafts=bool(growth.draft_tokens),
        preempted=bool(growth.preemptions),
        unseen=_many_unseen(observed, active),
        long_prompts=any(activity.computed_tokens >= _LONG_PROMPT for activity in active),
        experts=model is not None and _any_block(model, lambda block: block.copies > 1),
        replicas=serving.parallelism.data > 1,
        quantised=model is not None
        and _any_block(model, lambda block: block.format.bits < model.precision.bits),
        slow_clock=bool(clocks) and min(clocks) < _SLOW_CLOCK,
    )


def _many_unseen(observed: Observation, active: Sequence[RequestActivity]) -> bool:
    counted = (observed.growth.computed_tokens or 0.0, observed.growth.output_tokens or 0.0)
    unseen = unseen_tokens(observed, active)
    return any(
        more > _MANY_UNSEEN * all_of_them for more, all_of_them in zip(unseen, counted, strict=True)
    )


def _any_block(model: ModelShape, holds: Callable[[WeightBlock], bool]) -> bool:
    return any(holds(block) for group in model.groups for block in group.blocks)
