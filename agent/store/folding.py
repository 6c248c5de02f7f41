"""Folding what commits changed into the rollups, and making rollups anew from rows.

A fold is one transaction: changes are gone when the rollups hold them, and where it fails both are
as before. So it does not matter when it runs, how often, or whether it was cut off.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    RowMapping,
    bindparam,
    delete,
    insert,
    or_,
    select,
    text,
    tuple_,
)

from agent.analysis.difference import difference
from agent.analysis.tally import MEASURES, Tally
from agent.store.rollups import (
    DAY_S,
    WIDTHS_S,
    Change,
    RollupKey,
    Series,
    add_to_rollups,
    decoded,
    encoded,
    spread,
    take_turns,
)
from agent.store.rows import judged_from
from agent.store.tables import requests, rollup_changes, rollup_series, rollups

# Folding takes the database from its writer, so it is done in slices.
CHANGES_PER_SLICE = 1000

# Another agent's changes are its own to fold, unless it is gone for good.
ABANDONED_AFTER_S = 300.0

_ROWS_PER_READ = 4096

# Drivers limit the parameters of a statement, SQLite to 32766; two are taken by each rollup.
_ROLLUPS_PER_READ = 5000

_KEY = ("width_s", "series", "starts_at")
_FIGURES = ("counts", *MEASURES)
_WRITE = text(
    f"INSERT INTO rollups ({', '.join((*_KEY, *_FIGURES))}) "
    f"VALUES ({', '.join(f':{name}' for name in (*_KEY, *_FIGURES))}) "
    f"ON CONFLICT ({', '.join(_KEY)}) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _FIGURES)
).bindparams(*(bindparam(name, type_=rollups.c[name].type) for name in _FIGURES))
_DELETE = text(f"DELETE FROM rollups WHERE {' AND '.join(f'{name} = :{name}' for name in _KEY)}")


def agents_to_fold(connection: Connection, agent: str, now: float) -> Sequence[str]:
    """Whose changes this agent folds: its own, those of no agent, and those that others left."""
    query = (
        select(rollup_changes.c.agent)
        .where(
            or_(
                rollup_changes.c.agent.in_((agent, "")),
                rollup_changes.c.starts_at < now - ABANDONED_AFTER_S,
            )
        )
        .distinct()
        .order_by(rollup_changes.c.agent)
    )
    return list(connection.execute(query).scalars())


def fold_slice(connection: Connection, agent: str) -> int:
    """Fold the oldest changes of an agent name into its rollups; the answer is how many."""
    take_turns(connection, agent)
    query = (
        select(rollup_changes)
        .where(rollup_changes.c.agent == agent)
        .order_by(rollup_changes.c.id)
        .limit(CHANGES_PER_SLICE)
    )
    rows = connection.execute(query).mappings().all()
    if rows:
        _fold(connection, [change_from(row) for row in rows])
        # By number: a change with a lower one may be committed after this one was read.
        gone = [{"row": row["id"]} for row in rows]
        connection.execute(
            delete(rollup_changes).where(rollup_changes.c.id == bindparam("row")), gone
        )
    return len(rows)


def change_from(row: RowMapping) -> Change:
    """The change as it stands in a row."""
    series = Series(*(row[name] for name in Series._fields))
    return Change(row["starts_at"], series, row["gone"], decoded(_plain(row), series.objectives))


def _plain(row: RowMapping) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


def _fold(connection: Connection, changes: Iterable[Change]) -> None:
    by_key: dict[RollupKey, list[Change]] = {}
    for change in _together(changes):
        for key in spread(change.starts_at, change.series):
            by_key.setdefault(key, []).append(change)
    numbers = _numbers(connection, {key.series for key in by_key})
    stored = _stored(connection, by_key, numbers)
    tallies = {key: _changed(stored.get(key), told) for key, told in by_key.items()}
    _write(connection, tallies, numbers)


def _together(changes: Iterable[Change]) -> Iterable[Change]:
    """The same with neighbours of one stretch and series as one: most commits change the same."""
    joined: dict[tuple[int, Series], list[Change]] = {}
    for change in changes:
        before = joined.setdefault((change.starts_at, change.series), [])
        if before and before[-1].gone == change.gone:
            before[-1].tally.add(change.tally)
        else:
            before.append(change)
    return (change for told in joined.values() for change in told)


def _changed(stored: Tally | None, changes: Sequence[Change]) -> Tally:
    tally = Tally() if stored is None else stored
    for change in changes:
        if change.gone:
            tally = difference(tally, change.tally)
        else:
            tally.add(change.tally)
    return tally


def _numbers(connection: Connection, wanted: Collection[Series]) -> dict[Series, int]:
    """The numbers of these series, which are given out where there are none yet."""
    agents = {series.agent for series in wanted}
    numbers = _known(connection, agents)
    new = sorted(set(wanted) - numbers.keys())
    if new:
        connection.execute(insert(rollup_series), [series._asdict() for series in new])
        numbers = _known(connection, agents)
    return numbers


def _known(connection: Connection, agents: Collection[str]) -> dict[Series, int]:
    query = select(rollup_series).where(rollup_series.c.agent.in_(agents))
    rows = connection.execute(query).mappings()
    return {Series(*(row[name] for name in Series._fields)): row["id"] for row in rows}


def _stored(
    connection: Connection, keys: Collection[RollupKey], numbers: Mapping[Series, int]
) -> dict[RollupKey, Tally]:
    """Those of the rollups that there are."""
    by_place = {(key.width_s, numbers[key.series], key.starts_at): key for key in keys}
    places = sorted(by_place)
    found = {}
    for width_s in {key.width_s for key in keys}:
        pairs = [place[1:] for place in places if place[0] == width_s]
        for first in range(0, len(pairs), _ROLLUPS_PER_READ):
            query = select(rollups).where(
                rollups.c.width_s == width_s,
                tuple_(rollups.c.series, rollups.c.starts_at).in_(
                    pairs[first : first + _ROLLUPS_PER_READ]
                ),
            )
            for row in connection.execute(query).mappings():
                key = by_place[width_s, row["series"], row["starts_at"]]
                found[key] = decoded(_plain(row), key.series.objectives)
    return found


def _write(
    connection: Connection, tallies: Mapping[RollupKey, Tally], numbers: Mapping[Series, int]
) -> None:
    empty, filled = [], []
    for key, tally in sorted(tallies.items(), key=lambda item: item[0]):
        place = dict(zip(_KEY, (key.width_s, numbers[key.series], key.starts_at), strict=True))
        if tally.requests:
            filled.append(place | encoded(tally, key.series.objectives))
        else:
            empty.append(place)
    if empty:
        connection.execute(_DELETE, empty)
    if filled:
        connection.execute(_WRITE, filled)


def rebuild_rollups(connection: Connection, agent: str, from_s: int, until_s: int) -> None:
    """Make an agent's rollups of whole UTC days anew from its counted rows.

    Only for days whose rows are all kept: what was let go is no longer counted.
    """
    if from_s % DAY_S or until_s % DAY_S:
        raise ValueError(f"{from_s} to {until_s} are no whole days of UTC: no rollup may be cut")
    take_turns(connection, agent)
    if connection.dialect.name == "postgresql":
        # What is committed from here on is told by changes that come after those deleted here.
        connection.execute(text("LOCK TABLE rollup_changes IN EXCLUSIVE MODE"))
    _let_go(connection, agent, from_s, until_s)
    who = requests.c.agent.is_(None) if agent == "" else requests.c.agent == agent
    query = select(requests).where(
        who, requests.c.counted, requests.c.ended_at >= from_s, requests.c.ended_at < until_s
    )
    rows = connection.execute(query, execution_options={"yield_per": _ROWS_PER_READ})
    for part in rows.mappings().partitions():
        add_to_rollups(connection, [judged_from(_plain(row)) for row in part])
    while fold_slice(connection, agent):
        pass


def _let_go(connection: Connection, agent: str, from_s: int, until_s: int) -> None:
    of_agent = select(rollup_series.c.id).where(rollup_series.c.agent == agent)
    for table, whose in (
        (rollup_changes, rollup_changes.c.agent == agent),
        (rollups, rollups.c.series.in_(of_agent)),
    ):
        within = (table.c.starts_at >= from_s, table.c.starts_at < until_s)
        connection.execute(delete(table).where(whose, *within))


def agents_with_series(connection: Connection) -> Sequence[str]:
    """The agent names under which there are series."""
    query = select(rollup_series.c.agent).distinct().order_by(rollup_series.c.agent)
    return list(connection.execute(query).scalars())


def let_go_of_series(connection: Connection, agent: str) -> int:
    """Delete the series of an agent name of which no rollup is left; the answer is how many."""
    take_turns(connection, agent)
    left = select(rollups.c.series).where(
        rollups.c.width_s.in_(WIDTHS_S), rollups.c.series == rollup_series.c.id
    )
    old = delete(rollup_series).where(rollup_series.c.agent == agent, ~left.exists())
    return connection.execute(old).rowcount
