"""Alerts on the limits of objectives: latency percentiles, queue time, and the error ratio."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from inspect import cleandoc

from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.records.objective import Match, Objective
from agent.records.request import BY_CLIENT, FAILED
from agent.render.alerts.alert_rule import (
    ENGINE_MODEL,
    Alert,
    Severity,
    Timings,
    latency,
    not_of_presets,
    number,
    over_bound,
    percent,
    percentile,
    share_over,
)
from agent.render.alerts.thresholds import MIN_EVENTS
from agent.render.links import DashboardUid
from agent.render.promql import among, eq, histogram_of, like, none_of, value_of

# A page on the objective's budget comes sooner than a ticket that must hold for so long.
_HOLD_S = 10.0 * MINUTE_S
_WINDOW_S = 10 * MINUTE_S
_VARIABLES = ("objective", "engine", "model")


@dataclass(frozen=True, slots=True)
class Shortcoming:
    """A rule that an objective cannot have, or only less exact than intended, and the reason."""

    objective: str
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class LimitedLatency:
    """A latency that objectives limit. `limit` is the field of the limit in an Objective."""

    alert: str
    limit: str
    metric: Metric
    name: str

    def limit_s(self, objective: Objective) -> float | None:
        """The limit in seconds; None if the objective has none."""
        found: float | None = getattr(objective, self.limit)
        return found


LATENCIES = (
    LimitedLatency("LlmTtftOverLimit", "ttft_s", m.TTFT, "time to first token"),
    LimitedLatency("LlmTpotOverLimit", "tpot_s", m.TPOT, "time per output token"),
    LimitedLatency("LlmDurationOverLimit", "e2e_s", m.DURATION, "end-to-end time"),
)


def narrow(match: Match) -> tuple[str, ...]:
    """The conditions of an objective for which histograms have no label."""
    names = ("tenant", "route", "min_input_tokens", "max_input_tokens")
    return tuple(name for name in names if getattr(match, name) is not None)


def all_latency_alerts(objectives: Sequence[Objective], timings: Timings) -> Iterator[Alert]:
    """The alerts on the limits of every objective; nobody promised those of a preset."""
    yield _surely_missed(timings)
    for objective in objectives:
        if not (objective.is_preset or narrow(objective.match)):
            yield from _alerts(objective, timings)


def _alerts(objective: Objective, timings: Timings) -> Iterator[Alert]:
    for row in LATENCIES:
        limit_s = row.limit_s(objective)
        if limit_s is not None:
            yield _over_limit(objective, row, limit_s, timings)
    bound_s = _queue_bound_s(objective)
    if bound_s is not None:
        yield _queue_time(objective, bound_s, timings)
    if objective.max_error_ratio is not None:
        yield _errors(objective, objective.max_error_ratio, timings)


def latency_shortcomings(objectives: Iterable[Objective]) -> Iterator[Shortcoming]:
    """The rules of this module that some objectives cannot have."""
    for objective in objectives:
        if objective.is_preset:
            continue
        conditions = narrow(objective.match)
        if conditions:
            reason = f"histograms have no label for {' and '.join(conditions)}"
            yield Shortcoming(
                objective.name, "latency percentiles, queue time, error ratio", reason
            )
        elif objective.ttft_s is not None and _queue_bound_s(objective) is None:
            reason = f"no bucket lies at or below half of {latency(objective.ttft_s)}"
            yield Shortcoming(objective.name, "LlmQueueTimeHigh", reason)
        if objective.min_output_tokens_per_s is not None:
            reason = "low traffic would look like a miss"
            yield Shortcoming(objective.name, "min_output_tokens_per_s", reason)


def _queue_bound_s(objective: Objective) -> float | None:
    """The highest bucket edge of the queue time within half of the limit on TTFT."""
    if objective.ttft_s is None:
        return None
    half_s = objective.ttft_s / 2
    return max((bound for bound in m.TTFT_BOUNDS_S if bound <= half_s), default=None)


def _over_limit(
    objective: Objective, row: LimitedLatency, limit_s: float, timings: Timings
) -> Alert:
    window, share = timings.window(_WINDOW_S), percentile(objective.target)
    model = like("model", objective.match.model)
    condition = over_bound(
        (*ENGINE_MODEL, "vantage"),
        window,
        number(objective.target),
        limit_s,
        histogram_of(row.metric, *model),
        less=_not_of_presets(objective, window),
    )
    return _ticket(
        objective,
        row.alert,
        condition,
        f"The {share} of {row.name} of {{{{ $labels.model }}}} on {{{{ $labels.engine }}}} is over "
        f"the limit of objective {objective.name}",
        f"The {share} of {row.name} over {window} is about {{{{ $value | humanizeDuration }}}}, "
        f"by vantage {{{{ $labels.vantage }}}} (proxy: what users got); "
        f"{percent(objective.target)} of the requests must stay within {latency(limit_s)}.",
    )


def _surely_missed(timings: Timings) -> Alert:
    """The alert on an engine none of whose requests has a row, for all objectives."""
    window = timings.window(_WINDOW_S)
    measured = value_of(m.SLO_ENGINE_REQUESTS)
    above = value_of(m.SLO_ENGINE_REQUESTS, eq("within", m.ABOVE))
    judged, target = value_of(m.SLO_REQUESTS), value_of(m.SLO_TARGET)
    less = not_of_presets(window, on=("instance", "objective"))
    labels = "instance, engine, model, objective"
    by = f"sum by ({labels}, measure)"
    return Alert(
        name="LlmEngineMissesObjective",
        severity=Severity.TICKET,
        expression=cleandoc(f"""
            min by ({labels}) (
              1 - {by} (rate({above}[{window}]){less})
                / ({by} (rate({measured}[{window}]){less}) > 0)
              and
              {by} (increase({above}[{window}]){less}) >= {MIN_EVENTS})
              < on (objective) group_left () max by (objective) ({target})
            unless on ({labels})
            sum by ({labels}) (increase({judged}[{window}])) > 0
        """),
        hold_s=_HOLD_S,
        summary="Requests to {{ $labels.model }} on {{ $labels.engine }} surely miss objective "
        "{{ $labels.objective }}",
        description="By the engine's own histograms at most {{ $value | humanizePercentage }} of "
        f"the requests over {window} were within a limit, and objective {{{{ $labels.objective }}}}"
        " wants more. No request has a row, so single requests and causes are unknown: see "
        "docs/engine-counts.md.",
        dashboard=DashboardUid.OBJECTIVES,
        variables=_VARIABLES,
    )


def _queue_time(objective: Objective, bound_s: float, timings: Timings) -> Alert:
    window = timings.window(_WINDOW_S)
    model = like("model", objective.match.model)
    condition = over_bound(
        ENGINE_MODEL,
        window,
        number(objective.target),
        bound_s,
        histogram_of(m.QUEUE, *model),
        less=_not_of_presets(objective, window),
    )
    return _ticket(
        objective,
        "LlmQueueTimeHigh",
        condition,
        f"Requests to {{{{ $labels.model }}}} on {{{{ $labels.engine }}}} spend the time that "
        f"objective {objective.name} gives them in the queue",
        f"The {percentile(objective.target)} of the time in the queue over {window} is about "
        f"{{{{ $value | humanizeDuration }}}}, more than {latency(bound_s)} of the "
        f"{latency(objective.ttft_s or 0)} to the first token.",
    )


def _errors(objective: Objective, limit: float, timings: Timings) -> Alert:
    window = timings.window(HOUR_S)
    model = like("model", objective.match.model)
    condition = share_over(
        number(limit),
        ENGINE_MODEL,
        window,
        part=value_of(m.REQUESTS, *model, among("status", sorted(FAILED))),
        whole=(value_of(m.REQUESTS, *model, none_of("status", sorted(BY_CLIENT))),),
        less=_not_of_presets(objective, window),
    )
    return _ticket(
        objective,
        "LlmErrorRatioOverLimit",
        condition,
        f"More requests to {{{{ $labels.model }}}} on {{{{ $labels.engine }}}} fail than objective "
        f"{objective.name} allows",
        f"{{{{ $value | humanizePercentage }}}} of the requests over {window} failed; objective "
        f"{objective.name} allows {percent(limit)}.",
    )


def _not_of_presets(objective: Objective, window: str) -> str:
    return not_of_presets(window, eq("objective", objective.name))


def _ticket(
    objective: Objective, name: str, expression: str, summary: str, description: str
) -> Alert:
    return Alert(
        name=name,
        severity=Severity.TICKET,
        expression=expression,
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=summary,
        description=description,
        dashboard=DashboardUid.OBJECTIVES,
        variables=_VARIABLES,
    )
