"""Minutes of engines in the database, and the samples and requests they are made of."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    Connection,
    Engine,
    Select,
    Table,
    bindparam,
    delete,
    func,
    insert,
    or_,
    select,
)
from sqlalchemy import update as updating

from agent.analysis.efficiency.request_activity import TimeRanges
from agent.catalog.definitions import Verdict
from agent.catalog.engine_facts import KEPT, PROCESS_START_TIME
from agent.errors import StoreUnavailable
from agent.records.columns import STATUSES, VANTAGES, MinuteRequests
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.minute import LONGEST_REQUEST_S, MinuteRow, RequestCost
from agent.store.columns import minute_values
from agent.store.connection import ROWS_PER_READ, for_writing, in_transaction, read_all, reading
from agent.store.facts import facts_from
from agent.store.minute_sums import readable_minute
from agent.store.sqlite_connection import ROWS_PER_NUMBER, number_next
from agent.store.tables import engine_minutes, engine_samples, gpu_samples, requests
from agent.store.unreadable import DAMAGED, UNREADABLE, check_row, readable, readable_rows

# With one prompt, an engine counts it once for each choice. Elsewhere a request may have several
# prompts, and how many choices each has is unknown.
ONE_PROMPT_ROUTE = "/v1/chat/completions"

_STATUSES = {status.value: place for place, status in enumerate(STATUSES)}
_VANTAGES = {vantage.value: place for place, vantage in enumerate(VANTAGES)}

_NUMBERS = (
    *("started_at", "ended_at", "ttft_s", "queue_s", "prefill_s", "decode_s"),
    *("input_tokens", "cached_tokens", "output_tokens", "choices"),
)
_MASKS = {
    "aborted": func.coalesce(requests.c.finish_reason == "abort", False),
    "one_prompt": func.coalesce(requests.c.route == ONE_PROMPT_ROUTE, False),
    "priced": or_(
        *(requests.c[name].is_not(None) for name in ("priced_at", "cost_usd", "decode_flops"))
    ),
    "met": requests.c.verdict == Verdict.MET.value,
}
_NAMES = ("rows", "vantages", "statuses", "verdicts", *_NUMBERS, *_MASKS)

# What a query for requests selects, in the order of a row of `minute_requests_from`.
BOOKED_COLUMNS = (
    *(requests.c.id, requests.c.vantage, requests.c.status, requests.c.verdicts),
    *(requests.c[name] for name in _NUMBERS),
    *_MASKS.values(),
)
_WIDTH = len(BOOKED_COLUMNS)


def minute_requests_from(batches: Iterable[Sequence[Sequence[Any]]]) -> MinuteRequests:
    """Requests from batches of rows of BOOKED_COLUMNS, in the order of their ids."""
    verdicts = _Verdicts()
    parts = [_readable_columns(batch, verdicts) for batch in chain(batches, [[]])]
    order = np.argsort(np.concatenate([part["rows"] for part in parts]))
    # The parts of a column are dropped as soon as it is whole: all of them take much memory.
    columns = {name: np.concatenate([part.pop(name) for part in parts])[order] for name in _NAMES}
    return MinuteRequests(**columns, met_objectives=tuple(verdicts.met))


class _Verdicts:
    """The different verdicts of requests, which are few, by their stored text."""

    def __init__(self) -> None:
        self.met: list[tuple[str, ...]] = []
        self._places: dict[str, int] = {}

    def place(self, stored: str) -> int:
        """The place of the objectives that were met in `met`."""
        place = self._places.get(stored)
        if place is None:
            place = self._places[stored] = len(self.met)
            judged: dict[str, str] = json.loads(stored)
            self.met.append(tuple(name for name, verdict in judged.items() if verdict == "met"))
        return place


def _readable_columns(
    rows: Sequence[Sequence[Any]], verdicts: _Verdicts
) -> dict[str, NDArray[Any]]:
    """The columns of the rows that can be read; the others are counted."""
    try:
        return _columns(rows, verdicts)
    except DAMAGED:
        return _columns([row for row in rows if _can_be_read(row, verdicts)], verdicts)


def _can_be_read(row: Sequence[Any], verdicts: _Verdicts) -> bool:
    try:
        _columns([row], verdicts)
    except DAMAGED as error:
        UNREADABLE.add(requests.name, {"id": row[0]}, error)
        return False
    return True


def _columns(rows: Sequence[Sequence[Any]], verdicts: _Verdicts) -> dict[str, NDArray[Any]]:
    ids, vantages, statuses, texts, *plain = zip(*rows, strict=True) if rows else [()] * _WIDTH
    numbers, masks = plain[: len(_NUMBERS)], plain[len(_NUMBERS) :]
    numbers_by_name = {
        n: np.array(each, dtype=np.float64) for n, each in zip(_NUMBERS, numbers, strict=True)
    }
    if any(np.isinf(each).any() for each in numbers_by_name.values()):
        raise ValueError("a number is infinite")
    return {
        "rows": np.array(ids, dtype=np.intp),
        "vantages": np.array([_VANTAGES[each] for each in vantages], dtype=np.int8),
        "statuses": np.array([_STATUSES[each] for each in statuses], dtype=np.int8),
        "verdicts": np.array([verdicts.place(each) for each in texts], dtype=np.int32),
        # Unknown becomes NaN.
        **numbers_by_name,
        **{n: np.array(each, dtype=bool) for n, each in zip(_MASKS, masks, strict=True)},
    }


# A minute ends at most this long after it is due, so the index on `starts_at` finds it: it may
# begin a minute late, and it ends where the next one begins. The third minute is slack.
_LATEST_END_S = 180


class MinuteStore:
    """Reads and writes the minutes of one agent's engines. Raises StoreUnavailable."""

    def __init__(self, engine: Engine, agent: str) -> None:
        self._engine = engine
        self._writing = for_writing(engine)
        self._agent = agent

    def newest(self, engine: str) -> MinuteRow | None:
        """The last minute that was booked."""
        # Further ones, in case that the last one cannot be read.
        query = self._minutes(engine).order_by(engine_minutes.c.starts_at.desc()).limit(10)
        return next(iter(self._found(query)), None)

    def between(self, engine: str, from_at: float, until: float) -> list[MinuteRow]:
        """The minutes that overlap a time, in order."""
        query = self._minutes(engine).where(
            engine_minutes.c.starts_at > from_at - _LATEST_END_S,
            engine_minutes.c.starts_at <= until,
            engine_minutes.c.until > from_at,
            engine_minutes.c.from_at <= until,
        )
        return self._found(query.order_by(engine_minutes.c.starts_at))

    def _minutes(self, engine: str) -> Select[Any]:
        return select(engine_minutes).where(
            engine_minutes.c.agent == self._agent, engine_minutes.c.engine == engine
        )

    def _found(self, query: Select[Any]) -> list[MinuteRow]:
        rows = readable_rows(self._engine, engine_minutes, query)
        return readable(engine_minutes, rows, readable_minute)

    def first_sample_at(self, engine: str, since: float) -> float | None:
        """The time of the engine's first sample since a Unix time."""
        query = self._samples(engine, func.min(engine_samples.c.at))
        found: float | None = self._all(query.where(engine_samples.c.at >= since))[0][0]
        return found

    def newest_sample(self, engine: str, until: float) -> EngineSample | None:
        """The engine's last sample up to a Unix time.

        Raises StoreUnavailable too for a row that cannot be parsed.
        """
        query = self._samples(engine, engine_samples).where(engine_samples.c.at <= until)
        rows = self._all(query.order_by(engine_samples.c.at.desc()).limit(1))
        try:
            return next((_sample(row._mapping) for row in rows), None)
        except (TypeError, ValueError) as error:
            raise StoreUnavailable(f"its last sample cannot be parsed: {error}") from error

    def samples(self, engine: str, from_at: float, until: float) -> list[EngineSample]:
        """The engine's samples in a time and the nearest on either side, in order."""
        query = self._samples(engine, engine_samples)
        parts = _around(query, engine_samples, from_at, until)
        rows = (row for part in parts for row in self._all(part))
        found = readable(engine_samples, rows, _sample)
        return sorted(found, key=lambda sample: sample.at)

    def _samples(self, engine: str, what: Any) -> Select[Any]:
        return select(what).where(
            engine_samples.c.agent == self._agent, engine_samples.c.engine == engine
        )

    def gpu_samples(self, gpus: Collection[str], from_at: float, until: float) -> list[GpuSample]:
        """Stored samples of these GPUs in a time and the nearest of each on either side."""
        queries = [
            part
            for gpu in gpus
            for part in _around(
                select(gpu_samples).where(
                    gpu_samples.c.gpu == gpu, gpu_samples.c.agent == self._agent
                ),
                gpu_samples,
                from_at,
                until,
            )
        ]
        rows = (row for query in queries for row in self._all(query))
        return readable(gpu_samples, rows, _gpu_sample)

    def requests(self, engine: str, from_at: float, until: float) -> MinuteRequests:
        """The counted requests, and the hops of others, that overlap a time."""
        return minute_requests_from(self._batches(self._overlapping(engine, from_at, until)))

    def requests_across(self, engine: str, from_at: float, until: float) -> MinuteRequests:
        """Those that also began before the time or ended after it."""
        beyond = or_(requests.c.started_at < from_at, requests.c.ended_at > until)
        query = self._overlapping(engine, from_at, until).where(beyond)
        return minute_requests_from(self._batches(query))

    def _overlapping(self, engine: str, from_at: float, until: float) -> Select[Any]:
        return self._requests(engine, *BOOKED_COLUMNS).where(
            requests.c.started_at <= until,
            requests.c.ended_at >= from_at,
            requests.c.ended_at < until + LONGEST_REQUEST_S,
        )

    def _batches(self, query: Select[Any]) -> Iterator[Sequence[Any]]:
        """Some rows at a time: as rows, those of a busy minute take far more memory."""
        streamed = query.execution_options(yield_per=ROWS_PER_READ)
        with reading(self._engine) as connection:
            yield from connection.execute(streamed).partitions()

    def unpriced(self, engine: str, since: float, until: float) -> TimeRanges:
        """The times of requests without a complete cost.

        Of those that began by `until` and ended at `since` or later.
        """
        times = (requests.c.started_at, requests.c.ended_at)
        query = self._requests(engine, *times).where(
            requests.c.priced_at.is_(None),
            requests.c.started_at <= until,
            requests.c.ended_at >= since,
            requests.c.ended_at < until + LONGEST_REQUEST_S,
        )
        found = TimeRanges.of(chain.from_iterable(self._batches(query)))
        return TimeRanges(np.maximum(found.from_at, found.until - LONGEST_REQUEST_S), found.until)

    def _requests(self, engine: str, *what: Any) -> Select[Any]:
        return select(*what).where(
            requests.c.agent == self._agent,
            requests.c.engine == engine,
            or_(requests.c.counted, requests.c.hop),
        )

    def write(self, minutes: Sequence[MinuteRow], costs: Iterable[RequestCost], now: float) -> None:
        """Replace the minutes and set the costs of requests, in one transaction."""
        rows = [_row(self._agent, minute) for minute in minutes]

        def replace(connection: Connection) -> None:
            for minute in minutes:
                connection.execute(_deletion(self._agent, minute))
            if rows:
                connection.execute(insert(engine_minutes), rows)
            _set_costs(connection, costs, now)

        in_transaction(self._writing, replace)

    def expire(self, before: float) -> int:
        """Delete the minutes that were due before a Unix time; returns how many."""
        old = delete(engine_minutes).where(engine_minutes.c.starts_at < before)
        return in_transaction(
            self._writing, lambda connection: int(connection.execute(old).rowcount)
        )

    def _all(self, query: Select[Any]) -> Sequence[Any]:
        return read_all(self._engine, query)


def _around(
    query: Select[Any], table: Table, from_at: float, until: float
) -> Iterable[Select[Any]]:
    """The rows in a time, and the nearest on either side."""
    yield query.where(table.c.at <= from_at).order_by(table.c.at.desc()).limit(1)
    yield query.where(table.c.at > from_at, table.c.at < until)
    yield query.where(table.c.at >= until).order_by(table.c.at).limit(1)


def _deletion(agent: str, minute: MinuteRow) -> Any:
    return delete(engine_minutes).where(
        engine_minutes.c.agent == agent,
        engine_minutes.c.engine == minute.engine,
        engine_minutes.c.starts_at == minute.starts_at,
    )


_COST_COLUMNS = (
    "cost_usd",
    "gpu_hours",
    "prefill_flops",
    "prefill_kv_bytes",
    "decode_flops",
    "decode_kv_bytes",
)

# A row that was joined in the meantime is another request; the next run sets its cost.
_SET_COSTS = (
    updating(requests)
    .where(requests.c.id == bindparam("row"), requests.c.vantage == bindparam("seen_vantage"))
    .values({**{name: bindparam(name) for name in _COST_COLUMNS}, "priced_at": bindparam("now")})
)


def _set_costs(connection: Connection, costs: Iterable[RequestCost], now: float) -> None:
    rows = (
        {"row": cost.row, "seen_vantage": cost.vantage, "now": now if cost.complete else None}
        | {name: getattr(cost, name) for name in _COST_COLUMNS}
        for cost in costs
    )
    while batch := list(islice(rows, ROWS_PER_NUMBER)):
        connection.execute(_SET_COSTS, batch)
        number_next(connection)


def _row(agent: str, minute: MinuteRow) -> dict[str, Any]:
    full = minute.work.cache_full_s > 0
    return {**minute_values(minute), "agent": agent, "cache_full": full}


def _sample(row: Mapping[str, Any]) -> EngineSample:
    check_row(engine_samples, row)
    found = facts_from(row["facts"])
    facts = {key: value for key, value in found.items() if key[0] != KEPT}
    kept = {(of[0], of[1:]): value for (name, of), value in found.items() if name == KEPT}
    return EngineSample(
        engine=row["engine"],
        at=row["at"],
        dialect=row["dialect"],
        model=row["model"],
        facts=facts,
        process_started_at=facts.get((PROCESS_START_TIME.name, ())),
        kept=kept,
    )


def _gpu_sample(row: Mapping[str, Any]) -> GpuSample:
    check_row(gpu_samples, row)
    return GpuSample(
        gpu=row["gpu"],
        index=row["gpu_index"],
        name=row["name"],
        at=row["at"],
        facts=facts_from(row["facts"]),
    )
