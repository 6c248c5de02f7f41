"""The upkeep of a shared PostgreSQL by an agent with a journal."""

from functools import partial

from agent.store.connection import for_writing, in_transaction, open_engine
from agent.store.journal.shared_rows import expire_marks
from agent.store.minute_sums import merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.retention import Retention
from agent.store.rollup_store import RollupStore
from agent.store.time_limits import UPKEEP_S, limit_waits
from agent.store.transactions import Joining, request_settle
from agent.store.writing import Settle, nothing_waits


class PostgresUpkeep:
    """The jobs of an agent on a shared PostgreSQL. Raises StoreUnavailable."""

    def __init__(
        self,
        url: str,
        agent: str,
        *,
        keep_requests_s: float,
        keep_rollups_s: float,
        max_series: int,
    ) -> None:
        self._engine = open_engine(url, pool_pre_ping=False)
        limit_waits(self._engine, UPKEEP_S)
        self._agent = agent
        self._keep_requests_s, self._keep_rollups_s = keep_requests_s, keep_rollups_s
        self._rollups = RollupStore(self._engine, agent, max_series)
        self._settle: Settle = nothing_waits

    def settle_by(self, joining: Joining) -> None:
        """Let each `fold` settle the rows of this agent that wait there for another view.

        The agent wrote these rows itself, before it had a journal.
        """
        self._settle = request_settle(self._engine, joining)

    def fold(self, now: float) -> None:
        """Fold what was forwarded into the rollups."""
        self._settle(now)
        self._rollups.fold(now)

    def expire(self, now: float) -> None:
        """Delete old rows, and merge old minutes."""
        requests_before, rollups_before = now - self._keep_requests_s, now - self._keep_rollups_s
        Retention(self._engine).expire(requests_before, rollups_before, now)
        MinuteStore(self._engine, self._agent).expire(rollups_before)
        merge_minutes(self._engine, self._agent, now)
        marks = partial(
            expire_marks, agent=self._agent, own_before=requests_before, before=rollups_before
        )
        in_transaction(for_writing(self._engine), marks)

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()
