"""Alerts on objectives: burn rates, outages, undetermined verdicts, other limits in an agent."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from inspect import cleandoc

from agent.analysis.burn_rates import (
    BURN,
    HOLD_S,
    MAX_THRESHOLD,
    OUTAGE,
    OUTAGE_WINDOW_S,
    SCHEME_PERIOD_S,
    TIERS,
    Burn,
    OutageRule,
    Tier,
    outage_budget,
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
    firing,
    latency,
    not_of_presets,
    number,
    percent,
    share_over,
    span,
    worst,
)
from agent.render.alerts.thresholds import BUDGET_MIN_MISSED, EXPLAINED_RATIO, UNDETERMINED_RATIO
from agent.render.links import DashboardUid
from agent.render.promql import Matcher, among, eq, escaped, filled, none_of, value_of

EXPLAINED, PAGED_LATELY = "LlmMissesExplained", "LlmObjectivePagedLately"
# They are sent to no receiver.
MUTING = (EXPLAINED, PAGED_LATELY)

# As long as the window of the quickest alerts on an objective: requests that an engine did not
# answer in time are counted when it answers again.
_WINDOW_S = 5 * MINUTE_S
# Of the share of misses that is allowed.
_ROUNDED_TO = "0.000001"
_MODEL, _OBJECTIVE = "{{ $labels.model }}", "{{ $labels.objective }}"
_MISSED = value_of(m.SLO_REQUESTS, eq("verdict", Verdict.MISSED))
_JUDGED = value_of(m.SLO_REQUESTS, among("verdict", (Verdict.MET, Verdict.MISSED)))


def _explained(timings: Timings) -> Alert:
    """The alert that mutes pages on an objective while pages on engines give the reason."""
    window = timings.window(_WINDOW_S)
    return Alert(
        name=EXPLAINED,
        severity=Severity.NONE,
        expression=_misses_on_paged_engines(window),
        summary=f"Requests to {_MODEL} miss objective {_OBJECTIVE} on engines that have pages of "
        "their own",
        description=f"{{{{ $value | humanizePercentage }}}} of the misses over {window} are of "
        "engines with a firing page. This alert is sent to no receiver; from "
        f"{EXPLAINED_RATIO.percent} on it mutes the pages on the objective.",
        dashboard=DashboardUid.OBJECTIVES,
        variables=OBJECTIVE,
    )


def _misses_on_paged_engines(window: str, *of: Matcher) -> str:
    """Most misses are of engines with pages: an inhibition cannot tell how many are."""
    selected = value_of(m.SLO_REQUESTS, *of, eq("verdict", Verdict.MISSED))
    missed = f"increase({selected}[{window}])"
    of_engines, of_models = firing(engine_alerts.PAGES), firing(request_alerts.PAGES)
    return cleandoc(f"""
        sum by (objective, model) ({missed}
          and on (instance, engine) max_over_time({of_engines}[{window}])
          or {missed}
          and on (instance, engine, model) max_over_time({of_models}[{window}]))
          / (sum by (objective, model) ({missed}) > 0)
          >= {EXPLAINED_RATIO}
    """)


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
        dashboard=DashboardUid.OBJECTIVES,
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
        dashboard=DashboardUid.OBJECTIVES,
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
# The recording of the share of misses that an objective allows.
ALLOWED = "objective:llm_slo_allowed:ratio"


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


@dataclass(frozen=True, slots=True)
class _Period:
    """Rules for objectives of one period; a matcher selects them, if there are others."""

    window_s: float
    named: tuple[Matcher, ...] = ()

    @property
    def matchers(self) -> str:
        return f"{{{self.named[0].text}}}" if self.named else ""

    def rate(self, window: str) -> str:
        return f"{ratio_name(window)}{self.matchers}"

    def missed(self, window: str) -> str:
        return f"{missed_name(window)}{self.matchers}"


def _periods(objectives: Sequence[Objective]) -> Iterator[_Period]:
    """The usual period, also for objectives that no settings have yet, and those of others."""
    others: dict[float, list[str]] = {}
    for objective in objectives:
        if objective.window_s != SCHEME_PERIOD_S:
            others.setdefault(objective.window_s, []).append(escaped(objective.name))
    named = [name for names in others.values() for name in names]
    yield _Period(SCHEME_PERIOD_S, (none_of("objective", named),) if named else ())
    for window_s, names in others.items():
        yield _Period(window_s, (among("objective", names),))


def recordings(objectives: Sequence[Objective], timings: Timings) -> Iterator[Recording]:
    """The allowed share of misses, and shares and numbers of misses over every alert's window."""
    periods = [period.window_s for period in _periods(objectives)]
    yield _allowed(periods, timings)
    long = {tier.long_of(period_s) for period_s in periods for tier in TIERS} | {OUTAGE_WINDOW_S}
    every = long | {tier.short_of(period_s) for period_s in periods for tier in TIERS}
    counted = dict.fromkeys(timings.window(seconds) for seconds in sorted(long))
    for window in dict.fromkeys(timings.window(seconds) for seconds in sorted(every)):
        yield Recording(ratio_name(window), _missed_ratio(window))
    for window in counted:
        missed = f"increase({_MISSED}[{window}]){_not_of_presets(window)}"
        yield Recording(missed_name(window), f"sum by (objective, model) ({missed})")


def _allowed(periods: Sequence[float], timings: Timings) -> Recording:
    """The strictest target of all agents decides.

    An agent that is down counts for as long as its misses are in the short window of an alert.
    1 - 0.9 is less than 0.1 in binary fractions, so the difference is rounded.
    """
    window = timings.window(TIERS[-1].short_of(max(periods)))
    target = f"max by (objective) (last_over_time({value_of(m.SLO_TARGET)}[{window}]))"
    return Recording(ALLOWED, f"round(1 - {target}, {_ROUNDED_TO})")


def _missed_ratio(window: str) -> str:
    # No value without traffic: 0/0 would make every average over it NaN.
    less = _not_of_presets(window)
    return cleandoc(f"""
        sum by (objective, model) (rate({_MISSED}[{window}]){less})
          / (sum by (objective, model) (rate({_JUDGED}[{window}]){less}) > 0)
    """)


def _not_of_presets(window: str) -> str:
    return not_of_presets(window, on=("instance", "objective"))


def objective_alerts(objectives: Sequence[Objective], timings: Timings) -> Iterator[Alert]:
    """Every alert on objectives: those on budgets hold for whatever objectives agents have."""
    # These alerts mute others, so they come first.
    yield _explained(timings)
    for period in _periods(objectives):
        yield _paged_lately(period, timings)
        yield _outage(period, timings)
        for tier in TIERS:
            yield _burn(period, tier, timings)
    yield _undetermined(timings)
    yield _target_missing()
    for objective in objectives:
        if not objective.is_preset:
            yield not_published(objective)
            yield differs(objective)


def _burn(period: _Period, tier: Tier, timings: Timings) -> Alert:
    long_s, short_s = tier.long_of(period.window_s), tier.short_of(period.window_s)
    long, short = timings.window(long_s), timings.window(short_s)
    factor = number(tier.factor)
    return Alert(
        name=BURN,
        severity=Severity.PAGE if tier.pages else Severity.TICKET,
        expression=_burns(period, tier, timings),
        hold_s=HOLD_S,
        labels={"tier": str(tier.number)},
        summary=f"{_MODEL} uses the error budget of objective {_OBJECTIVE} at {factor} times the "
        "allowed rate or more",
        description=f"{_share_missed(long)} At {factor} times that, the budget of "
        f"{span(period.window_s)} lasts {span(period.window_s / float(tier.factor))}."
        f"{_most_on(Verdict.MISSED)}{_most_excess(short)}",
        dashboard=DashboardUid.OBJECTIVES,
        variables=OBJECTIVE,
        back_s=round(max(long_s, HOUR_S)),
        more=_on_worst(Verdict.MISSED),
    )


def _burns(period: _Period, tier: Tier, timings: Timings) -> str:
    windows = (
        timings.window(tier.long_of(period.window_s)),
        timings.window(tier.short_of(period.window_s)),
    )
    # A tier that only a total failure could fire is left out.
    threshold = f"({number(tier.factor)} * {ALLOWED} < {MAX_THRESHOLD})"
    return _missed_more(period, threshold, windows)


def _fails(period: _Period, timings: Timings) -> str:
    allowed = f"({ALLOWED} >= {outage_budget(period.window_s):.6g})"
    window = timings.window(OUTAGE_WINDOW_S)
    return _missed_more(period, f"((1 + {allowed}) / 2)", (window,))


def _paged_lately(period: _Period, timings: Timings) -> Alert:
    """The alert that mutes slower alerts on misses that a quicker page has reported.

    It goes on after that page has ended, for as long as the slower page's short window has the
    misses. The same holds for misses that a page on an engine explains.
    """
    first, slower = TIERS[:2]
    paged = (
        _fails(period, timings),
        _burns(period, first, timings),
        _misses_on_paged_engines(timings.window(_WINDOW_S), *period.named),
    )
    return Alert(
        name=PAGED_LATELY,
        severity=Severity.NONE,
        expression="\nor\n".join(f"(\n{each}\n)" for each in paged),
        hold_s=HOLD_S,
        keep_s=slower.short_of(period.window_s),
        summary=f"Misses of objective {_OBJECTIVE} by {_MODEL} were reported a short time ago",
        description="This alert is sent to no receiver. It mutes slower alerts on the same misses.",
        dashboard=DashboardUid.OBJECTIVES,
        variables=OBJECTIVE,
    )


def _outage(period: _Period, timings: Timings) -> Alert:
    window = timings.window(OUTAGE_WINDOW_S)
    return Alert(
        name=OUTAGE,
        severity=Severity.PAGE,
        expression=_fails(period, timings),
        hold_s=HOLD_S,
        summary=f"Most requests to {_MODEL} miss objective {_OBJECTIVE}",
        description=f"{_share_missed(window)}{_most_on(Verdict.MISSED)}{_most_excess(window)}",
        dashboard=DashboardUid.OBJECTIVES,
        variables=OBJECTIVE,
        more=_on_worst(Verdict.MISSED),
    )


def _share_missed(window: str) -> str:
    """Sentences on the share of misses, and on the share that is allowed."""
    allowed = f"{ALLOWED}{{{filled('objective').text}}}"
    return (
        f"{{{{ $value | humanizePercentage }}}} of the judged requests to {_MODEL} missed "
        f"objective {_OBJECTIVE} over {window}; {{{{ range query (printf `{allowed}` "
        "$labels.objective) }}{{ .Value | humanizePercentage }}{{ end }} is allowed."
    )


def _missed_more(period: _Period, threshold: str, windows: tuple[str, ...]) -> str:
    by_objective = f"> on (objective) group_left () {threshold}"
    shares = [f"{period.rate(window)}\n  {by_objective}" for window in windows]
    return "\nand\n".join((*shares, f"{period.missed(windows[0])} >= {BUDGET_MIN_MISSED}"))


def _undetermined(timings: Timings) -> Alert:
    window = timings.window(30 * MINUTE_S)
    return Alert(
        name="LlmVerdictsUndetermined",
        severity=Severity.TICKET,
        expression=share_over(
            UNDETERMINED_RATIO,
            OBJECTIVE,
            window,
            part=value_of(m.SLO_REQUESTS, eq("verdict", Verdict.UNDETERMINED)),
            whole=(value_of(m.SLO_REQUESTS),),
            less=_not_of_presets(window),
        ),
        hold_s=5 * MINUTE_S,
        summary=f"Most requests to {_MODEL} cannot be judged by objective {_OBJECTIVE}",
        description=f"{{{{ $value | humanizePercentage }}}} of the requests to {_MODEL} over "
        f"{window} are undetermined, so the attainment of objective {_OBJECTIVE} covers few of "
        f"them.{_most_on(Verdict.UNDETERMINED)}",
        dashboard=DashboardUid.OBJECTIVES,
        variables=OBJECTIVE,
        more=_on_worst(Verdict.UNDETERMINED),
    )


def _target_missing() -> Alert:
    target, judged = value_of(m.SLO_TARGET), value_of(m.SLO_REQUESTS)
    return Alert(
        name="LlmObjectiveTargetMissing",
        severity=Severity.TICKET,
        expression=f"count by (objective) ({judged})\nunless on (objective)\n{ALLOWED}",
        hold_s=_HOLD_S,
        summary=f"Prometheus does not know the target of objective {_OBJECTIVE}",
        description=f"{judged} has the objective and {target} does not, so no alert on its error "
        "budget can fire.",
        dashboard=DashboardUid.OBJECTIVES,
        variables=("objective",),
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
