"""Sums of booked minutes: for queries of long windows, and old minutes merged into hours and days.

Only rows of one engine with the same model, GPUs, peaks and known figures are summed, so that no
figure of a window changes by it.
"""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    RowMapping,
    Select,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    tuple_,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import aggregate_strings

from agent.catalog.time_units import DAY_S, HOUR_S
from agent.records.minute import MinuteRow
from agent.records.queries import Selection, Window
from agent.store.columns import minute_from
from agent.store.connection import for_writing, in_transaction, read_all
from agent.store.rollups import KEEP_S
from agent.store.tables import engine_minutes
from agent.store.unreadable import DAMAGED, check_row, readable, readable_rows

_MINUTE = engine_minutes.c

# Rows are summed only where these are equal.
_ALIKE = (
    *("agent", "engine", "model", "gpus", "cache_full", "steps", "method"),
    *("peak_flops_per_s", "peak_bytes_per_s", "ledger_closed"),
)
# Ratios, of which the mean is weighted by length.
_SHARES = tuple(
    f"{source}_{figure}"
    for source in ("counters", "engine", "hardware")
    for figure in ("mfu", "mbu")
)
# Of single minutes; dropped when minutes are merged.
_OF_A_MINUTE = ("disagreements", "unmatched")
# A JSON object of tokens by objective name.
_COUNTS = "good_tokens_by_objective"
_TIMES = ("starts_at", "from_at", "until")
_SUMMED = tuple(
    column.name
    for column in engine_minutes.columns
    if column.name not in (*_ALIKE, *_SHARES, *_OF_A_MINUTE, *_TIMES, _COUNTS, "changed")
)

# So that a month of a hundred engines is read in seconds.
MINUTES_KEPT_S = 6 * HOUR_S

# Width of the merged rows, and the age of the rows that they replace.
MERGED = ((HOUR_S, MINUTES_KEPT_S), (DAY_S, KEEP_S[HOUR_S]))
# A late request can change minutes of this age.
_OPEN_S = 3 * HOUR_S

# Between slices other writers get their turn.
MERGES_PER_SLICE = 100


@compiles(aggregate_strings, "clickhousedb")
def _joined_strings(element: Any, compiler: Any, **given: Any) -> str:
    """As the other databases do: null where none is known."""
    values, separator = (compiler.process(each, **given) for each in element.clauses)
    joined = f"arrayStringConcat(groupArray({values}), {separator})"
    return f"if(count({values}) = 0, NULL, {joined})"


def _unknown() -> ColumnElement[int]:
    """A bit mask of the figures that are unknown."""
    optional = [name for name in (*_SUMMED, *_SHARES, _COUNTS) if _MINUTE[name].nullable]
    bits = [
        case((_MINUTE[name].is_(None), literal(2**place, BigInteger)), else_=literal(0, BigInteger))
        for place, name in enumerate(optional)
    ]
    return sum(bits[1:], start=bits[0])


_LENGTH_S = _MINUTE.busy_s + _MINUTE.idle_s + _MINUTE.unknown_s


def summed(conditions: Sequence[ColumnElement[bool]], *apart: ColumnElement[int]) -> Select[Any]:
    """The query for sums of minutes, grouped by what must be equal, and by `apart`.

    A sum begins with its first minute; `length_s` is the length of all of them.
    """
    shares = [
        (func.sum(_MINUTE[name] * _LENGTH_S) / func.nullif(func.sum(_LENGTH_S), 0)).label(name)
        for name in _SHARES
    ]
    return (
        select(
            *(_MINUTE[name] for name in _ALIKE),
            func.min(_MINUTE.starts_at).label("starts_at"),
            func.min(_MINUTE.from_at).label("from_at"),
            func.sum(_LENGTH_S).label("length_s"),
            *(func.sum(_MINUTE[name]).label(name) for name in _SUMMED),
            *shares,
            func.aggregate_strings(_MINUTE[_COUNTS], ",").label(_COUNTS),
            func.max(_MINUTE.changed).label("changed"),
        )
        .where(*conditions)
        .group_by(*(_MINUTE[name] for name in _ALIKE), _unknown(), *apart)
    )


def as_row(found: RowMapping) -> dict[str, Any]:
    """A sum of minutes as one row. The database joined their JSON objects with commas."""
    row = {str(name): value for name, value in found.items()}
    counts: Counter[str] = Counter()
    for each in json.loads(f"[{row[_COUNTS] or ''}]"):
        counts.update(each)
    until = row["from_at"] + row.pop("length_s")
    known = None if row[_COUNTS] is None else json.dumps(counts, allow_nan=False)
    return row | {"until": until, "disagreements": "[]", "unmatched": None, _COUNTS: known}


class MinuteQueries:
    """Reads the minutes of all agents for the API. Raises StoreUnavailable."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # They are left out of sums, in which one of them would spoil all figures.
        self._unreadable: frozenset[_Key] = frozenset()

    def minutes(
        self, over: Window, chosen: Selection, step_s: int | None = None
    ) -> list[MinuteRow]:
        """The minutes due in a window, of the chosen agent, engine and model, as few rows.

        Those of the newest minute come one by one, all earlier ones summed where they can be.
        With a step in seconds, no sum has minutes of two steps; steps begin with the window.
        """
        try:
            return self._minutes(over, chosen, step_s)
        except DAMAGED:
            self._unreadable |= _unreadable(self._engine, _inside(over, chosen))
        return self._minutes(over, chosen, step_s)

    def _minutes(self, over: Window, chosen: Selection, step_s: int | None) -> list[MinuteRow]:
        inside = [*_inside(over, chosen), *_without(self._unreadable)]
        ((newest,),) = read_all(self._engine, select(func.max(_MINUTE.starts_at)).where(*inside))
        if newest is None:
            return []
        steps = [] if step_s is None else [(_MINUTE.starts_at - over.from_s) // step_s]
        before = read_all(self._engine, summed([*inside, _MINUTE.starts_at < newest], *steps))
        last = select(engine_minutes).where(*inside, _MINUTE.starts_at == newest)
        found = [as_row(row._mapping) for row in before]
        found += [row._mapping for row in read_all(self._engine, last)]
        found.sort(key=lambda row: (row["starts_at"], row["agent"], row["engine"]))
        return [readable_minute(row) for row in found]


def readable_minute(row: Mapping[str, Any]) -> MinuteRow:
    """The minute of a row. Raises one of DAMAGED for one that cannot be read."""
    check_row(engine_minutes, row)
    return minute_from(row)


def _inside(over: Window, chosen: Selection) -> list[ColumnElement[bool]]:
    wanted = {name: getattr(chosen, name) for name in ("agent", "engine", "model")}
    return [
        _MINUTE.starts_at >= over.from_s,
        _MINUTE.starts_at < over.until,
        *(_MINUTE[name] == value for name, value in wanted.items() if value is not None),
    ]


_Key = tuple[str, str, int]
_KEY = (_MINUTE.agent, _MINUTE.engine, _MINUTE.starts_at)


def _unreadable(engine: Engine, conditions: Sequence[ColumnElement[bool]]) -> set[_Key]:
    """The keys of the minutes that cannot be read; they are counted."""
    rows = readable_rows(engine, engine_minutes, select(engine_minutes).where(*conditions))
    whole = readable(
        engine_minutes,
        rows,
        lambda row: (row["agent"], row["engine"], readable_minute(row).starts_at),
    )
    keys = read_all(engine, select(*_KEY).where(*conditions))
    return {(agent, name, starts_at) for agent, name, starts_at in keys} - {*whole}


def _without(keys: Collection[_Key]) -> list[ColumnElement[bool]]:
    """A condition for all other minutes."""
    return [~tuple_(*_KEY).in_(sorted(keys))] if keys else []


def merge_minutes(engine: Engine, agent: str, now: float) -> int:
    """Merge an agent's old minutes into hours, and old hours into days; returns how many it made.

    It works slice by slice, so that other writers get their turn. A minute that cannot be read
    stays as it is. Raises StoreUnavailable.
    """
    merge = partial(_merge_all, for_writing(engine), agent, now)
    try:
        return merge(())
    except DAMAGED:
        old = [_MINUTE.agent == agent, _MINUTE.starts_at < now - MINUTES_KEPT_S]
        return merge(_without(_unreadable(engine, old)))


_Conditions = Sequence[ColumnElement[bool]]


def _merge_all(engine: Engine, agent: str, now: float, kept: _Conditions) -> int:
    return sum(_merge(engine, agent, width_s, now - kept_s, kept) for width_s, kept_s in MERGED)


def _merge(engine: Engine, agent: str, width_s: int, before: float, kept: _Conditions) -> int:
    merged, slice_of = 0, MERGES_PER_SLICE
    while slice_of == MERGES_PER_SLICE:
        slice_of = in_transaction(
            engine, partial(_merge_slice, agent=agent, width_s=width_s, before=before, kept=kept)
        )
        merged += slice_of
    return merged


def _merge_slice(
    connection: Connection, agent: str, width_s: int, before: float, kept: _Conditions
) -> int:
    """Merge the narrower rows of some hours or days; returns of how many.

    Minutes that are young enough to be booked again stay.
    """
    wanted = connection.execute(in_parts(agent, width_s, before, kept)).all()
    for engine, begin in wanted:
        within = (
            _MINUTE.agent == agent,
            _MINUTE.engine == engine,
            _MINUTE.starts_at >= begin,
            _MINUTE.starts_at < begin + width_s,
            *kept,
        )
        rows = [as_row(found) for found in connection.execute(summed(within)).mappings()]
        for row in rows:
            check_row(engine_minutes, row)
        connection.execute(delete(engine_minutes).where(*within))
        connection.execute(insert(engine_minutes), rows)
    return len(wanted)


def in_parts(agent: str, width_s: int, before: float, kept: _Conditions = ()) -> Select[Any]:
    """Selects the engine and the begin of old hours or days with rows that can still be summed."""
    begin = _MINUTE.starts_at - _MINUTE.starts_at % width_s
    last = (
        select(_MINUTE.engine, func.max(_MINUTE.starts_at).label("newest"))
        .where(_MINUTE.agent == agent)
        .group_by(_MINUTE.engine)
        .subquery()
    )
    found = (
        select(_MINUTE.engine, begin.label("begin"))
        .join(last, last.c.engine == _MINUTE.engine)
        .where(
            _MINUTE.agent == agent,
            before >= begin + width_s,
            last.c.newest - _OPEN_S >= begin + width_s,
            *kept,
        )
        .group_by(_MINUTE.engine, begin, *(_MINUTE[name] for name in _ALIKE), _unknown())
        .having(func.count() > 1)
        .subquery()
    )
    return (
        select(found.c.engine, found.c.begin)
        .distinct()
        .order_by(found.c.begin, found.c.engine)
        .limit(MERGES_PER_SLICE)
    )
