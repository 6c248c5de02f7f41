"""Sums of windows: a long time is told by few of them, and old ones are kept as hours or days.

Added up are windows of one engine between which no figure of a period tells a difference: they had
the same model, GPUs and peaks, and what is unknown of one is unknown of all.
"""

import json
from collections import Counter
from collections.abc import Sequence
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
)
from sqlalchemy.exc import SQLAlchemyError

from agent.errors import StoreUnavailable
from agent.records.minute import MinuteRow
from agent.records.queries import Selection, Window
from agent.store.connection import cause, for_writing
from agent.store.minutes import ask, minute_from
from agent.store.rollups import DAY_S, HOUR_S, KEEP_S, take_turns
from agent.store.tables import engine_windows

_WINDOW = engine_windows.c

# What tells windows apart.
_ALIKE = (
    *("agent", "engine", "model", "gpus", "cache_full", "steps", "method"),
    *("peak_flops_per_s", "peak_bytes_per_s"),
)
# Shares of what could have been done, so that each counts by its length.
_SHARES = ("engine_mfu", "engine_mbu", "hardware_mfu", "hardware_mbu")
# Of single minutes, and gone with them.
_OF_A_MINUTE = ("disagreements",)
# Counts by name, as JSON.
_COUNTS = "good_tokens_by_objective"
_TIMES = ("starts_at", "from_at", "until")
_SUMMED = tuple(
    column.name
    for column in engine_windows.columns
    if column.name not in (*_ALIKE, *_SHARES, *_OF_A_MINUTE, *_TIMES, _COUNTS)
)

# A month of a hundred engines is read in seconds where it has few minutes.
MINUTES_KEPT_S = 6 * HOUR_S

# What is put in place of narrower windows of which age.
_MERGED = ((HOUR_S, MINUTES_KEPT_S), (DAY_S, KEEP_S[HOUR_S]))
# A request may come so late that it counts in windows of that long ago.
_OPEN_S = 3 * HOUR_S

# Writing takes the database from others, so it is done in slices.
MERGES_PER_SLICE = 100


def _unknown() -> ColumnElement[int]:
    """A number for which of the figures are unknown."""
    told = [name for name in (*_SUMMED, *_SHARES, _COUNTS) if _WINDOW[name].nullable]
    bits = [
        case((_WINDOW[name].is_(None), literal(2**place, BigInteger)), else_=literal(0, BigInteger))
        for place, name in enumerate(told)
    ]
    return sum(bits[1:], start=bits[0])


_LENGTH_S = _WINDOW.busy_s + _WINDOW.idle_s + _WINDOW.unknown_s


def _summed(conditions: Sequence[ColumnElement[bool]], *apart: ColumnElement[Any]) -> Select[Any]:
    """Asks for windows added up, those apart that differ in `apart`.

    Each begins with its first window, and is as long as all of them: `length_s`.
    """
    shares = [
        (func.sum(_WINDOW[name] * _LENGTH_S) / func.nullif(func.sum(_LENGTH_S), 0)).label(name)
        for name in _SHARES
    ]
    return (
        select(
            *(_WINDOW[name] for name in _ALIKE),
            func.min(_WINDOW.starts_at).label("starts_at"),
            func.min(_WINDOW.from_at).label("from_at"),
            func.sum(_LENGTH_S).label("length_s"),
            *(func.sum(_WINDOW[name]).label(name) for name in _SUMMED),
            *shares,
            func.aggregate_strings(_WINDOW[_COUNTS], ",").label(_COUNTS),
        )
        .where(*conditions)
        .group_by(*(_WINDOW[name] for name in _ALIKE), _unknown(), *apart)
    )


def _as_row(found: RowMapping) -> dict[str, Any]:
    """A sum of windows as the row of one."""
    told = {str(name): value for name, value in found.items()}
    counts: Counter[str] = Counter()
    for each in json.loads(f"[{told[_COUNTS] or ''}]"):
        counts.update(each)
    until = told["from_at"] + told.pop("length_s")
    known = None if told[_COUNTS] is None else json.dumps(counts)
    return told | {"until": until, "disagreements": "[]", _COUNTS: known}


class MinuteQueries:
    """Asks for the windows of all agents. Raises StoreUnavailable."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def windows(self, over: Window, chosen: Selection) -> list[MinuteRow]:
        """What began in a time, of an engine and a model or of all of them, as few windows.

        Those of the newest minute are told one by one, and all before added up where they can be.
        """
        wanted = {"engine": chosen.engine, "model": chosen.model}
        inside = [
            _WINDOW.starts_at >= over.from_s,
            _WINDOW.starts_at < over.until,
            *(_WINDOW[name] == told for name, told in wanted.items() if told is not None),
        ]
        ((newest,),) = ask(self._engine, select(func.max(_WINDOW.starts_at)).where(*inside))
        if newest is None:
            return []
        before = ask(self._engine, _summed([*inside, _WINDOW.starts_at < newest]))
        last = select(engine_windows).where(*inside, _WINDOW.starts_at == newest)
        found = [_as_row(row._mapping) for row in before]
        found += [row._mapping for row in ask(self._engine, last)]
        found.sort(key=lambda row: (row["starts_at"], row["agent"], row["engine"]))
        return [minute_from(row) for row in found]


def merge_minutes(engine: Engine, agent: str, now: float) -> int:
    """Put hours in place of an agent's old minutes, and days in place of old hours.

    The answer is how many of them were made. Slice by slice, so that others get their turns. Raises
    StoreUnavailable.
    """
    try:
        return sum(
            _merge(for_writing(engine), agent, width_s, now - kept_s) for width_s, kept_s in _MERGED
        )
    except SQLAlchemyError as error:
        raise StoreUnavailable(f"old windows stay as they are: {cause(error)}") from error


def _merge(engine: Engine, agent: str, width_s: int, before: float) -> int:
    merged, slice_of = 0, MERGES_PER_SLICE
    while slice_of == MERGES_PER_SLICE:
        with engine.begin() as connection:
            slice_of = _merge_slice(connection, agent, width_s, before)
        merged += slice_of
    return merged


def _merge_slice(connection: Connection, agent: str, width_s: int, before: float) -> int:
    """Put some windows of a width in place of narrower ones; the answer is how many.

    What is young enough to be counted again stays.
    """
    take_turns(connection, agent)
    wanted = connection.execute(_in_parts(agent, width_s, before)).all()
    for engine, begin in wanted:
        within = (
            _WINDOW.agent == agent,
            _WINDOW.engine == engine,
            _WINDOW.starts_at >= begin,
            _WINDOW.starts_at < begin + width_s,
        )
        rows = [_as_row(found) for found in connection.execute(_summed(within)).mappings()]
        connection.execute(delete(engine_windows).where(*within))
        connection.execute(insert(engine_windows), rows)
    return len(wanted)


def _in_parts(agent: str, width_s: int, before: float) -> Select[Any]:
    """Old hours or days of which windows can still be added up."""
    begin = _WINDOW.starts_at - _WINDOW.starts_at % width_s
    last = (
        select(_WINDOW.engine, func.max(_WINDOW.starts_at).label("newest"))
        .where(_WINDOW.agent == agent)
        .group_by(_WINDOW.engine)
        .subquery()
    )
    found = (
        select(_WINDOW.engine, begin.label("begin"))
        .join(last, last.c.engine == _WINDOW.engine)
        .where(
            _WINDOW.agent == agent,
            before >= begin + width_s,
            last.c.newest - _OPEN_S >= begin + width_s,
        )
        .group_by(_WINDOW.engine, begin, *(_WINDOW[name] for name in _ALIKE), _unknown())
        .having(func.count() > 1)
        .subquery()
    )
    return (
        select(found.c.engine, found.c.begin)
        .distinct()
        .order_by(found.c.begin, found.c.engine)
        .limit(MERGES_PER_SLICE)
    )
