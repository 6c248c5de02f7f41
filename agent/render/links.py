"""Where an alert sends its reader: a runbook, and a dashboard that already shows the right part."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class DashboardUid(StrEnum):
    """A dashboard by its uid in Grafana."""

    OPERATIONS = "goodput-operations"
    CAPACITY = "goodput-capacity"
    GPUS = "goodput-gpus"


@dataclass(frozen=True, slots=True)
class Links:
    """Where Grafana and the runbooks are found, by whoever reads an alert.

    By default on the reader's own machine: Grafana, and the agent, which serves the runbooks.
    """

    dashboards: str = "http://localhost:3000"
    runbooks: str = "http://localhost:9470/runbooks"

    def runbook(self, alert: str) -> str:
        """The page on an alert."""
        return f"{self.runbooks.rstrip('/')}/{alert}.md"

    def dashboard(
        self, dashboard: DashboardUid, variables: Mapping[str, str], back_s: int, more: str = ""
    ) -> str:
        """A template of Prometheus for the dashboard's URL: `back_s` seconds up to the alert.

        `variables` are the dashboard's and what is filled in for them; `more` is a template for
        further ones.
        """
        # The alert's own time, so that the link still shows the trouble when it is opened later.
        start = _epoch_ms(f"(time() - {back_s})")
        filled = "".join(f"&var-{name}={value}" for name, value in variables.items())
        return (
            f"{self.dashboards.rstrip('/')}/d/{dashboard}"
            f"?from={start}&to={_epoch_ms('time()')}{filled}{more}"
        )


# Where only the operator knows the addresses: names that lead nowhere and say whose is missing.
PLACEHOLDERS = Links(
    dashboards="https://your-grafana.example",
    runbooks="https://your-goodput-agent.example/runbooks",
)


def _epoch_ms(moment: str) -> str:
    return f'{{{{ query "1000 * {moment}" | first | value | printf "%.0f" }}}}'


def of_label(name: str) -> str:
    """A template for the value of an alert's label, as a part of a URL."""
    return f"{{{{ $labels.{name} | urlquery }}}}"
