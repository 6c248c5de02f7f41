"""Alerts on latency percentiles over the limits of objectives."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.records.objective import Match, Objective
from agent.records.request import Status
from agent.render.alerts.alert_conditions import over_bound, share_over
from agent.render.alerts.alert_rule import ENGINE_MODEL, Alert, Severity
from agent.render.alerts.number_text import latency, number, percent, percentile
from agent.render.alerts.objective_alerts import BURN, OUTAGE
from agent.render.alerts.timings import Timings
from agent.render.promql import (
    among,
    buckets_of,
    by,
    count_of,
    like,
    none_of,
    quoted,
    upto,
    value_of,
)

_MINUTE_S = 60
# A promise that breaks badly is told by its budget, as a page that is there sooner than this. What
# looks back is still full of it when that page has ended.
_HOLD_S, _PAGED_LATELY_S = 10.0 * _MINUTE_S, 20 * _MINUTE_S

# What an objective's max_error_ratio speaks of: every end but a good one and a client's own.
FAILED = (Status.ERROR, Status.TIMEOUT, Status.THROTTLED)


@dataclass(frozen=True, slots=True)
class Shortcoming:
    """A rule that an objective cannot have, or only less exact than it is meant, and why."""

    objective: str
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class LimitedLatency:
    """A latency that objectives limit, by the field of the limit."""

    alert: str
    limit: str
    metric: Metric
    name: str


MEASURES = (
    LimitedLatency("LlmTtftOverLimit", "ttft_s", m.TTFT, "time to first token"),
    LimitedLatency("LlmTpotOverLimit", "tpot_s", m.TPOT, "time per output token"),
    LimitedLatency("LlmDurationOverLimit", "e2e_s", m.DURATION, "end-to-end time"),
)


def limits(objective: Objective) -> Iterator[tuple[LimitedLatency, float]]:
    """The latencies that an objective limits, with the limits in seconds."""
    for measure in MEASURES:
        limit_s: float | None = getattr(objective, measure.limit)
        if limit_s is not None:
            yield measure, limit_s


def narrow(match: Match) -> tuple[str, ...]:
    """What an objective asks of requests that no histogram can tell apart."""
    conditions = ("tenant", "route", "min_input_tokens", "max_input_tokens")
    return tuple(name for name in conditions if getattr(match, name) is not None)


def latency_alerts(objective: Objective, timings: Timings) -> Iterator[Alert]:
    """Every alert on the figures behind one objective."""
    if narrow(objective.match):
        return
    for measure, limit_s in limits(objective):
        yield _over_limit(objective, measure, limit_s, timings)
    bound_s = queue_bound_s(objective)
    if bound_s is not None:
        yield _queue_time(objective, bound_s, timings)
    if objective.max_error_ratio is not None:
        yield _errors(objective, objective.max_error_ratio, timings)


def latency_shortcomings(objectives: Iterable[Objective]) -> Iterator[Shortcoming]:
    """The rules of this module that some objectives cannot have."""
    for objective in objectives:
        asked = narrow(objective.match)
        if asked:
            reason = f"histograms have no label for {' and '.join(asked)}"
            yield Shortcoming(
                objective.name, "latency percentiles, queue time, error ratio", reason
            )
        elif objective.ttft_s is not None and queue_bound_s(objective) is None:
            reason = f"no bucket lies at or below half of {latency(objective.ttft_s)}"
            yield Shortcoming(objective.name, "LlmQueueTimeHigh", reason)
        if objective.min_output_tokens_per_s is not None:
            reason = "quiet traffic would look like a broken promise"
            yield Shortcoming(objective.name, "min_output_tokens_per_s", reason)


def queue_bound_s(objective: Objective) -> float | None:
    """The highest edge of the queue's buckets within half of the time to first token promised."""
    if objective.ttft_s is None:
        return None
    half_s = objective.ttft_s / 2
    return max((bound for bound in m.TTFT_BOUNDS_S if bound <= half_s), default=None)


def _over_limit(
    objective: Objective, measure: LimitedLatency, limit_s: float, timings: Timings
) -> Alert:
    labels = (*ENGINE_MODEL, "vantage")
    window = timings.window(10 * _MINUTE_S)
    model = like("model", objective.match.model)
    return Alert(
        name=measure.alert,
        severity=Severity.TICKET,
        expression=over_bound(
            labels,
            window,
            share=number(objective.target),
            within=buckets_of(measure.metric, *model, upto(limit_s)),
            all_=count_of(measure.metric, *model),
            buckets=buckets_of(measure.metric, *model),
        )
        + _unless_paged(objective, timings),
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"The {percentile(objective.target)} of {measure.name} of {{{{ $labels.model }}}} "
        f"on {{{{ $labels.engine }}}} is over the limit of objective {objective.name}",
        description=f"The {percentile(objective.target)} of {measure.name} over {window} is about "
        f"{{{{ $value | humanizeDuration }}}}, taken at the {{{{ $labels.vantage }}}}; "
        f"{percent(objective.target)} of the requests must stay within {latency(limit_s)}.",
        variables=("objective", "engine", "model"),
    )


def _queue_time(objective: Objective, bound_s: float, timings: Timings) -> Alert:
    window = timings.window(10 * _MINUTE_S)
    model = like("model", objective.match.model)
    return Alert(
        name="LlmQueueTimeHigh",
        severity=Severity.TICKET,
        expression=over_bound(
            ENGINE_MODEL,
            window,
            share=number(objective.target),
            within=buckets_of(m.QUEUE, *model, upto(bound_s)),
            all_=count_of(m.QUEUE, *model),
            buckets=buckets_of(m.QUEUE, *model),
        )
        + _unless_paged(objective, timings),
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"Requests to {{{{ $labels.model }}}} on {{{{ $labels.engine }}}} spend the time "
        f"that objective {objective.name} gives them in the queue",
        description=f"The {percentile(objective.target)} of the time in the queue over {window} is "
        f"about {{{{ $value | humanizeDuration }}}}, more than {latency(bound_s)} of the "
        f"{latency(objective.ttft_s or 0)} to the first token.",
        variables=("objective", "engine", "model"),
    )


def _errors(objective: Objective, limit: float, timings: Timings) -> Alert:
    window = timings.window(60 * _MINUTE_S)
    model = like("model", objective.match.model)
    return Alert(
        name="LlmErrorRatioOverLimit",
        severity=Severity.TICKET,
        expression=share_over(
            number(limit),
            ENGINE_MODEL,
            window,
            part=value_of(m.REQUESTS, *model, among("status", FAILED)),
            whole=(value_of(m.REQUESTS, *model, none_of("status", (Status.CANCELLED,))),),
        )
        + _unless_paged(objective, timings),
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"More requests to {{{{ $labels.model }}}} on {{{{ $labels.engine }}}} fail than "
        f"objective {objective.name} allows",
        description=f"{{{{ $value | humanizePercentage }}}} of the requests over {window} failed; "
        f"objective {objective.name} allows {percent(limit)}.",
        variables=("objective", "engine", "model"),
    )


def _unless_paged(objective: Objective, timings: Timings) -> str:
    """The end of an expression: nothing that a page on the same promise has just told."""
    told = (
        f'ALERTS{{alertname=~"{OUTAGE}|{BURN}",objective={quoted(objective.name)},'
        f'severity="{Severity.PAGE}",alertstate="firing"}}'
    )
    lately = f"max_over_time({told}[{timings.window(_PAGED_LATELY_S)}])"
    return f"\nunless on (model)\n{by(('model',), lately, 'max')}"


def all_latency_alerts(objectives: Sequence[Objective], timings: Timings) -> Iterator[Alert]:
    """Those of every objective."""
    for objective in objectives:
        yield from latency_alerts(objective, timings)
