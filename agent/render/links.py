"""Links of alerts to a runbook and to a dashboard with its time range and variables set."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class DashboardUid(StrEnum):
    """The uid of a dashboard in Grafana."""

    FLEET = "goodput-fleet"
    OBJECTIVES = "goodput-objectives"
    OPERATIONS = "goodput-operations"
    CAPACITY = "goodput-capacity"
    GPUS = "goodput-gpus"
    AGENTS = "goodput-agents"
    REQUESTS = "goodput-requests"
    REQUESTS_API = "goodput-requests-api"


class RequestDashboard(NamedTuple):
    """A dashboard of single requests, its data source, and the prefix of its variables."""

    uid: DashboardUid
    source: str
    prefix: str = ""

    def url(self, **chosen: str) -> str:
        """Its URL with the time range of the dashboard that links to it."""
        variables = "".join(f"&var-{self.prefix}{name}={value}" for name, value in chosen.items())
        return f"/d/{self.uid}?${{__url_time_range}}{variables}"


# With names of its own, because `All` and several names of other dashboards are no text for the
# API: links between dashboards keep variables of one name.
OF_API = RequestDashboard(DashboardUid.REQUESTS_API, "API", "one_")
REQUEST_DASHBOARDS = (RequestDashboard(DashboardUid.REQUESTS, "PostgreSQL"), OF_API)


@dataclass(frozen=True, slots=True)
class Links:
    """The URLs of Grafana and of the runbooks, which the agent serves.

    The defaults are on the machine of the person who reads the alert.
    """

    dashboards: str = "http://localhost:3000"
    runbooks: str = "http://localhost:9470/runbooks"

    def runbook(self, alert: str, labels: Mapping[str, str]) -> str:
        """A template for the URL of an alert's runbook, which fills in these labels."""
        query = "&".join(f"{name}={value}" for name, value in labels.items())
        return f"{self.runbooks.rstrip('/')}/{alert}.md{query and f'?{query}'}"

    def dashboard(
        self, dashboard: DashboardUid, variables: Mapping[str, str], back_s: int, more: str = ""
    ) -> str:
        """A template of Prometheus for the dashboard's URL: `back_s` seconds up to the alert.

        `variables` are the dashboard's variables with their values; `more` is a template for
        further ones.
        """
        # The alert's own time, so that the link shows the same time range when it is opened later.
        start = _epoch_ms(f"(time() - {back_s})")
        values = "".join(f"&var-{name}={value}" for name, value in variables.items())
        return (
            f"{self.dashboards.rstrip('/')}/d/{dashboard}"
            f"?from={start}&to={_epoch_ms('time()')}{values}{more}"
        )


# For files whose addresses only the operator knows: host names that say which one is missing.
PLACEHOLDERS = Links(
    dashboards="https://your-grafana.example",
    runbooks="https://your-goodput-agent.example/runbooks",
)


def _epoch_ms(time: str) -> str:
    return f'{{{{ query "1000 * {time}" | first | value | printf "%.0f" }}}}'


def of_label(name: str) -> str:
    """A template for the value of an alert's label in a URL."""
    return f"{{{{ $labels.{name} | urlquery }}}}"
