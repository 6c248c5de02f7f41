"""What a rule is, and how Prometheus reads it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from urllib.parse import quote_plus

from agent.render.alerts.timings import Timings
from agent.render.links import DashboardUid, Links, of_label

_HOUR_S = 3600
_KEPT_S = 60

# The labels that say whose trouble it is. `instance` is the agent: engines in several places may
# have one name.
ENGINE = ("instance", "engine")
ENGINE_MODEL = (*ENGINE, "model")
GPU = ("instance", "gpu")
AGENT = ("instance",)
OBJECTIVE = ("objective", "model")


class Severity(StrEnum):
    """Whether somebody must look now, in working hours, or never."""

    PAGE = "page"
    TICKET = "ticket"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert, at once or after its condition held for `hold_s`.

    `variables` are labels with their values, which the dashboard gets under the same names.
    `summary` holds no figure, so that it stays the same while the alert lasts; `description` does.
    `more` is a template for further parts of the dashboard's address.
    """

    name: str
    severity: Severity
    expression: str
    hold_s: float
    summary: str
    description: str
    dashboard: DashboardUid | None = DashboardUid.OPERATIONS
    variables: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    back_s: int = _HOUR_S
    more: str = ""

    def rule(self, timings: Timings, links: Links) -> dict[str, Any]:
        """The alert as an entry of a rule file."""
        annotations = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": links.runbook(self.name),
        }
        if self.dashboard is not None:
            # $labels holds what the expression gives, and not the labels that the rule adds.
            filled = {
                name: quote_plus(self.labels[name]) if name in self.labels else of_label(name)
                for name in self.variables
            }
            annotations["dashboard_url"] = links.dashboard(
                self.dashboard, filled, self.back_s, self.more
            )
        held = {"for": timings.hold(self.hold_s)} if self.hold_s else {}
        # One scrape that fails takes every series away for a moment, and would end the alert.
        held["keep_firing_for"] = timings.hold(_KEPT_S)
        return {
            "alert": self.name,
            "expr": self.expression,
            **held,
            "labels": {"severity": self.severity.value, **self.labels},
            "annotations": annotations,
        }


@dataclass(frozen=True, slots=True)
class Recording:
    """A figure that several rules and panels need, worked out once."""

    name: str
    expression: str

    def rule(self, timings: Timings, links: Links) -> dict[str, Any]:
        """The recording as an entry of a rule file."""
        return {"record": self.name, "expr": self.expression}


def group(
    name: str, rules: Iterable[Alert | Recording], timings: Timings, links: Links
) -> dict[str, Any]:
    """Rules that Prometheus looks at one after the other."""
    return {
        "name": name,
        "interval": timings.evaluation_interval,
        "rules": [rule.rule(timings, links) for rule in rules],
    }
