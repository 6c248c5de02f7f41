"""Limits of objectives on latencies, at the edges of the buckets of vLLM's own histograms.

Where a limit is no edge, the rule takes the next edge above it: it fires only when the limit is
surely broken, and is silent about what lies between.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.objective import Objective
from agent.render.alerts.alert_conditions import over_bound
from agent.render.alerts.alert_rule import Alert, Severity
from agent.render.alerts.latency_alerts import Shortcoming, narrow
from agent.render.alerts.number_text import latency, number, percent, percentile
from agent.render.alerts.timings import Timings
from agent.render.alerts.vllm_series import ON_MODEL, own, spellings
from agent.render.promql import by, like, upto

_MINUTE_S = 60

# vLLM's defaults, the same from 0.8 to 0.33: vllm/v1/metrics/loggers.py and buckets.py. With
# --custom-histogram-buckets they are others.
TTFT_EDGES_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TPOT_EDGES_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
DURATION_EDGES_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measure:
    """A latency that objectives limit, and where vLLM's histogram of it has edges."""

    alert: str
    limit: str
    fact: Metric
    edges_s: tuple[float, ...]
    name: str


MEASURES = (
    Measure(
        "VllmTtftOverLimit", "ttft_s", fact.TIME_TO_FIRST_TOKEN, TTFT_EDGES_S, "time to first token"
    ),
    Measure(
        "VllmTpotOverLimit",
        "tpot_s",
        fact.TIME_PER_OUTPUT_TOKEN,
        TPOT_EDGES_S,
        "time per output token",
    ),
    Measure(
        "VllmDurationOverLimit",
        "e2e_s",
        fact.REQUEST_DURATION,
        DURATION_EDGES_S,
        "end-to-end time",
    ),
)


def edge_s(measure: Measure, limit_s: float) -> float | None:
    """The lowest edge that is no lower than the limit; None where the limit is above all."""
    return min((edge for edge in measure.edges_s if edge >= limit_s), default=None)


def vllm_latency_alerts(objective: Objective, timings: Timings) -> Iterator[Alert]:
    """Every alert on the latencies behind one objective."""
    for measure, _, edge in _measured(objective):
        if edge is not None:
            yield _over_limit(objective, measure, edge, timings)
            yield _no_bucket(objective, measure, edge)


def vllm_shortcomings(objectives: Iterable[Objective]) -> Iterator[Shortcoming]:
    """The rules of this module that some objectives cannot have, or not as exactly as promised."""
    for objective in objectives:
        if narrow(objective.match):
            reason = f"vLLM has no label for {' and '.join(narrow(objective.match))}"
            yield Shortcoming(objective.name, "vLLM alone: latency percentiles", reason)
        for measure, limit_s, edge in _measured(objective):
            if edge is None:
                yield Shortcoming(
                    objective.name, measure.alert, "the limit is above every bucket edge"
                )
            elif edge != limit_s:
                reason = f"{latency(limit_s)} is no bucket edge; it speaks of {latency(edge)}"
                yield Shortcoming(objective.name, measure.alert, reason)


def _measured(objective: Objective) -> Iterator[tuple[Measure, float, float | None]]:
    if narrow(objective.match):
        return
    for measure in MEASURES:
        limit_s: float | None = getattr(objective, measure.limit)
        if limit_s is not None:
            yield measure, limit_s, edge_s(measure, limit_s)


def _over_limit(objective: Objective, measure: Measure, edge: float, timings: Timings) -> Alert:
    window = timings.window(10 * _MINUTE_S)
    series = spellings(measure.fact)[0]
    model = like("model_name", objective.match.model)
    return Alert(
        name=measure.alert,
        severity=Severity.TICKET,
        expression=over_bound(
            ON_MODEL,
            window,
            share=number(objective.target),
            within=own(f"{series}_bucket", *model, upto(edge)),
            all_=own(f"{series}_count", *model),
            buckets=own(f"{series}_bucket", *model),
        ),
        hold_s=2 * _MINUTE_S,
        labels={"objective": objective.name},
        summary=f"The {percentile(objective.target)} of {measure.name} of "
        f"{{{{ $labels.model_name }}}} is surely over the limit of objective {objective.name}",
        description=f"The {percentile(objective.target)} of {measure.name} over {window} is about "
        f"{{{{ $value | humanizeDuration }}}}: fewer than {percent(objective.target)} of the "
        f"requests stayed within {latency(edge)}, the bucket edge at or above the limit.",
        dashboard=None,
    )


def _no_bucket(objective: Objective, measure: Measure, edge: float) -> Alert:
    series = spellings(measure.fact)[0]
    model = like("model_name", objective.match.model)
    counted = by(ON_MODEL, own(f"{series}_count", *model))
    inside = by(ON_MODEL, own(f"{series}_bucket", *model, upto(edge)))
    return Alert(
        name="VllmBucketMissing",
        severity=Severity.TICKET,
        expression=f"{counted}\nunless\n{inside}",
        hold_s=10 * _MINUTE_S,
        labels={"objective": objective.name, "measure": measure.limit.removesuffix("_s")},
        summary=f"The {measure.name} of {{{{ $labels.model_name }}}} at {{{{ $labels.instance }}}} "
        f"cannot be held against objective {objective.name}",
        description=f"{series} has no bucket edge at {latency(edge)}, so that {measure.alert} "
        "cannot fire: vLLM runs with --custom-histogram-buckets, and these rules are made for its "
        "own.",
        dashboard=None,
    )
