"""Alerts on objectives as such: how fast their budgets are spent, and whether they are seen."""

from collections.abc import Iterator, Sequence
from decimal import Decimal

from agent.analysis.burn_rates import MIN_MISSED, TIERS, Burn, OutageRule, plan
from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.records.objective import Objective
from agent.render.alerts.alert_conditions import conditions, share_over, worst
from agent.render.alerts.alert_rule import OBJECTIVE, Alert, Recording, Severity
from agent.render.alerts.explained_misses import EXPLAINED, explained
from agent.render.alerts.number_text import number, percent, span
from agent.render.alerts.objective_agreement import differs, not_published
from agent.render.alerts.timings import Timings
from agent.render.promql import among, by, eq, filled, quoted, value_of

_MINUTE_S = 60

OUTAGE, BURN = "LlmObjectiveOutage", "LlmObjectiveBudgetBurn"
# Windows smooth enough by themselves; this only passes over a single odd evaluation.
HOLD_S = 2.0 * _MINUTE_S
_LEVEL = "objective_model:llm_slo_missed"

_MISSED = eq("verdict", Verdict.MISSED)
_JUDGED = among("verdict", (Verdict.MET, Verdict.MISSED))


def _worst(verdict: Verdict) -> str:
    """Where most requests get a verdict, for whoever reads an alert on all engines of a model."""
    matchers = (eq("verdict", verdict), filled("objective"), filled("model"))
    counted = f"increase({value_of(m.SLO_REQUESTS, *matchers)}[5m])"
    return worst(by(("engine",), counted), "objective", "model")


def _on_worst(verdict: Verdict) -> str:
    return f"{_worst(verdict)}&var-engine={{{{ .Labels.engine | urlquery }}}}{{{{ end }}}}"


def _most_on(verdict: Verdict) -> str:
    return f"{_worst(verdict)} Most of them now on engine {{{{ .Labels.engine }}}}.{{{{ end }}}}"


def ratio_name(window: str) -> str:
    """The recorded share of judged requests that missed, by objective and model."""
    return f"{_LEVEL}:ratio_rate{window}"


def missed_name(window: str) -> str:
    """The recorded number of requests that missed, by objective and model."""
    return f"{_LEVEL}:increase{window}"


def recordings(objectives: Sequence[Objective], timings: Timings) -> Iterator[Recording]:
    """The shares and numbers of misses over every window that an alert looks at."""
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
    # Nothing is recorded without traffic: 0/0 would spoil every average over it.
    return f"{missed}\n  / ({judged} > 0)"


def objective_alerts(objective: Objective, timings: Timings) -> Iterator[Alert]:
    """Every alert on one objective as such."""
    found = plan(objective.target, objective.window_s)
    # What mutes comes before what it mutes.
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
        summary=f"{{{{ $labels.model }}}} spends the error budget of objective {objective.name} at "
        f"{number(burn.tier.factor)} times the allowed rate or more",
        description=f"{{{{ $value | humanizePercentage }}}} of the judged requests to "
        f"{{{{ $labels.model }}}} missed objective {objective.name} over {long}; "
        f"{percent(1 - Decimal(str(objective.target)))} may. Above {percent(burn.threshold)} the "
        f"budget of {span(objective.window_s)} lasts no longer than "
        f"{span(objective.window_s / float(burn.tier.factor))}.{_most_on(Verdict.MISSED)}",
        variables=OBJECTIVE,
        back_s=round(max(burn.long_s, 60 * _MINUTE_S)),
        more=_on_worst(Verdict.MISSED),
    )


def _unless_paged(objective: Objective, burn: Burn, timings: Timings) -> str:
    """The end of the expression of a slower page: a sooner one that is over still fills its window.

    Nobody is paged again for what has just ended, nor for what the page on an engine told; tickets
    go by the days, and say what is left.
    """
    if burn.tier is TIERS[0] or not burn.tier.pages:
        return ""
    told = (
        f'ALERTS{{alertname=~"{OUTAGE}|{BURN}|{EXPLAINED}",objective={quoted(objective.name)},'
        f'tier=~"|{TIERS[0].number}",alertstate="firing"}}'
    )
    lately = f"max_over_time({told}[{timings.window(burn.short_s)}])"
    return f"\nunless\n{by(OBJECTIVE, lately, 'max')}"


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
        f"{percent(1 - Decimal(str(objective.target)))} may.{_most_on(Verdict.MISSED)}",
        variables=OBJECTIVE,
        more=_on_worst(Verdict.MISSED),
    )


def _missed_more(objective: Objective, threshold: Decimal, windows: tuple[str, ...]) -> str:
    of = f"{{objective={quoted(objective.name)}}}"
    shares = [f"{ratio_name(window)}{of} > {number(threshold)}" for window in windows]
    return conditions(*shares, f"{missed_name(windows[0])}{of} >= {MIN_MISSED}")


def _undetermined(objective: Objective, timings: Timings) -> Alert:
    window = timings.window(30 * _MINUTE_S)
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
        hold_s=5 * _MINUTE_S,
        labels={"objective": objective.name},
        summary=f"Most requests to {{{{ $labels.model }}}} cannot be judged by objective "
        f"{objective.name}",
        description=f"{{{{ $value | humanizePercentage }}}} of the requests to "
        f"{{{{ $labels.model }}}} over {window} could be judged neither met nor missed, so the "
        f"attainment of objective {objective.name} speaks for few of them."
        f"{_most_on(Verdict.UNDETERMINED)}",
        variables=OBJECTIVE,
        more=_on_worst(Verdict.UNDETERMINED),
    )
