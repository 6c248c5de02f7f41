"""Alerts on objectives: burn rates of error budgets, outages, undetermined verdicts."""

from collections.abc import Iterator, Sequence
from decimal import Decimal

from agent.analysis.burn_rates import MIN_MISSED, TIERS, Burn, OutageRule, plan
from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.records.objective import Objective
from agent.render.alerts.alert_conditions import conditions, fired, share_over, worst
from agent.render.alerts.alert_rule import OBJECTIVE, Alert, Recording, Severity
from agent.render.alerts.explained_misses import EXPLAINED, explained
from agent.render.alerts.number_text import number, percent, span
from agent.render.alerts.objective_agreement import differs, not_published
from agent.render.alerts.timings import Timings
from agent.render.promql import among, by, eq, filled, quoted, value_of

OUTAGE, BURN = "LlmObjectiveOutage", "LlmObjectiveBudgetBurn"
# The windows already smooth; the hold time only skips a single odd evaluation.
HOLD_S = 2.0 * MINUTE_S
_LEVEL = "objective_model:llm_slo_missed"

_MISSED = eq("verdict", Verdict.MISSED)
_JUDGED = among("verdict", (Verdict.MET, Verdict.MISSED))


def _worst(verdict: Verdict) -> str:
    """A template for the engine of the model with the most requests of a verdict."""
    matchers = (eq("verdict", verdict), filled("objective"), filled("model"))
    counted = f"increase({value_of(m.SLO_REQUESTS, *matchers)}[5m])"
    return worst(by(("engine",), counted), "objective", "model")


def _on_worst(verdict: Verdict) -> str:
    return f"{_worst(verdict)}&var-engine={{{{ .Labels.engine | urlquery }}}}{{{{ end }}}}"


def _most_on(verdict: Verdict) -> str:
    return f"{_worst(verdict)} Most of them now on engine {{{{ .Labels.engine }}}}.{{{{ end }}}}"


def _most_excess(window: str) -> str:
    """A template for the cause with the most excess seconds, once there are any."""
    matchers = (filled("objective"), filled("model"))
    excess = f"increase({value_of(m.SLO_MISSED_SECONDS, *matchers)}[{window}])"
    share = f"{by(('cause',), excess)} / scalar(sum({excess}))"
    return (
        f"{worst(share, *2 * OBJECTIVE)} Most of their excess seconds over {window} "
        f"({{{{ .Value | humanizePercentage }}}}): "
        f'{{{{ reReplaceAll "_" " " .Labels.cause }}}}.{{{{ end }}}}'
    )


def ratio_name(window: str) -> str:
    """The recording of the share of judged requests that missed, by objective and model."""
    return f"{_LEVEL}:ratio_rate{window}"


def missed_name(window: str) -> str:
    """The recording of the number of requests that missed, by objective and model."""
    return f"{_LEVEL}:increase{window}"


def recordings(objectives: Sequence[Objective], timings: Timings) -> Iterator[Recording]:
    """The shares and numbers of misses over every window of an alert."""
    plans = [plan(objective.target, objective.window_s) for objective in objectives]
    long = {burn.long_s for found in plans for burn in found.kept}
    short = {burn.short_s for found in plans for burn in found.kept}
    outages = {found.outage.window_s for found in plans if found.outage}
    every = long | short | outages
    counted = dict.fromkeys(timings.window(seconds) for seconds in sorted(long | outages))
    for window in dict.fromkeys(timings.window(seconds) for seconds in sorted(every)):
        yield Recording(ratio_name(window), _missed_ratio(window))
    for window in counted:
        missed = f"increase({value_of(m.SLO_REQUESTS, _MISSED)}[{window}])"
        yield Recording(missed_name(window), by(OBJECTIVE, missed))


def _missed_ratio(window: str) -> str:
    missed = by(OBJECTIVE, f"rate({value_of(m.SLO_REQUESTS, _MISSED)}[{window}])")
    judged = by(OBJECTIVE, f"rate({value_of(m.SLO_REQUESTS, _JUDGED)}[{window}])")
    # No value without traffic: 0/0 would make every average over it NaN.
    return f"{missed}\n  / ({judged} > 0)"


def objective_alerts(objective: Objective, timings: Timings) -> Iterator[Alert]:
    """Every alert on one objective."""
    found = plan(objective.target, objective.window_s)
    # This alert mutes the others, so it comes first.
    yield explained(objective, timings)
    if found.outage:
        yield _outage(objective, found.outage, timings)
    for burn in found.kept:
        yield _burn(objective, burn, timings)
    yield _undetermined(objective, timings)
    yield not_published(objective)
    yield differs(objective)


def _burn(objective: Objective, burn: Burn, timings: Timings) -> Alert:
    long, short = timings.window(burn.long_s), timings.window(burn.short_s)
    return Alert(
        name=BURN,
        severity=Severity.PAGE if burn.tier.pages else Severity.TICKET,
        expression=_missed_more(objective, burn.threshold, (long, short))
        + _unless_paged(objective, burn, timings),
        hold_s=HOLD_S,
        labels={"objective": objective.name, "tier": str(burn.tier.number)},
        summary=f"{{{{ $labels.model }}}} uses the error budget of objective {objective.name} at "
        f"{number(burn.tier.factor)} times the allowed rate or more",
        description=f"{{{{ $value | humanizePercentage }}}} of the judged requests to "
        f"{{{{ $labels.model }}}} missed objective {objective.name} over {long}; "
        f"{percent(1 - Decimal(str(objective.target)))} is allowed. Above "
        f"{percent(burn.threshold)} the budget of {span(objective.window_s)} lasts no longer than "
        f"{span(objective.window_s / float(burn.tier.factor))}.{_most_on(Verdict.MISSED)}"
        f"{_most_excess(short)}",
        variables=OBJECTIVE,
        back_s=round(max(burn.long_s, HOUR_S)),
        more=_on_worst(Verdict.MISSED),
    )


def _unless_paged(objective: Objective, burn: Burn, timings: Timings) -> str:
    """The end of the expression of a slower page: no page soon after a quicker one.

    The misses of a quicker page that has ended are still in the slower page's window. The same
    holds for misses that a page on an engine explains. Tickets have no such end: their windows are
    days.
    """
    if burn.tier is TIERS[0] or not burn.tier.pages:
        return ""
    # The alert on an outage has no tier.
    quicker = (eq("objective", objective.name), among("tier", ("", TIERS[0].number)))
    lately = fired((OUTAGE, BURN, EXPLAINED), OBJECTIVE, timings.window(burn.short_s), *quicker)
    return f"\nunless\n{lately}"


def _outage(objective: Objective, outage: OutageRule, timings: Timings) -> Alert:
    window = timings.window(outage.window_s)
    return Alert(
        name=OUTAGE,
        severity=Severity.PAGE,
        expression=_missed_more(objective, outage.threshold, (window,)),
        hold_s=HOLD_S,
        labels={"objective": objective.name},
        summary=f"Most requests to {{{{ $labels.model }}}} miss objective {objective.name}",
        description=f"{{{{ $value | humanizePercentage }}}} of the judged requests to "
        f"{{{{ $labels.model }}}} missed objective {objective.name} over {window}; "
        f"{percent(1 - Decimal(str(objective.target)))} is allowed.{_most_on(Verdict.MISSED)}"
        f"{_most_excess(window)}",
        variables=OBJECTIVE,
        more=_on_worst(Verdict.MISSED),
    )


def _missed_more(objective: Objective, threshold: Decimal, windows: tuple[str, ...]) -> str:
    own = f"{{objective={quoted(objective.name)}}}"
    shares = [f"{ratio_name(window)}{own} > {number(threshold)}" for window in windows]
    return conditions(*shares, f"{missed_name(windows[0])}{own} >= {MIN_MISSED}")


def _undetermined(objective: Objective, timings: Timings) -> Alert:
    window = timings.window(30 * MINUTE_S)
    named = eq("objective", objective.name)
    return Alert(
        name="LlmVerdictsUndetermined",
        severity=Severity.TICKET,
        expression=share_over(
            "0.5",
            OBJECTIVE,
            window,
            part=value_of(m.SLO_REQUESTS, named, eq("verdict", Verdict.UNDETERMINED)),
            whole=(value_of(m.SLO_REQUESTS, named),),
        ),
        hold_s=5 * MINUTE_S,
        labels={"objective": objective.name},
        summary=f"Most requests to {{{{ $labels.model }}}} cannot be judged by objective "
        f"{objective.name}",
        description=f"{{{{ $value | humanizePercentage }}}} of the requests to "
        f"{{{{ $labels.model }}}} over {window} are undetermined, so the attainment of objective "
        f"{objective.name} covers few of them."
        f"{_most_on(Verdict.UNDETERMINED)}",
        variables=OBJECTIVE,
        more=_on_worst(Verdict.UNDETERMINED),
    )
