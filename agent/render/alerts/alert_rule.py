"""Alerts and recordings as data, and as entries of a rule file."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote_plus

from agent.catalog.time_units import HOUR_S, MINUTE_S
from agent.render.alerts.timings import Timings
from agent.render.links import DashboardUid, Links, of_label

# The labels that identify the subject of an alert. `instance` is the agent, as engines of several
# agents may have one name.
ENGINE = ("instance", "engine")
ENGINE_MODEL = (*ENGINE, "model")
GPU = ("instance", "gpu")
AGENT = ("instance",)
OBJECTIVE = ("objective", "model")


class Severity(StrEnum):
    """Whether a person must act now, in working hours, or never."""

    PAGE = "page"
    TICKET = "ticket"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. It fires after its condition held for `hold_s`.

    `variables` are labels that the link to the dashboard sets as variables. `summary` holds no
    value, so that it stays the same while the alert fires; `description` does. `more` is a template
    for further parts of the dashboard's URL.
    """

    name: str
    severity: Severity
    expression: str
    summary: str
    description: str
    hold_s: float = 0.0
    dashboard: DashboardUid | None = DashboardUid.OPERATIONS
    variables: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    back_s: int = HOUR_S
    more: str = ""

    def rule(self, timings: Timings, links: Links) -> dict[str, Any]:
        """The alert as an entry of a rule file."""
        annotations = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": links.runbook(self.name),
        }
        if self.dashboard is not None:
            # $labels holds the labels of the expression, without those that the rule adds.
            values = {
                name: quote_plus(self.labels[name]) if name in self.labels else of_label(name)
                for name in self.variables
            }
            annotations["dashboard_url"] = links.dashboard(
                self.dashboard, values, self.back_s, self.more
            )
        held = {"for": timings.hold(self.hold_s)} if self.hold_s else {}
        # One failed scrape ends every series for a moment, and would end the alert.
        held["keep_firing_for"] = timings.hold(MINUTE_S)
        return {
            "alert": self.name,
            "expr": self.expression,
            **held,
            "labels": {"severity": self.severity.value, **self.labels},
            "annotations": annotations,
        }


@dataclass(frozen=True, slots=True)
class Recording:
    """An expression that Prometheus evaluates once for several rules."""

    name: str
    expression: str

    def rule(self, timings: Timings, links: Links) -> dict[str, Any]:
        """The recording as an entry of a rule file."""
        return {"record": self.name, "expr": self.expression}


def group(
    name: str, rules: Iterable[Alert | Recording], timings: Timings, links: Links
) -> dict[str, Any]:
    """A group of rules, which Prometheus evaluates in their order."""
    return {
        "name": name,
        "interval": timings.evaluation_interval,
        "rules": [rule.rule(timings, links) for rule in rules],
    }
