"""Alerts on objectives: burn rates, outages, undetermined verdicts, other limits in an agent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from inspect import cleandoc

from agent.analysis.burn_rates import (
    BURN,
    HOLD_S,
    MIN_MISSED,
    OUTAGE,
    TIERS,
    Burn,
    OutageRule,
    plan,
)
from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.records.objective import Objective
from agent.render.alerts import engine_alerts, request_alerts
from agent.render.alerts.alert_rule import (
    OBJECTIVE,
    Alert,
    Recording,
    Severity,
    Timings,
    fired,
    firing,
    latency,
    not_of_presets,
    number,
    percent,
    share_over,
    span,
    worst,
)
from agent.render.promql import among, eq, filled, none_of, quoted, value_of

EXPLAINED = "LlmMissesExplained"

# As long as the window of the quickest alerts on an objective: requests that an engine did not
# answer in time are counted when it answers again.
_WINDOW_S = 5 * MINUTE_S
# The remaining share of misses is not an outage by itself.
_MOST = 0.9


def explained(objective: Objective, timings: Timings) -> Alert:
    """The alert that mutes pages on an objective while pages on engines give the reason."""
    window = timings.window(_WINDOW_S)
    matchers = (eq("objective", objective.name), eq("verdict", Verdict.MISSED))
    missed = f"increase({value_of(m.SLO_REQUESTS, *matchers)}[{window}])"
    of_engines, of_models = firing(engine_alerts.PAGES), firing(request_alerts.PAGES)
    return Alert(
        name=EXPLAINED,
        severity=Severity.NONE,
        expression=cleandoc(f"""
            sum by (objective, model) ({missed}
              and on (instance, engine) max_over_time({of_engines}[{window}])
              or {missed}
              and on (instance, engine, model) max_over_time({of_models}[{window}]))
              / (sum by (objective, model) ({missed}) > 0)
              >= {_MOST}
        """),
        labels={"objective": objective.name},
        summary=f"Requests to {{{{ $labels.model }}}} miss objective {objective.name} on engines "
        "that have pages of their own",
        description=f"{{{{ $value | humanizePercentage }}}} of the misses over {window} are of "
        "engines with a firing page. This alert is sent to no receiver; from "
        f"{percent(_MOST)} on it mutes the pages on the objective.",
        variables=OBJECTIVE,
    )


_HOLD_S = 10.0 * MINUTE_S
# The field of each limit, by its value of the label `measure`.
_LIMITS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def not_published(objective: Objective) -> Alert:
    """The alert on an objective of these rules that no agent has."""
    return Alert(
        name="LlmObjectiveNotPublished",
        severity=Severity.TICKET,
        expression=f"absent({value_of(m.SLO_REQUESTS, eq('objective', objective.name))})",
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"No agent publishes objective {objective.name}",
        description=f"Prometheus has no {value_of(m.SLO_REQUESTS)} of objective {objective.name}: "
        "the agents' settings and these rules do not agree, or no agent is scraped.",
        variables=("objective",),
    )


def differs(objective: Objective) -> Alert:
    """The alert on an agent that judges an objective by other limits or another target."""
    limits_s = _limits_s(objective)
    limits = [f"{name} {latency(limit_s)}" for name, limit_s in limits_s.items()]
    return Alert(
        name="LlmObjectiveDiffers",
        severity=Severity.TICKET,
        expression=_difference(objective, limits_s),
        hold_s=_HOLD_S,
        labels={"objective": objective.name},
        summary=f"The agent {{{{ $labels.instance }}}} judges objective {objective.name} by other "
        "limits than these rules",
        description=f"These rules are made for {', '.join([percent(objective.target), *limits])}. "
        f"The agent judges by{_judged_by(objective)}. A rule on a limit that is not a bucket edge "
        "never fires.",
        variables=("objective", "instance"),
    )


def _limits_s(objective: Objective) -> dict[str, float]:
    limits_s = {name: getattr(objective, field) for name, field in _LIMITS.items()}
    return {name: limit_s for name, limit_s in limits_s.items() if limit_s is not None}


def _difference(objective: Objective, limits_s: dict[str, float]) -> str:
    named = eq("objective", objective.name)
    target = f"max by (instance) ({value_of(m.SLO_TARGET, named)})"
    found = [f"{target} != {number(objective.target)}"]
    for name, limit_s in limits_s.items():
        limit = f"max by (instance) ({value_of(m.SLO_LIMIT, named, eq('measure', name))})"
        found += [f"{limit} != {number(limit_s)}", f"{target}\n  unless {limit}"]
    more = value_of(m.SLO_LIMIT, named, none_of("measure", limits_s))
    return "\nor\n".join([*found, f"max by (instance) ({more})"])


def _judged_by(objective: Objective) -> str:
    """A template for the target and the limits of the agent that the alert is on."""
    matchers = (filled("instance"), eq("objective", objective.name))
    target, limits = value_of(m.SLO_TARGET, *matchers), value_of(m.SLO_LIMIT, *matchers)
    share = f"{_each(target)} {{{{ .Value | humanizePercentage }}}}{{{{ end }}}}"
    return f"{share}{_each(limits)}, {{{{ .Labels.measure }}}} {{{{ .Value }}}} s{{{{ end }}}}"


def _each(series: str) -> str:
    return f"{{{{ range query (printf `sort({series})` $labels.instance) }}}}"


_LEVEL = "objective_model:llm_slo_missed"

_MISSED = value_of(m.SLO_REQUESTS, eq("verdict", Verdict.MISSED))
_JUDGED = value_of(m.SLO_REQUESTS, among("verdict", (Verdict.MET, Verdict.MISSED)))


def _worst(verdict: Verdict) -> str:
    """A template for the engine of the model with the most requests of a verdict."""
    matchers = (eq("verdict", verdict), filled("objective"), filled("model"))
    counted = f"increase({value_of(m.SLO_REQUESTS, *matchers)}[5m])"
    return worst(f"sum by (engine) ({counted})", "objective", "model")


def _on_worst(verdict: Verdict) -> str:
    return f"{_worst(verdict)}&var-engine={{{{ .Labels.engine | urlquery }}}}{{{{ end }}}}"


def _most_on(verdict: Verdict) -> str:
    return f"{_worst(verdict)} Most of them now on engine {{{{ .Labels.engine }}}}.{{{{ end }}}}"


def _most_excess(window: str) -> str:
    """A template for the cause with the most excess seconds, once there are any."""
    matchers = (filled("objective"), filled("model"))
    excess = f"increase({value_of(m.SLO_MISSED_SECONDS, *matchers)}[{window}])"
    share = f"sum by (cause) ({excess}) / scalar(sum({excess}))"
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
        missed = f"increase({_MISSED}[{window}]){_not_of_presets(window)}"
        yield Recording(missed_name(window), f"sum by (objective, model) ({missed})")


def _missed_ratio(window: str) -> str:
    # No value without traffic: 0/0 would make every average over it NaN.
    less = _not_of_presets(window)
    return cleandoc(f"""
        sum by (objective, model) (rate({_MISSED}[{window}]){less})
          / (sum by (objective, model) (rate({_JUDGED}[{window}]){less}) > 0)
    """)


def _not_of_presets(window: str) -> str:
    return not_of_presets(window, on=("instance", "objective"))


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
    return "\nand\n".join((*shares, f"{missed_name(windows[0])}{own} >= {MIN_MISSED}"))


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
            less=_not_of_presets(window),
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


# The shares of misses for which the times are known.
MISSED_RATIOS = (1.0, 0.5, 0.25)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleDetection:
    """How long a rule takes at each of MISSED_RATIOS, in seconds; None: it never fires."""

    objective: str
    rule: str
    threshold: Decimal
    after_s: tuple[float | None, ...]


def detections(objective: Objective, timings: Timings) -> Iterator[RuleDetection]:
    """The rules on the error budget of an objective."""
    found = plan(objective.target, objective.window_s)
    named: list[tuple[str, Burn | OutageRule]] = []
    if found.outage:
        named.append(("outage, page", found.outage))
    for burn in found.kept:
        kind = "page" if burn.tier.pages else "ticket"
        named.append((f"tier {burn.tier.number}, {kind}", burn))
    for name, rule in named:
        times = (_longest_s(rule.detects_in_s(ratio), timings) for ratio in MISSED_RATIOS)
        yield RuleDetection(
            objective=objective.name, rule=name, threshold=rule.threshold, after_s=tuple(times)
        )


def _longest_s(detects_in_s: float | None, timings: Timings) -> float | None:
    """The longest time: detection, hold time, a scrape and two evaluations."""
    if detects_in_s is None:
        return None
    waits_s = timings.scrape_interval_s + 2 * timings.evaluation_interval_s
    return timings.seconds(detects_in_s + HOLD_S) + waits_s
