"""What happens on the site: nothing, then every fault at once, then their end."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.end_to_end.faults import FAULTS, ROLES, Fault
from tests.end_to_end.site import Site
from tests.real_parts.alerting import WITHIN_S
from tests.real_parts.waiting import eventually
from tests.real_parts.webhook import Told

# The watchdog is told every three to six seconds, and no condition of these faults must hold for
# longer than fifteen.
QUIET, SETTLED = 5, 2

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Story:
    """What was told before the faults, and what until they all were over."""

    before: tuple[Told, ...]
    stirring: frozenset[str]
    all_: tuple[Told, ...]
    site: Site

    def of(self, fault: Fault) -> Mapping[Labels, list[str]]:
        """What was told of a fault: each alert by its labels, with its statuses in their order.

        Alertmanager tells the end of one that was muted, if another of its group was not; such an
        end without a beginning is left out.
        """
        found: dict[Labels, list[str]] = {}
        for told in self.all_:
            key = frozenset(told.labels.items())
            if fault.is_told_by(told, self.site) and (told.status == "firing" or key in found):
                found.setdefault(key, []).append(told.status)
        return found


@contextmanager
def played(folder: Path) -> Iterator[Story]:
    """The whole story; the site runs on, as it was at the end, as long as the block lasts."""
    engines = {fault.name: fault.window for fault in FAULTS if fault.of_engine}
    with Site(folder, engines, ROLES) as site:
        _everything_is_seen(site)
        site.alerting.watch(QUIET)
        before, stirring = tuple(site.alerting.webhook.told()), _stirring(site)
        for fault in FAULTS:
            fault.begin(site)
        _await(site, "firing")
        site.alerting.watch(SETTLED)
        for fault in FAULTS:
            fault.end(site)
        _await(site, "resolved")
        site.alerting.watch(SETTLED)
        yield Story(before, stirring, tuple(site.alerting.webhook.told()), site)


def _everything_is_seen(site: Site) -> None:
    served = "count(rate(llm_requests_total{status='ok'}[10s]) > 0)"
    eventually(
        lambda: (
            [row["value"][1] for row in site.alerting.prometheus.query(served)]
            == [str(len(site.engines))]
        ),
        within_s=WITHIN_S,
        what="requests of every engine",
    )


def _stirring(site: Site) -> frozenset[str]:
    found = site.alerting.prometheus.query("ALERTS")
    return frozenset(row["metric"]["alertname"] for row in found)


def _await(site: Site, status: str) -> None:
    """Return when the alert of each fault was told so; the tests name those that never were."""

    def missing() -> list[str]:
        told = [told for told in site.alerting.webhook.told() if told.status == status]
        return [
            fault.name
            for fault in FAULTS
            if not any(fault.is_main(one.labels) and fault.is_told_by(one, site) for one in told)
        ]

    with suppress(AssertionError):
        eventually(lambda: not missing(), within_s=WITHIN_S, what=status)
