"""What a rollup holds: counts and latency bins of the requests of one series and one time.

A commit appends what its requests change to `rollup_changes`, beside their rows. It reads nothing
and waits for no lock. A job folds the changes into the rollups of every width
(`agent.store.folding`). Queries add the changes that are not folded yet.
"""

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from sqlalchemy import Connection, func, insert, select, tuple_

from agent.analysis.quantiles import HIGHEST_BIN, LOWEST_BIN, Bins
from agent.analysis.tally import (
    ALL_OBJECTIVES,
    MEASURES,
    Tally,
    VerdictCounts,
    input_length_of,
    tally_of,
)
from agent.catalog.metrics import OTHER
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.records.objective import JudgedRequest
from agent.records.request import Status
from agent.store.tables import rollup_changes, rollup_series
from agent.store.vectors import Vector, VectorSum, check, encoded

# Each width divides the next: narrow rollups cover the edges of a window, wide ones its inside.
WIDTHS_S = (10, 60, HOUR_S, DAY_S)
NARROW_S = WIDTHS_S[0]

# Longer windows begin on a wider grid, so older narrow rollups are never read. Days are kept for
# as long as the settings say.
KEEP_S: Mapping[int, float] = {10: 0.25 * DAY_S, 60: 2 * DAY_S, HOUR_S: 15 * DAY_S}

# In these widths, requests of all input lengths together are one more series: a query of months
# reads a fifth as many rollups where it does not ask for lengths.
SUMMED_WIDTHS_S = (HOUR_S, DAY_S)
ANY_LENGTH = "*"

# Rows keep whole microseconds, and a rollup must equal a count of the rows.
_HALF_MICROSECOND = 5e-7

# The columns of a rollup, each an encoded vector: counts, and the bins of each latency.
FIGURES = ("counts", *MEASURES)

_BINS = HIGHEST_BIN - LOWEST_BIN + 1

# The counts of a rollup of which all requests are gone: an encoded vector of no numbers.
NO_COUNTS = b"\x01\x00\x00"

# The stored order of counts: another order needs a migration.
_SUMS = (
    *("requests", "seen_at_proxy", "input_tokens", "input_tokens_known"),
    *("output_tokens", "output_tokens_known"),
)
# Requests of no status here are invalid.
_STATUSES = ("ok", "error", "timeout", "cancelled", "throttled")
_VERDICTS = ("met", "missed", "undetermined")
_FIRST_VERDICT = len(_SUMS) + len(_STATUSES)
# They follow the verdicts.
_LAST_SUMS = ("proxy_counted", "proxy_ended", "proxy_failed")


class Series(NamedTuple):
    """What the requests of one row of rollups have in common; unknown is ''.

    `judged_by` is a JSON list of the names of the objectives that judged them.
    """

    agent: str
    engine: str
    model: str
    tenant: str
    input_length: str
    judged_by: str


class RollupKey(NamedTuple):
    """One rollup: its width, its first second and its series."""

    width_s: int
    starts_at: int
    series: Series


def series_key(series: Series, starts_at: int | None = None) -> dict[str, Any]:
    """The key of a row of a series, for the log."""
    return series._asdict() | {"starts_at": starts_at}


@cache
def objective_names(objectives: str) -> tuple[str, ...]:
    """The names in a series' JSON list. Raises ValueError for anything else."""
    names = json.loads(objectives)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"judged_by is {objectives[:40]!r}")
    return tuple(names)


@cache
def objectives_text(names: tuple[str, ...]) -> str:
    """Names of objectives as a JSON list; equal names give equal text."""
    return json.dumps(names, ensure_ascii=False, separators=(",", ":"))


@cache
def _verdict_keys(objectives: str) -> tuple[tuple[str, str], ...]:
    names = (ALL_OBJECTIVES, *objective_names(objectives))
    return tuple((name, verdict) for name in names for verdict in _VERDICTS)


def _after_verdicts(objectives: str) -> int:
    return _FIRST_VERDICT + 2 * len(_verdict_keys(objectives))


def _counts_of(objectives: str) -> int:
    return _after_verdicts(objectives) + len(_LAST_SUMS)


def check_figures(objectives: str, figures: Sequence[bytes | None]) -> None:
    """Raise one of DAMAGED for columns FIGURES that cannot be those of such a series."""
    lengths = (_counts_of(objectives), *(_BINS for _ in MEASURES))
    for part, length in zip(figures, lengths, strict=True):
        if part is not None:
            check(part, length)


class RollupSum:
    """The sum of rollups and changes."""

    __slots__ = ("_bins", "_counts")

    def __init__(self) -> None:
        self._counts: dict[str, VectorSum] = {}
        self._bins = [VectorSum(_BINS) for _ in MEASURES]

    def add(self, objectives: str, figures: Sequence[bytes | None], *, gone: bool = False) -> None:
        """Add the columns FIGURES of a row whose series was judged by these objectives.

        Columns that are gone are subtracted; where their rollup has expired, nothing falls below
        zero. Raises one of DAMAGED, and adds nothing, for a row that cannot be read.
        """
        check_figures(objectives, figures)
        for vector_sum, part in zip(self._sums(objectives), figures, strict=True):
            vector_sum.add(part, gone=gone)

    def _sums(self, objectives: str) -> list[VectorSum]:
        counts = self._counts.get(objectives)
        if counts is None:
            counts = self._counts[objectives] = VectorSum(_counts_of(objectives))
        return [counts, *self._bins]

    def figures(self, objectives: str) -> dict[str, bytes | None]:
        """The sum by column, all of one series."""
        sums = self._sums(objectives)
        if not sums[0].total()[0]:
            return {name: NO_COUNTS if name == "counts" else None for name in FIGURES}
        return {name: each.encoded() for name, each in zip(FIGURES, sums, strict=True)}

    def tally(self) -> Tally:
        """The sum as counts and bins."""
        tally = Tally()
        for objectives, counts in self._counts.items():
            tally.add(_tally(counts.total().tolist(), objectives))
        bins = zip(MEASURES, self._bins, strict=True)
        counted = {name: _bins(each.total()) for name, each in bins if not each.is_zero}
        tally.bins = {name: each for name, each in counted.items() if each}
        return tally


def _tally(counts: Sequence[int], objectives: str) -> Tally:
    sums: dict[str, Any] = dict(zip(_SUMS, counts, strict=False))
    statuses = dict(zip(_STATUSES, counts[len(_SUMS) : _FIRST_VERDICT], strict=True))
    statuses[Status.INVALID] = max(sums["requests"] - sum(statuses.values()), 0)
    end = _after_verdicts(objectives)
    sums |= zip(_LAST_SUMS, counts[end:], strict=True)
    requests, tokens = counts[_FIRST_VERDICT:end:2], counts[_FIRST_VERDICT + 1 : end : 2]
    verdicts = zip(_verdict_keys(objectives), requests, tokens, strict=True)
    return Tally(
        **sums,
        statuses={status: count for status, count in statuses.items() if count},
        verdicts={key: VerdictCounts(n, of_these) for key, n, of_these in verdicts if n},
    )


def _bins(vector: Vector) -> dict[int, int]:
    filled = np.flatnonzero(vector)
    return dict(zip((filled + LOWEST_BIN).tolist(), vector[filled].tolist(), strict=True))


def figures_of(tally: Tally, objectives: str) -> dict[str, bytes | None]:
    """The columns of a tally of requests that were judged by these objectives."""
    verdicts = [tally.verdicts.get(key, VerdictCounts()) for key in _verdict_keys(objectives)]
    counts = [
        *(getattr(tally, name) for name in _SUMS),
        *(tally.statuses.get(status, 0) for status in _STATUSES),
        *(count for each in verdicts for count in (each.requests, each.output_tokens)),
        *(getattr(tally, name) for name in _LAST_SUMS),
    ]
    bins = {name: _vector(tally.bins[name]) for name in MEASURES if name in tally.bins}
    vectors = {"counts": np.array(counts, dtype=np.int64)} | bins
    return {name: encoded(vectors[name]) if name in vectors else None for name in FIGURES}


def _vector(bins: Bins) -> Vector:
    vector = np.zeros(_BINS, dtype=np.int64)
    vector[np.fromiter(bins, np.int64, len(bins)) - LOWEST_BIN] = list(bins.values())
    return vector


def grouped(judged: Iterable[JudgedRequest]) -> dict[tuple[int, Series], Tally]:
    """The tallies of these requests by the start of the narrow rollup and by series."""
    groups: dict[tuple[object, ...], list[JudgedRequest]] = {}
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
        groups.setdefault(group, []).append(item)
    narrow: dict[tuple[int, Series], list[JudgedRequest]] = {}
    for items in groups.values():
        narrow.setdefault(place_of(items[0]), []).extend(items)
    return {place: tally_of(items) for place, items in narrow.items()}


def place_of(item: JudgedRequest) -> tuple[int, Series]:
    """The start of the narrow rollup of a request, and its series."""
    record = item.record
    series = Series(
        record.agent or "",
        record.engine or "",
        record.model or "",
        record.tenant or "",
        input_length_of(record.input_tokens) or "",
        objectives_text(tuple(name for name, _ in item.judgement.by_objective)),
    )
    return int((record.ended_at + _HALF_MICROSECOND) // NARROW_S) * NARROW_S, series


def keys_of(starts_at: int, series: Series) -> list[RollupKey]:
    """Every rollup that holds the requests of a narrow one."""
    summed = series._replace(input_length=ANY_LENGTH)
    return [
        RollupKey(width_s, starts_at // width_s * width_s, each)
        for width_s in WIDTHS_S
        for each in ((series, summed) if width_s in SUMMED_WIDTHS_S else (series,))
    ]


def add_to_rollups(
    connection: Connection, judged: Sequence[JudgedRequest], gone: Sequence[JudgedRequest] = ()
) -> None:
    """Append the changes that add the judged requests and subtract those that are gone."""
    # Subtracting comes first: nothing can be subtracted from a rollup that has expired.
    changes = [
        {"starts_at": starts_at, "gone": is_gone}
        | series._asdict()
        | figures_of(tally, series.judged_by)
        for is_gone, items in ((True, gone), (False, judged))
        for (starts_at, series), tally in grouped(items).items()
    ]
    if changes:
        connection.execute(insert(rollup_changes), changes)


_LOG = logging.getLogger(__name__)

# Of one agent, without the series of any length: a summary of a window reads a rollup of each.
MAX_SERIES = 10_000

_warned_agents: set[str] = set()

# With six columns each, these are fewer parameters than SQLite takes: 32,766.
_KEYS_PER_READ = 2000

_COLUMNS = [rollup_series.c[name] for name in Series._fields]


def target_series(
    connection: Connection, agent: str, wanted: Sequence[Series], most: int
) -> dict[Series, Series]:
    """The series into which each of these is folded: itself, or the one of `other`.

    A new series beyond `most` is folded into `other`. A stored series stays itself, so what was
    added to it is also subtracted from it.
    """
    stored = series_ids(connection, wanted).keys()
    new = [series for series in dict.fromkeys(wanted) if series not in stored]
    if not new:
        return {series: series for series in wanted}
    room = max(most - _count(connection, agent), 0)
    beyond = set(new[room:])
    if beyond and agent not in _warned_agents:
        _warned_agents.add(agent)
        _LOG.warning(
            "the rollups of %s have %d series of models and tenants, which is storage.max_series: "
            "new ones are counted as %r from now on",
            agent,
            most,
            OTHER,
        )
    return {series: other_series(series) if series in beyond else series for series in wanted}


def other_series(series: Series) -> Series:
    """The series of `other` for a series. An unknown model or tenant stays unknown."""
    return series._replace(model=series.model and OTHER, tenant=series.tenant and OTHER)


def _count(connection: Connection, agent: str) -> int:
    query = select(func.count()).where(
        rollup_series.c.agent == agent, rollup_series.c.input_length != ANY_LENGTH
    )
    return int(connection.execute(query).scalar_one())


def series_ids(connection: Connection, wanted: Collection[Series]) -> dict[Series, int]:
    """The row numbers of these series, where a series is stored."""
    ids = {}
    for part in _parts(wanted):
        query = select(rollup_series.c.id, *_COLUMNS).where(tuple_(*_COLUMNS).in_(part))
        ids.update({Series(*key): row_id for row_id, *key in connection.execute(query)})
    return ids


def _parts(wanted: Collection[Series]) -> Iterator[list[Series]]:
    left = iter(wanted)
    while part := list(islice(left, _KEYS_PER_READ)):
        yield part


def stored_ids(connection: Connection, wanted: Collection[Series]) -> Mapping[Series, int]:
    """The row numbers of these series; new series are inserted."""
    ids = series_ids(connection, wanted)
    new = sorted(set(wanted) - ids.keys())
    if new:
        connection.execute(insert(rollup_series), [series._asdict() for series in new])
        ids.update(series_ids(connection, new))
    return ids
