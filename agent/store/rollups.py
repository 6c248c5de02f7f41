"""Aggregates of requests by the time they ended, kept in the same transaction as the rows."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, and_, bindparam, or_, text

from agent.analysis.difference import difference
from agent.analysis.quantiles import BinRun
from agent.analysis.tally import Tally, VerdictCounts, tally_of
from agent.records.objective import JudgedRequest
from agent.store.tables import rollups

# Short ones answer for the edges of a window, long ones for its inside.
NARROW_S = 10
WIDE_S = 60

# Longer windows begin and end on the wide grid, so nobody asks for narrow rollups that are older.
KEEP_NARROW_S = 2 * 86400

# Rows keep whole microseconds, and a rollup must hold what a count of the rows would find.
_HALF_MICROSECOND = 5e-7


class RollupKey(NamedTuple):
    """What the requests of one rollup have in common; unknown is ''."""

    width_s: int
    starts_at: int
    agent: str
    engine: str
    model: str
    tenant: str
    objectives: str


Group = tuple[int, str, str, str, str, str]


def grouped(judged: Iterable[JudgedRequest]) -> dict[RollupKey, Tally]:
    """The tallies of these requests, by narrow and by wide rollup."""
    together: dict[tuple[object, ...], list[JudgedRequest]] = {}
    for item in judged:
        record = item.record
        group = (
            (record.ended_at + _HALF_MICROSECOND) // NARROW_S,
            record.agent,
            record.engine,
            record.model,
            record.tenant,
            item.judgement,
        )
        together.setdefault(group, []).append(item)
    narrow: dict[Group, Tally] = {}
    for items in together.values():
        narrow.setdefault(_group(items[0]), Tally()).add(tally_of(items))
    return _by_width(narrow)


def _group(item: JudgedRequest) -> Group:
    record = item.record
    return (
        int((record.ended_at + _HALF_MICROSECOND) // NARROW_S) * NARROW_S,
        record.agent or "",
        record.engine or "",
        record.model or "",
        record.tenant or "",
        ",".join(name for name, _ in item.judgement.by_objective),
    )


def _by_width(narrow: Mapping[Group, Tally]) -> dict[RollupKey, Tally]:
    tallies: dict[RollupKey, Tally] = {}
    for (starts_at, *rest), tally in narrow.items():
        for width_s in (NARROW_S, WIDE_S):
            key = RollupKey(width_s, starts_at // width_s * width_s, *rest)
            tallies.setdefault(key, Tally()).add(tally)
    return tallies


_KEY = RollupKey._fields
_KEY_NAMES = ", ".join(_KEY)
_LOCK_AGENT = text("SELECT pg_advisory_xact_lock(hashtext(:agent))")

# The first columns of the primary key, all of them: what was never asked for is never read.
_READ = text(
    f"SELECT {_KEY_NAMES}, tally FROM rollups "
    f"WHERE width_s IN ({NARROW_S}, {WIDE_S}) AND starts_at IN :starts AND agent IN :agents"
).bindparams(bindparam("starts", expanding=True), bindparam("agents", expanding=True))

# Drivers limit the parameters of a statement, SQLite to 32766.
_STARTS_PER_READ = 10_000
_WRITE = text(
    f"INSERT INTO rollups ({_KEY_NAMES}, tally) "
    f"VALUES ({', '.join(f':{name}' for name in _KEY)}, :tally) "
    f"ON CONFLICT ({_KEY_NAMES}) DO UPDATE SET tally = excluded.tally"
)

_DELETE = text(f"DELETE FROM rollups WHERE {' AND '.join(f'{name} = :{name}' for name in _KEY)}")


def add_to_rollups(
    connection: Connection, judged: Sequence[JudgedRequest], gone: Sequence[JudgedRequest] = ()
) -> None:
    """Count these requests into the stored rollups, and out of them those that count no more."""
    if not judged and not gone:
        return
    tallies, gone_tallies = grouped(judged), grouped(gone)
    keys = tallies.keys() | gone_tallies.keys()
    agents = sorted({key.agent for key in keys})
    for agent in agents:
        take_turns(connection, agent)
    for key, stored in _stored(connection, keys, agents):
        counted = tally_from(stored)
        if key in gone_tallies:
            counted = difference(counted, gone_tallies[key])
        tallies.setdefault(key, Tally()).add(counted)
    _write_back(connection, tallies)


def _stored(
    connection: Connection, keys: Collection[RollupKey], agents: Sequence[str]
) -> Iterator[tuple[RollupKey, str]]:
    """Those of the rollups that there are, with their text; old ones were let go."""
    starts = sorted({key.starts_at for key in keys})
    for first in range(0, len(starts), _STARTS_PER_READ):
        some = starts[first : first + _STARTS_PER_READ]
        for *parts, text_of in connection.execute(_READ, {"starts": some, "agents": agents}):
            key = RollupKey(*parts)
            if key in keys:
                yield key, text_of


def _write_back(connection: Connection, tallies: Mapping[RollupKey, Tally]) -> None:
    empty = [key._asdict() for key, tally in tallies.items() if not tally.requests]
    if empty:
        connection.execute(_DELETE, empty)
    if len(empty) < len(tallies):
        connection.execute(
            _WRITE,
            [
                key._asdict() | {"tally": tally_text(tally)}
                for key, tally in tallies.items()
                if tally.requests
            ],
        )


def take_turns(connection: Connection, agent: str) -> None:
    """Wait until no other transaction reads and writes back what belongs to this agent name.

    SQLite has one writer at a time anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK_AGENT, {"agent": agent})


def tally_text(tally: Tally) -> str:
    """A tally as JSON text. Equal tallies give equal text, whatever way they were added up."""
    return json.dumps(
        {
            "requests": tally.requests,
            "statuses": tally.statuses,
            "seen_at_proxy": tally.seen_at_proxy,
            "input_tokens": [tally.input_tokens, tally.input_tokens_known],
            "output_tokens": [tally.output_tokens, tally.output_tokens_known],
            "verdicts": sorted(
                [objective, verdict, counts.requests, counts.output_tokens]
                for (objective, verdict), counts in tally.verdicts.items()
            ),
            "bins": {measure: [run.first, run.counts] for measure, run in tally.bins.items()},
        },
        sort_keys=True,
        separators=(",", ":"),
    )


def tally_from(stored: str) -> Tally:
    """The tally that `tally_text` wrote."""
    told = json.loads(stored)
    return Tally(
        requests=told["requests"],
        statuses=told["statuses"],
        seen_at_proxy=told["seen_at_proxy"],
        input_tokens=told["input_tokens"][0],
        input_tokens_known=told["input_tokens"][1],
        output_tokens=told["output_tokens"][0],
        output_tokens_known=told["output_tokens"][1],
        verdicts={
            (objective, verdict): VerdictCounts(requests, output_tokens)
            for objective, verdict, requests, output_tokens in told["verdicts"]
        },
        bins={measure: BinRun(first, counts) for measure, (first, counts) in told["bins"].items()},
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """A half-open stretch of time in whole Unix seconds, and the width of rollup to read in it."""

    width_s: int
    from_s: int
    until_s: int


def cover(from_s: int, until_s: int, *, wide: bool = True) -> Sequence[Stretch]:
    """The rollups to read for a window whose edges are multiples of NARROW_S, each second once.

    Without `wide` the narrow ones are read throughout.
    """
    if not wide:
        return (Stretch(NARROW_S, from_s, until_s),)
    inside_from = -(-from_s // WIDE_S) * WIDE_S
    inside_until = until_s // WIDE_S * WIDE_S
    if inside_from >= inside_until:
        return (Stretch(NARROW_S, from_s, until_s),)
    stretches = (
        Stretch(NARROW_S, from_s, inside_from),
        Stretch(WIDE_S, inside_from, inside_until),
        Stretch(NARROW_S, inside_until, until_s),
    )
    return tuple(stretch for stretch in stretches if stretch.from_s < stretch.until_s)


def within(stretches: Sequence[Stretch]) -> ColumnElement[bool]:
    """The SQL condition for the rollups of these stretches."""
    return or_(
        *(
            and_(
                rollups.c.width_s == stretch.width_s,
                rollups.c.starts_at >= stretch.from_s,
                rollups.c.starts_at < stretch.until_s,
            )
            for stretch in stretches
        )
    )
