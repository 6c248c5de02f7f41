"""What happens on the site: nothing, then every fault at once, then their end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.faults import FAULTS, ROLES, Fault
from tests.end_to_end.site import Site
from tests.real_parts.alertmanager import WITHIN_S, PostedAlert
from tests.real_parts.waiting import eventually

# The watchdog is sent every three to six seconds, and no condition of these faults must hold for
# longer than fifteen.
QUIET, SETTLED = 5, 2

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Story:
    """Alerts before the faults, and alerts until all faults were over."""

    before: tuple[PostedAlert, ...]
    stirring: frozenset[str]
    all_: tuple[PostedAlert, ...]
    site: Site

    def of(self, fault: Fault) -> Mapping[Labels, list[str]]:
        """Alerts of a fault by their labels, each with its statuses in order.

        Alertmanager reports the end of a muted alert if another of its group was not muted; such an
        end without a beginning is left out.
        """
        found: dict[Labels, list[str]] = {}
        for alert in self.all_:
            key = frozenset(alert.labels.items())
            if fault.is_reported_by(alert, self.site) and (
                alert.status == "firing" or key in found
            ):
                found.setdefault(key, []).append(alert.status)
        return found


@contextmanager
def played(folder: Path) -> Iterator[Story]:
    """The whole story; the site keeps running until the end of the block."""
    engines = {fault.name: fault.window for fault in FAULTS if fault.of_engine}
    with Site(folder, engines, ROLES) as site:
        _wait_for_every_engine(site)
        begun = _wait_for_calm(site)
        site.alerting.watch(QUIET)
        before, stirring = tuple(site.alerting.webhook.alerts()[begun:]), _stirring(site)
        for fault in FAULTS:
            fault.begin(site)
        _await(site, "firing")
        site.alerting.watch(SETTLED)
        for fault in FAULTS:
            fault.end(site)
        _await(site, "resolved")
        site.alerting.watch(SETTLED)
        yield Story(before, stirring, tuple(site.alerting.webhook.alerts()[begun:]), site)


def _wait_for_every_engine(site: Site) -> None:
    served = "count(rate(llm_requests_total{status='ok'}[10s]) > 0)"
    eventually(
        lambda: (
            [row["value"][1] for row in site.alerting.prometheus.query(served)]
            == [str(len(site.engines))]
        ),
        within_s=WITHIN_S,
        what="requests of every engine",
    )


def _wait_for_calm(site: Site) -> int:
    """The number of alerts while the site started: a busy machine may truly delay its polls."""
    eventually(lambda: _stirring(site) == {"Watchdog"}, within_s=WITHIN_S, what="calm")
    if site.alerting.webhook.alerts():
        site.alerting.watch(SETTLED)
    return len(site.alerting.webhook.alerts())


def _stirring(site: Site) -> frozenset[str]:
    found = site.alerting.prometheus.query("ALERTS")
    return frozenset(row["metric"]["alertname"] for row in found)


def _await(site: Site, status: str) -> None:
    """Return when the alert of each fault had this status; the tests name missing ones."""

    def missing() -> list[str]:
        posted = [alert for alert in site.alerting.webhook.alerts() if alert.status == status]
        return [
            fault.name
            for fault in FAULTS
            if not any(
                fault.is_main(one.labels) and fault.is_reported_by(one, site) for one in posted
            )
        ]

    with suppress(AssertionError):
        eventually(lambda: not missing(), within_s=WITHIN_S, what=status)
