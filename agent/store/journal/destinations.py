"""The kinds of shared databases that a journal can be forwarded to."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from agent.store.clickhouse.connecting import CLICKHOUSE
from agent.store.clickhouse.destination import ClickHouseDestination
from agent.store.clickhouse.upkeep import ClickHouseUpkeep
from agent.store.journal.destination import BatchDestination, JournalFile, SharedDatabase
from agent.store.journal.postgres_destination import PostgresDestination
from agent.store.journal.postgres_upkeep import PostgresUpkeep
from agent.store.transactions import Joining


class Upkeep(Protocol):
    """The jobs of an agent on a shared database. Raises StoreUnavailable."""

    def settle_by(self, joining: Joining) -> None:
        """Let each `fold` settle the rows of this agent that wait there for another view."""

    def fold(self, now: float) -> None:
        """Bring its rollups up to date."""

    def expire(self, now: float) -> None:
        """Delete old rows, and merge old minutes."""

    def close(self) -> None:
        """Close the connections."""


class _Kind(NamedTuple):
    destination: Callable[[SharedDatabase, JournalFile], BatchDestination]
    upkeep: Callable[..., Upkeep]


_POSTGRES = _Kind(PostgresDestination, PostgresUpkeep)
_KINDS = {CLICKHOUSE: _Kind(ClickHouseDestination, ClickHouseUpkeep)}


def _kind(url: str) -> _Kind:
    return _KINDS.get(url.partition(":")[0], _POSTGRES)


def destination_of(shared: SharedDatabase, journal: JournalFile) -> BatchDestination:
    """The destination at the URL of a shared database. Raises SettingsInvalid."""
    return _kind(shared.url).destination(shared, journal)


def upkeep_of(
    url: str, agent: str, *, keep_requests_s: float, keep_rollups_s: float, max_series: int
) -> Upkeep:
    """The upkeep of the shared database at a URL. Raises SettingsInvalid."""
    return _kind(url).upkeep(
        url,
        agent,
        keep_requests_s=keep_requests_s,
        keep_rollups_s=keep_rollups_s,
        max_series=max_series,
    )
