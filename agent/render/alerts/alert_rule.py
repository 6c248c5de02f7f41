"""Alerts and recordings as entries of a rule file, and conditions that many alerts share."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from enum import StrEnum
from inspect import cleandoc
from typing import Any
from urllib.parse import quote_plus

from agent.analysis.burn_rates import TIERS
from agent.catalog import metrics as m
from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.render.alerts.thresholds import MIN_EVENTS, filled
from agent.render.links import DashboardUid, Links, of_label
from agent.render.promql import Matcher, among, eq, narrowed, quoted, upto, value_of
from agent.settings.values import duration_text

# rate() needs two samples, and a scrape may fail.
_SCRAPES_IN_A_WINDOW = 4
# Below this, rounding to a second could change which of two alerts fires first.
_FINE_BELOW_S = 10


@dataclass(frozen=True, slots=True)
class Timings:
    """Divides all times of the rules by `speed`."""

    speed: float = 1.0
    scrape_interval_s: float = 15.0
    evaluation_interval_s: float = 30.0

    def window(self, seconds: float) -> str:
        """A range in PromQL, never too short for the scrape interval."""
        return _written(self.window_s(seconds))

    def window_s(self, seconds: float) -> float:
        """The length of that range in seconds."""
        return max(self.seconds(seconds), _SCRAPES_IN_A_WINDOW * self.scrape_interval_s)

    def hold(self, seconds: float) -> str:
        """A hold time in the format of Prometheus."""
        return _written(self.seconds(seconds))

    def seconds(self, seconds: float) -> float:
        """A length of time in seconds."""
        return seconds / self.speed

    @property
    def evaluation_interval(self) -> str:
        """The time between two evaluations of a rule."""
        return _written(self.evaluation_interval_s)


def _written(seconds: float) -> str:
    """Whole seconds from 10 s on; shorter times of a trial may have milliseconds."""
    if seconds >= _FINE_BELOW_S or seconds == round(seconds):
        return duration_text(float(max(round(seconds), 1)))
    return f"{max(round(seconds * 1000), 1)}ms"


def number(value: float | Decimal) -> str:
    """A number without the rounding errors of binary fractions."""
    return f"{Decimal(str(value)).normalize():f}"


def percent(ratio: float | Decimal) -> str:
    """A share as a percentage: 0.999 is `99.9 %`."""
    return f"{number(Decimal(str(ratio)) * 100)} %"


def percentile(ratio: float) -> str:
    """The name of a percentile: 0.95 is `p95`."""
    return f"p{number(Decimal(str(ratio)) * 100)}"


def latency(seconds: float) -> str:
    """A latency: `200 ms`, `1.5 s`."""
    if seconds < 1:
        return f"{number(Decimal(str(seconds)) * 1000)} ms"
    return f"{number(seconds)} s"


def span(seconds: float) -> str:
    """A length of time: `30d`, `50h`."""
    return duration_text(float(round(seconds)))


# The labels that identify the subject of an alert. `instance` is the agent, as engines of several
# agents may have one name.
ENGINE = ("instance", "engine")
ENGINE_MODEL = (*ENGINE, "model")
GPU = ("instance", "gpu")
AGENT = ("instance",)
OBJECTIVE = ("objective", "model")


# The chart's places for matchers in selectors and in links, and a query of a template.
CHART_MATCHERS, CHART_FILTERS = "${matchers}", "${filters}"
_QUERY = re.compile(r"`([^`]*)`")


class Severity(StrEnum):
    """Whether a person must act now, in working hours, or never."""

    PAGE = "critical"
    TICKET = "warning"
    NONE = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleOptions:
    """What an organisation calls its severities, further labels of its alerts, and its thresholds.

    `matchers` are labels of all series that the rules read, and so of all that they make.
    """

    severities: Mapping[Severity, str] = field(
        default_factory=lambda: {each: each.value for each in Severity}
    )
    further: Mapping[str, str] = field(default_factory=dict)
    matchers: Mapping[str, str] = field(default_factory=dict)
    thresholds: Mapping[str, Decimal] = field(default_factory=dict)

    def matcher(self, severity: Severity) -> str:
        """The matcher of a severity, in the format of Alertmanager."""
        return f'severity="{self.severities[severity]}"'

    @property
    def filters(self) -> str:
        """The matchers as variables in the link to a dashboard."""
        return "".join(f"&var-{name}={quote_plus(value)}" for name, value in self.matchers.items())

    def expression(self, text: str) -> str:
        """An expression with the matchers and thresholds."""
        inside = "".join(f"{name}={quoted(value)}," for name, value in self.matchers.items())
        return filled(narrowed(text, inside) if inside else text, self.thresholds)

    def template(self, text: str) -> str:
        """A text with the thresholds, and with the matchers in its queries."""
        asked = _QUERY.sub(lambda query: f"`{self.expression(query[1])}`", text)
        return filled(asked, self.thresholds)


class ChartOptions(RuleOptions):
    """Leaves matchers and thresholds to whoever installs the Helm chart."""

    @property
    def filters(self) -> str:
        """The place for the matchers in the link to a dashboard."""
        return CHART_FILTERS

    def expression(self, text: str) -> str:
        """An expression with places for the matchers and thresholds."""
        return narrowed(text, CHART_MATCHERS)

    def template(self, text: str) -> str:
        """A text with places for the thresholds, and for the matchers in its queries."""
        return _QUERY.sub(lambda query: f"`{self.expression(query[1])}`", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. It fires after its condition held for `hold_s`.

    It goes on for `keep_s` after its condition has ended; one failed scrape ends every series for a
    moment, and would end the alert.
    `variables` are labels that the links to the runbook and the dashboard set. `summary` holds no
    value, so that it stays the same while the alert fires; `description` does. `more` is a template
    for further parts of the dashboard's URL.
    """

    name: str
    severity: Severity
    expression: str
    summary: str
    description: str
    hold_s: float = 0.0
    keep_s: float = MINUTE_S
    dashboard: DashboardUid | None = DashboardUid.OPERATIONS
    variables: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    back_s: int = HOUR_S
    more: str = ""

    def rule(self, timings: Timings, links: Links, options: RuleOptions) -> dict[str, Any]:
        """The alert as an entry of a rule file."""
        # $labels holds the labels of the expression, without those that the rule adds.
        values = {
            name: quote_plus(self.labels[name]) if name in self.labels else of_label(name)
            for name in self.variables
        }
        annotations = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": links.runbook(self.name, values),
        }
        if self.dashboard is not None:
            annotations["dashboard_url"] = links.dashboard(
                self.dashboard, values, self.back_s, options.filters + self.more
            )
        held = {"for": timings.hold(self.hold_s)} if self.hold_s else {}
        # As long as a window of the same length, which is never too short for the scrape interval.
        kept = timings.hold if self.keep_s == MINUTE_S else timings.window
        held["keep_firing_for"] = kept(self.keep_s)
        return {
            "alert": self.name,
            "expr": options.expression(self.expression),
            **held,
            "labels": {
                "severity": options.severities[self.severity],
                **options.further,
                **options.matchers,
                **self.labels,
            },
            "annotations": {name: options.template(text) for name, text in annotations.items()},
        }


@dataclass(frozen=True, slots=True)
class Recording:
    """An expression that Prometheus evaluates once for several rules."""

    name: str
    expression: str

    def rule(self, timings: Timings, links: Links, options: RuleOptions) -> dict[str, Any]:
        """The recording as an entry of a rule file."""
        labelled = {"labels": dict(options.matchers)} if options.matchers else {}
        return {"record": self.name, "expr": options.expression(self.expression), **labelled}


def group(
    name: str,
    rules: Iterable[Alert | Recording],
    timings: Timings,
    links: Links,
    options: RuleOptions,
) -> dict[str, Any]:
    """A group of rules, which Prometheus evaluates in their order."""
    return {
        "name": name,
        "interval": timings.evaluation_interval,
        "rules": [rule.rule(timings, links, options) for rule in rules],
    }


# Of alerts on an error budget, those that page, whatever their severity is called. An outage has no
# tier.
ON_PAGES = among("tier", ("", *(tier.number for tier in TIERS if tier.pages)))

# The series of a histogram by its ending, such as `_bucket`, and further matchers.
HistogramSeries = Callable[[str, tuple[Matcher, ...]], str]


def not_of_presets(window: str, *matchers: Matcher, on: tuple[str, ...] = ("instance",)) -> str:
    """The end of an expression: without agents whose settings had no objective in the window.

    The window is that of the expression: an agent that is down has series in it.
    """
    configured = f"max_over_time({value_of(m.SLO_CONFIGURED, *matchers)}[{window}])"
    return f" unless on ({', '.join(on)}) {configured} == 0"


def share_over(
    limit: object,
    labels: tuple[str, ...],
    window: str,
    *,
    part: str,
    whole: tuple[str, ...],
    less: str = "",
) -> str:
    """`part` is more than `limit` of the sum of the counters in `whole`, and at least MIN_EVENTS.

    `less` is the end of the expressions in each sum.
    """
    by = f"sum by ({', '.join(labels)})"
    total = " + ".join(f"{by} (rate({series}[{window}]){less})" for series in whole)
    return cleandoc(f"""
        {by} (rate({part}[{window}]){less})
          / ({total} > 0)
          > {limit}
        and
        {by} (increase({part}[{window}]){less}) >= {MIN_EVENTS}
    """)


def over_bound(
    labels: tuple[str, ...],
    window: str,
    share: str,
    bound: float,
    series: HistogramSeries,
    *,
    less: str = "",
) -> str:
    """Fewer than `share` of a histogram's observations are within a bound, one of its edges.

    The value is the percentile, an estimate between edges; the condition is exact. `less` is the
    end of the expressions in each sum.
    """
    by, kept = "sum by", ", ".join(labels)
    every, inside = series("_bucket", ()), series("_bucket", (upto(bound),))
    total = series("_count", ())
    return cleandoc(f"""
        histogram_quantile({share}, {by} ({kept}, le) (rate({every}[{window}]){less}))
        and
        {by} ({kept}) (rate({inside}[{window}]){less})
          / ({by} ({kept}) (rate({total}[{window}]){less}) > 0)
          < {share}
        and
        {by} ({kept}) (increase({total}[{window}]){less})
          - {by} ({kept}) (increase({inside}[{window}]){less})
          >= {MIN_EVENTS}
    """)


def firing(alerts: Sequence[str], *more: Matcher) -> str:
    """The series of these alerts while they fire."""
    name = eq("alertname", alerts[0]) if len(alerts) == 1 else among("alertname", alerts)
    matchers = (name, *more, eq("alertstate", "firing"))
    return f"ALERTS{{{','.join(matcher.text for matcher in matchers)}}}"


def fired(alerts: Sequence[str], labels: tuple[str, ...], window: str, *more: Matcher) -> str:
    """One of these alerts fired within the window."""
    return f"max by ({', '.join(labels)}) (max_over_time({firing(alerts, *more)}[{window}]))"


def while_firing(alert: str, labels: tuple[str, ...], condition: str) -> str:
    """The alert itself fires, and the condition holds: the alert goes on until that ends."""
    return f"(\nmax by ({', '.join(labels)}) ({firing((alert,))})\nand\n{condition}\n)"


def target_down(series: str, window: str) -> str:
    """A scrape target fails that had this series within the window.

    A target that was removed from the configuration has no `up` and is not a failure.
    """
    return cleandoc(f"""
        up == 0
        and on (job, instance)
        max by (job, instance) (max_over_time({series}[{window}]))
    """)


def idle_with_work(labels: tuple[str, ...], running: str, waiting: str, steps: str) -> str:
    """An engine has requests, and its counter of steps stands still; the value is the requests."""
    by = f"sum by ({', '.join(labels)})"
    return cleandoc(f"""
        {by} ({running}) + {by} ({waiting}) > 0
        and
        {by} (rate({steps})) == 0
    """)


def worst(expression: str, *labels: str) -> str:
    """The start of a template, up to its `end`, for the series with the highest value above 0.

    Each %q of the expression stands for the value of one of the alert's `labels`.
    """
    values = " ".join(f"$labels.{label}" for label in labels)
    return f"{{{{ range query (printf `topk(1, {expression} > 0)` {values}) }}}}"
