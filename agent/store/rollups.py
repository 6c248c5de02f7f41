"""Aggregates of requests by the time they ended: what they are made of, and where they are read.

A commit appends what its requests change, beside their rows: it reads nothing and waits for nobody.
A job folds the changes into the rollups of every width (`agent.store.folding`); until then, whoever
asks adds them. A request that comes late, however late, is one more change.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, insert, text

from agent.analysis.input_lengths import input_length_of
from agent.analysis.tally import MEASURES, Tally, tally_of
from agent.records.objective import JudgedRequest
from agent.store.encoding import decoded_counts, decoded_run, encoded_counts, encoded_run
from agent.store.tables import rollup_changes

HOUR_S = 3600
DAY_S = 86400

# The first answer for the edges of a window, the others for its inside.
WIDTHS_S = (10, 60, HOUR_S, DAY_S)
NARROW_S = WIDTHS_S[0]

# Nobody asks for what is older: longer windows begin on a wider grid. The last are kept as set.
KEEP_S: Mapping[int, float] = {10: 0.25 * DAY_S, 60: 2 * DAY_S, HOUR_S: 15 * DAY_S}

# In these, requests of all input lengths are also one series: months are then read five times
# faster where nobody asks for lengths.
SUMMED_WIDTHS_S = (HOUR_S, DAY_S)
ANY_LENGTH = "*"

# Rows keep whole microseconds, and a rollup must hold what a count of the rows would find.
_HALF_MICROSECOND = 5e-7


class Series(NamedTuple):
    """What the requests of one row of rollups have in common; unknown is ''."""

    agent: str
    engine: str
    model: str
    tenant: str
    input_length: str
    objectives: str


class RollupKey(NamedTuple):
    """What the requests of one rollup have in common."""

    width_s: int
    starts_at: int
    series: Series


class Change(NamedTuple):
    """Requests of a narrow stretch that count from now on, or with `gone` no more."""

    starts_at: int
    series: Series
    gone: bool
    tally: Tally


def grouped(judged: Iterable[JudgedRequest]) -> dict[tuple[int, Series], Tally]:
    """The tallies of these requests, by the start of the narrow stretch and by series."""
    together: dict[tuple[object, ...], list[JudgedRequest]] = {}
    for item in judged:
        record = item.record
        group = (
            (record.ended_at + _HALF_MICROSECOND) // NARROW_S,
            record.agent,
            record.engine,
            record.model,
            record.tenant,
            input_length_of(record.input_tokens),
            item.judgement,
        )
        together.setdefault(group, []).append(item)
    narrow: dict[tuple[int, Series], list[JudgedRequest]] = {}
    for items in together.values():
        narrow.setdefault(_place(items[0]), []).extend(items)
    return {place: tally_of(items) for place, items in narrow.items()}


def _place(item: JudgedRequest) -> tuple[int, Series]:
    record = item.record
    return (
        int((record.ended_at + _HALF_MICROSECOND) // NARROW_S) * NARROW_S,
        Series(
            record.agent or "",
            record.engine or "",
            record.model or "",
            record.tenant or "",
            input_length_of(record.input_tokens) or "",
            ",".join(name for name, _ in item.judgement.by_objective),
        ),
    )


def spread(starts_at: int, series: Series) -> Iterator[RollupKey]:
    """Every rollup that holds what ended in a narrow stretch."""
    summed = series._replace(input_length=ANY_LENGTH)
    for width_s in WIDTHS_S:
        start = starts_at // width_s * width_s
        yield RollupKey(width_s, start, series)
        if width_s in SUMMED_WIDTHS_S:
            yield RollupKey(width_s, start, summed)


def add_to_rollups(
    connection: Connection, judged: Sequence[JudgedRequest], gone: Sequence[JudgedRequest] = ()
) -> None:
    """Count these requests from now on, and those that are gone no more."""
    # Of a rollup that was let go nothing can be taken back, so that comes first.
    changes = [
        {"starts_at": starts_at, "gone": is_gone}
        | series._asdict()
        | encoded(tally, series.objectives)
        for is_gone, items in ((True, gone), (False, judged))
        for (starts_at, series), tally in grouped(items).items()
    ]
    if changes:
        connection.execute(insert(rollup_changes), changes)


def encoded(tally: Tally, objectives: str) -> dict[str, Any]:
    """The figures of a tally by column. Equal tallies give equal bytes."""
    runs = {name: tally.bins.get(name) for name in MEASURES}
    return {"counts": encoded_counts(tally, objectives)} | {
        name: None if run is None else encoded_run(run) for name, run in runs.items()
    }


def decoded(row: Mapping[str, Any], objectives: str) -> Tally:
    """The tally that `encoded` wrote."""
    tally = decoded_counts(row["counts"], objectives)
    tally.bins = {name: decoded_run(row[name]) for name in MEASURES if row[name] is not None}
    return tally


_LOCK_AGENT = text("SELECT pg_advisory_xact_lock(hashtext(:agent))")


def take_turns(connection: Connection, agent: str) -> None:
    """Wait until no other transaction reads and writes back what belongs to this agent name.

    SQLite has one writer at a time anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK_AGENT, {"agent": agent})


@dataclass(frozen=True, slots=True)
class Stretch:
    """A half-open stretch of time in whole Unix seconds, and the width of rollup to read in it."""

    width_s: int
    from_s: int
    until_s: int


def cover(from_s: int, until_s: int, widths_s: Sequence[int] = WIDTHS_S) -> Sequence[Stretch]:
    """The rollups to read for a window whose edges are multiples of NARROW_S, each second once.

    The widest that fit are taken, of these widths, of which each divides the next.
    """
    if from_s >= until_s:
        return ()
    *narrower, widest = widths_s
    if not narrower:
        return (Stretch(widest, from_s, until_s),)
    inside_from = -(-from_s // widest) * widest
    inside_until = until_s // widest * widest
    if inside_from >= inside_until:
        return cover(from_s, until_s, narrower)
    return (
        *cover(from_s, inside_from, narrower),
        Stretch(widest, inside_from, inside_until),
        *cover(inside_until, until_s, narrower),
    )
