"""Folds changes: adds them to the rollups. Also makes rollups anew from the rows of requests.

A slice of a fold is one transaction: it deletes the changes that it adds to the rollups. A slice
that fails leaves both as they were, so a fold may run at any time and any number of times.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine, bindparam, delete, or_, select, text, tuple_, update

from agent.catalog.time_units import DAY_S
from agent.store.connection import ROWS_PER_READ, for_writing, in_transaction, reading
from agent.store.explanations import add_causes, earlier
from agent.store.rollups import (
    FIGURES,
    MAX_SERIES,
    NO_COUNTS,
    WIDTHS_S,
    RollupKey,
    RollupSum,
    Series,
    add_to_rollups,
    check_figures,
    keys_of,
    series_key,
    stored_ids,
    target_series,
)
from agent.store.rows import checked_from
from agent.store.tables import (
    CHANGED,
    cause_rollups,
    requests,
    rollup_changes,
    rollup_series,
    rollups,
)
from agent.store.unreadable import DAMAGED, UNREADABLE, readable

# A fold keeps the writer of requests waiting, so it is done in slices.
CHANGES_PER_SLICE = 25

Row = Mapping[Any, Any]
Figures = Sequence[bytes | None]

_KEY = ("width_s", "series", "starts_at")
_WRITE = text(
    f"INSERT INTO rollups ({', '.join((*_KEY, *FIGURES))}, changed) "
    f"VALUES ({', '.join(f':{name}' for name in (*_KEY, *FIGURES))}, {CHANGED}) "
    f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in (*FIGURES, "changed"))
).bindparams(*(bindparam(name, type_=rollups.c[name].type) for name in FIGURES))


def agents_to_fold(connection: Connection) -> Sequence[str]:
    """The agent names that have changes: the file may have been another agent's."""
    query = select(rollup_changes.c.agent).distinct().order_by(rollup_changes.c.agent)
    return list(connection.execute(query).scalars())


class FoldedSlice(NamedTuple):
    """How many changes were folded, and how many of their requests went into series of `other`."""

    changes: int
    replaced: int


def fold_slice(connection: Connection, agent: str, max_series: int = MAX_SERIES) -> FoldedSlice:
    """Fold the oldest CHANGES_PER_SLICE changes of an agent name into its rollups."""
    query = (
        select(rollup_changes)
        .where(rollup_changes.c.agent == agent)
        .order_by(rollup_changes.c.id)
        .limit(CHANGES_PER_SLICE)
    )
    changes = connection.execute(query).mappings().all()
    replaced = 0
    if changes:
        if read := [*filter(_can_be_read, changes)]:
            replaced = _fold(connection, read, max_series)
        folded = rollup_changes.c.id <= changes[-1]["id"]
        connection.execute(delete(rollup_changes).where(rollup_changes.c.agent == agent, folded))
    return FoldedSlice(len(changes), replaced)


def _can_be_read(change: Row) -> bool:
    """Whether a change can be folded. One that cannot is dropped: its bytes are no counts."""
    try:
        check_figures(change["judged_by"], _figures(change))
    except DAMAGED as error:
        UNREADABLE.add(rollup_changes.name, series_key(_series(change), change["starts_at"]), error)
        return False
    return True


def _fold(connection: Connection, changes: Sequence[Row], max_series: int) -> int:
    """Add these changes to their rollups; returns how many requests went into series of `other`."""
    by_key: dict[RollupKey, list[Row]] = {}
    series = [_series(change) for change in changes]
    targets = target_series(connection, series[0].agent, series, max_series)
    for change, own in zip(changes, series, strict=True):
        for key in keys_of(change["starts_at"], targets[own]):
            by_key.setdefault(key, []).append(change)
    ids = stored_ids(connection, {key.series for key in by_key})
    stored = _stored(connection, by_key, ids)
    rows = []
    # The rollups of several widths and lengths often have the same figures and get the same
    # changes: their sum is computed once.
    computed: dict[tuple[Any, ...], dict[str, bytes | None]] = {}
    for key, of_key in sorted(by_key.items(), key=itemgetter(0)):
        row = dict(zip(_KEY, (key.width_s, ids[key.series], key.starts_at), strict=True))
        before = stored.get(key)
        same_sum = (before and (*before,), *(change["id"] for change in of_key))
        if same_sum not in computed:
            computed[same_sum] = _folded(key.series.judged_by, before, of_key)
        rows.append(row | computed[same_sum])
    connection.execute(_WRITE, rows)
    return _replaced(changes, series, targets)


def _replaced(
    changes: Sequence[Row], series: Sequence[Series], targets: Mapping[Series, Series]
) -> int:
    """How many requests of these changes are counted in another series than their own."""
    replaced = RollupSum()
    for change, own in zip(changes, series, strict=True):
        if targets[own] != own and not change["gone"]:
            replaced.add(own.judged_by, _figures(change))
    return replaced.tally().requests


def _folded(
    objectives: str, stored: Figures | None, changes: Sequence[Row]
) -> dict[str, bytes | None]:
    """The columns of a rollup after its changes; one without requests stays, to be published."""
    rollup_sum = RollupSum()
    if stored is not None:
        rollup_sum.add(objectives, stored)
    for change in changes:
        rollup_sum.add(objectives, _figures(change), gone=change["gone"])
    return rollup_sum.figures(objectives)


def _series(row: Row) -> Series:
    return Series(*(row[name] for name in Series._fields))


def _figures(row: Row) -> Figures:
    return [row[name] for name in FIGURES]


def _stored(
    connection: Connection, keys: Collection[RollupKey], ids: Mapping[Series, int]
) -> dict[RollupKey, Figures]:
    """The stored figures of these rollups, where a rollup is stored."""
    by_place = {(key.width_s, ids[key.series], key.starts_at): key for key in keys}
    found = {}
    for width_s in WIDTHS_S:
        # A slice of changes gives fewer parameters than SQLite allows.
        pairs = sorted(place[1:] for place in by_place if place[0] == width_s)
        query = select(rollups).where(
            rollups.c.width_s == width_s,
            # SQLite uses no index for pairs.
            rollups.c.series.in_(sorted({series for series, _ in pairs})),
            rollups.c.starts_at.in_(sorted({starts_at for _, starts_at in pairs})),
            tuple_(rollups.c.series, rollups.c.starts_at).in_(pairs),
        )
        for row in connection.execute(query).mappings():
            key = by_place[width_s, row["series"], row["starts_at"]]
            try:
                check_figures(key.series.judged_by, _figures(row))
            except DAMAGED as error:
                # It begins anew: nothing can be added to what cannot be read.
                UNREADABLE.add(rollups.name, series_key(key.series, key.starts_at), error)
            else:
                found[key] = _figures(row)
    return found


def rebuild_rollups(
    connection: Connection, agent: str, from_s: int, until_s: int, max_series: int = MAX_SERIES
) -> None:
    """Make an agent's rollups of whole UTC days (Unix seconds) anew from its counted rows.

    Only for days whose rows have not expired: the new rollups count no expired row. Raises
    ValueError where a bound is not the start of a day.
    """
    if from_s % DAY_S or until_s % DAY_S:
        raise ValueError(f"{from_s} to {until_s} are no whole days of UTC: no rollup may be cut")
    _empty_days(connection, agent, from_s, until_s)
    of_agent = requests.c.agent.is_(None) if agent == "" else requests.c.agent == agent
    query = select(requests).where(
        of_agent, requests.c.counted, requests.c.ended_at >= from_s, requests.c.ended_at < until_s
    )
    rows = connection.execute(query, execution_options={"yield_per": ROWS_PER_READ})
    for part in rows.mappings().partitions():
        judged = readable(requests, part, lambda row: (row, checked_from(row)))
        add_to_rollups(connection, [item for _, item in judged])
        explained = [each for row, item in judged for each in earlier(row, item)]
        add_causes(connection, explained, max_series)
    while fold_slice(connection, agent, max_series).changes:
        pass


def _empty_days(connection: Connection, agent: str, from_s: int, until_s: int) -> None:
    """Set the sums of these days to zero. The rows stay, to be published."""
    series = select(rollup_series.c.id).where(rollup_series.c.agent == agent)
    nothing = {name: NO_COUNTS if name == "counts" else None for name in FIGURES}
    for table, zeros in (
        (rollups, nothing),
        (cause_rollups, {"requests": 0, "top_requests": 0, "excess_s": None}),
    ):
        within = (table.c.starts_at >= from_s, table.c.starts_at < until_s)
        connection.execute(update(table).where(table.c.series.in_(series), *within).values(zeros))
    changes = rollup_changes.c
    within = (changes.starts_at >= from_s, changes.starts_at < until_s)
    connection.execute(delete(rollup_changes).where(changes.agent == agent, *within))


def agents_with_series(connection: Connection) -> Sequence[str]:
    """The agent names under which there are series."""
    query = select(rollup_series.c.agent).distinct().order_by(rollup_series.c.agent)
    return list(connection.execute(query).scalars())


def expire_series(connection: Connection, agent: str) -> int:
    """Delete the series of an agent name that have no rollup left; returns how many."""
    left = [
        select(table.c.series)
        .where(table.c.width_s.in_(WIDTHS_S), table.c.series == rollup_series.c.id)
        .exists()
        for table in (rollups, cause_rollups)
    ]
    old = delete(rollup_series).where(rollup_series.c.agent == agent, ~or_(*left))
    return connection.execute(old).rowcount


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
