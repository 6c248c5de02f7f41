"""Windows of engines: what they are made of, keeping them, and asking for them."""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from sqlalchemy import Connection, Engine, Select, Table, bindparam, delete, func, insert, select
from sqlalchemy import update as updating
from sqlalchemy.exc import SQLAlchemyError

from agent.catalog.definitions import Verdict
from agent.catalog.engine_facts import PROCESS_START_TIME
from agent.errors import StoreUnavailable
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.minute import LONGEST_REQUEST_S, MinuteRow, RequestCost, StoredRequest
from agent.store.connection import cause, for_writing
from agent.store.facts import facts_from
from agent.store.rows import judged_from
from agent.store.tables import engine_samples, engine_windows, gpu_samples, requests

_ROWS_PER_READ = 4096

_NAMES = tuple(field.name for field in fields(MinuteRow))


class MinuteStore:
    """Asks for and keeps the windows of one agent's engines. Raises StoreUnavailable."""

    def __init__(self, engine: Engine, agent: str) -> None:
        self._engine = engine
        self._writing = for_writing(engine)
        self._agent = agent

    def newest(self, engine: str) -> MinuteRow | None:
        """The last window that was kept."""
        query = self._windows(engine).order_by(engine_windows.c.starts_at.desc()).limit(1)
        return next(iter(self._found(query)), None)

    def between(self, engine: str, from_at: float, until: float) -> list[MinuteRow]:
        """The windows that overlap a time, in order."""
        query = self._windows(engine).where(
            # A window begins at its mark or less than a minute after it, so the index serves.
            engine_windows.c.starts_at > from_at - 180,
            engine_windows.c.starts_at <= until,
            engine_windows.c.until > from_at,
            engine_windows.c.from_at <= until,
        )
        return self._found(query.order_by(engine_windows.c.starts_at))

    def _windows(self, engine: str) -> Select[Any]:
        return select(engine_windows).where(
            engine_windows.c.agent == self._agent, engine_windows.c.engine == engine
        )

    def _found(self, query: Select[Any]) -> list[MinuteRow]:
        return [minute_from(row._mapping) for row in self._all(query)]

    def first_reading(self, engine: str, since: float) -> float | None:
        """When the engine's page was first read after a moment."""
        query = self._readings(engine, func.min(engine_samples.c.at))
        found: float | None = self._all(query.where(engine_samples.c.at >= since))[0][0]
        return found

    def newest_reading(self, engine: str, until: float) -> EngineSample | None:
        """What the engine's page said when it was read last by a moment.

        Raises StoreUnavailable too for a row that cannot be read.
        """
        query = self._readings(engine, engine_samples).where(engine_samples.c.at <= until)
        rows = self._all(query.order_by(engine_samples.c.at.desc()).limit(1))
        try:
            return next((_sample(row) for row in rows), None)
        except (TypeError, ValueError) as error:
            raise StoreUnavailable(f"its last reading there cannot be read: {error}") from error

    def readings(self, engine: str, from_at: float, until: float) -> list[EngineSample]:
        """Readings of an engine's page in a time, and the nearest on either side of it."""
        query = self._readings(engine, engine_samples)
        rows = _around(query, engine_samples, from_at, until)
        found = [_sample(row) for part in rows for row in self._all(part)]
        return sorted(found, key=lambda sample: sample.at)

    def _readings(self, engine: str, what: Any) -> Select[Any]:
        return select(what).where(
            engine_samples.c.agent == self._agent, engine_samples.c.engine == engine
        )

    def gpu_readings(self, gpus: Collection[str], from_at: float, until: float) -> list[GpuSample]:
        """Stored readings of these GPUs in a time, and the nearest on either side of it."""
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
        return [_gpu_sample(row) for query in queries for row in self._all(query)]

    def requests(self, engine: str, from_at: float, until: float) -> list[StoredRequest]:
        """The counted requests that overlap a time."""
        query = self._requests(engine, requests).where(
            requests.c.started_at <= until,
            requests.c.ended_at >= from_at,
            requests.c.ended_at < until + LONGEST_REQUEST_S,
        )
        return [_stored(row) for row in self._streamed(query)]

    def _streamed(self, query: Select[Any]) -> Iterator[Mapping[str, Any]]:
        """Rows a few at a time: those of a busy minute take far more memory than what they tell."""
        reading = query.execution_options(yield_per=_ROWS_PER_READ)
        try:
            with self._engine.connect() as connection:
                for row in connection.execute(reading):
                    yield dict(row._mapping)
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"the database does not answer: {cause(error)}") from error

    def unpriced(self, engine: str, since: float, until: float) -> list[tuple[float, float]]:
        """From when to when each request that began by `until` lasted, where no window has given
        it its part yet.
        """
        moments = (requests.c.started_at, requests.c.ended_at)
        query = self._requests(engine, *moments).where(
            requests.c.priced_at.is_(None),
            requests.c.started_at <= until,
            requests.c.ended_at >= since,
            requests.c.ended_at < until + LONGEST_REQUEST_S,
        )
        return [(max(row[0], row[1] - LONGEST_REQUEST_S), row[1]) for row in self._all(query)]

    def _requests(self, engine: str, *what: Any) -> Select[Any]:
        return select(*what).where(
            requests.c.agent == self._agent, requests.c.engine == engine, requests.c.counted
        )

    def keep(self, windows: Sequence[MinuteRow], parts: Sequence[RequestCost], now: float) -> None:
        """Put windows in place of those that were kept, and give requests their parts, together."""
        rows = [_row(self._agent, window) for window in windows]
        try:
            with self._writing.begin() as connection:
                for window in windows:
                    connection.execute(_gone(self._agent, window))
                if rows:
                    connection.execute(insert(engine_windows), rows)
                _give(connection, parts, now)
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"the windows could not be stored: {cause(error)}") from error

    def expire(self, before: float) -> int:
        """Delete the windows that began before a moment; the answer is how many."""
        try:
            with self._writing.begin() as connection:
                gone = connection.execute(
                    delete(engine_windows).where(engine_windows.c.starts_at < before)
                )
                return int(gone.rowcount)
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"old windows stay for now: {cause(error)}") from error

    def _all(self, query: Select[Any]) -> Sequence[Any]:
        return ask(self._engine, query)


def ask(engine: Engine, query: Select[Any]) -> Sequence[Any]:
    """The rows that a query finds. Raises StoreUnavailable."""
    try:
        with engine.connect() as connection:
            return connection.execute(query).all()
    except SQLAlchemyError as error:
        raise StoreUnavailable(f"the database does not answer: {cause(error)}") from error


def _around(
    query: Select[Any], table: Table, from_at: float, until: float
) -> Iterable[Select[Any]]:
    """What lies in a time, and the nearest on either side."""
    yield query.where(table.c.at <= from_at).order_by(table.c.at.desc()).limit(1)
    yield query.where(table.c.at > from_at, table.c.at < until)
    yield query.where(table.c.at >= until).order_by(table.c.at).limit(1)


def _gone(agent: str, window: MinuteRow) -> Any:
    return delete(engine_windows).where(
        engine_windows.c.agent == agent,
        engine_windows.c.engine == window.engine,
        engine_windows.c.starts_at == window.starts_at,
    )


_PARTS = (
    "cost_usd",
    "gpu_hours",
    "prefill_flops",
    "prefill_kv_bytes",
    "decode_flops",
    "decode_kv_bytes",
)

# A request that was joined in the meantime is another one, and gets its part the next time.
_GIVE = (
    updating(requests)
    .where(requests.c.id == bindparam("row"), requests.c.vantage == bindparam("seen_as"))
    .values({**{name: bindparam(name) for name in _PARTS}, "priced_at": bindparam("now")})
)


def _give(connection: Connection, parts: Sequence[RequestCost], now: float) -> None:
    ordered = sorted(parts, key=lambda part: part.row)
    rows = [
        {"row": part.row, "seen_as": part.vantage, "now": now if part.whole else None}
        | {name: getattr(part, name) for name in _PARTS}
        for part in ordered
    ]
    if rows:
        connection.execute(_GIVE, rows)


def _row(agent: str, window: MinuteRow) -> dict[str, Any]:
    told, tokens = asdict(window), window.good_tokens_by_objective
    return {
        **told,
        "agent": agent,
        "cache_full": window.cache_full_s > 0,
        "disagreements": json.dumps(told["disagreements"]),
        "good_tokens_by_objective": None if tokens is None else json.dumps(tokens),
    }


def minute_from(row: Mapping[str, Any]) -> MinuteRow:
    """The window as it stands in a row."""
    told = {name: row[name] for name in _NAMES}
    by_objective = told["good_tokens_by_objective"]
    return MinuteRow(
        **told
        | {
            "disagreements": tuple(json.loads(told["disagreements"])),
            "good_tokens_by_objective": None if by_objective is None else json.loads(by_objective),
        }
    )


def _stored(row: Mapping[str, Any]) -> StoredRequest:
    judged = judged_from(row)
    return StoredRequest(
        row["id"],
        judged.record,
        met=row["verdict"] == "met",
        priced=any(row[name] is not None for name in ("priced_at", "cost_usd", "decode_flops")),
        met_objectives=tuple(
            name for name, verdict in judged.judgement.by_objective if verdict is Verdict.MET
        ),
    )


def _sample(row: Any) -> EngineSample:
    facts = facts_from(row.facts)
    return EngineSample(
        engine=row.engine,
        at=row.at,
        dialect=row.dialect,
        model=row.model,
        facts=facts,
        process_started_at=facts.get((PROCESS_START_TIME.name, ())),
    )


def _gpu_sample(row: Any) -> GpuSample:
    return GpuSample(
        gpu=row.gpu, index=row.gpu_index, name=row.name, at=row.at, facts=facts_from(row.facts)
    )
