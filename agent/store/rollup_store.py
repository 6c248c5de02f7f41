"""Brings the stored rollups of an agent up to date, one short transaction after another."""

from collections.abc import Callable
from functools import partial

from sqlalchemy import Engine

from agent.catalog.time_units import DAY_S
from agent.store.connection import for_writing, in_transaction, reading
from agent.store.folding import CHANGES_PER_SLICE, agents_to_fold, fold_slice, rebuild_rollups
from agent.store.series_places import MAX_SERIES


class RollupStore:
    """Folds and rebuilds the rollups of one agent. Raises StoreUnavailable.

    Beyond `max_series`, new models and tenants are counted as `other`; `on_replaced` gets the
    number of their requests after each fold. `give_way` is called before each slice.
    """

    def __init__(
        self,
        engine: Engine,
        agent: str,
        max_series: int = MAX_SERIES,
        on_replaced: Callable[[int], None] = lambda _: None,
        give_way: Callable[[], None] = lambda: None,
    ) -> None:
        self._max_series = max_series
        self._reading = engine
        self._engine = for_writing(engine)
        self._agent = agent
        self._on_replaced = on_replaced
        self._give_way = give_way

    def fold(self) -> int:
        """Fold the changes of requests into the rollups; returns how many changes were folded.

        It folds slice by slice, so that the request writer gets its turns. The next call folds
        whatever was left.
        """
        folded = 0
        # Most of the time there is nothing to fold, and then nothing is written.
        with reading(self._reading) as connection:
            agents = agents_to_fold(connection)
        for agent in agents:
            slice_of = CHANGES_PER_SLICE
            while slice_of == CHANGES_PER_SLICE:
                self._give_way()
                slice_of, replaced = in_transaction(
                    self._engine, partial(fold_slice, agent=agent, max_series=self._max_series)
                )
                self._on_replaced(replaced)
                folded += slice_of
        return folded

    def rebuild(self, from_s: int, until_s: int) -> None:
        """Make this agent's rollups of whole UTC days anew from its rows, a day at a time.

        Only for days with all their rows: expired rows are no longer counted.
        """
        for day in range(from_s, until_s, DAY_S):
            in_transaction(
                self._engine,
                partial(
                    rebuild_rollups,
                    agent=self._agent,
                    from_s=day,
                    until_s=day + DAY_S,
                    max_series=self._max_series,
                ),
            )
