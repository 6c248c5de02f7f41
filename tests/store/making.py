"""Makes judged requests by number, and reads what a database holds of them."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Engine, select

from agent.analysis.quantiles import bin_of
from agent.analysis.tally import MEASURES, Tally, VerdictCounts
from agent.catalog.definitions import Verdict
from agent.records.engine import EndedRequest, EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import GpuSample
from agent.records.objective import JudgedRequest, Judgement
from agent.records.queries import Cursor, PageOf
from agent.records.request import RequestRecord, Status, Vantage
from agent.store.connection import for_writing, without_number
from agent.store.folding import RollupStore
from agent.store.publishing.changes import batch_after, file_state, set_published
from agent.store.publishing.postgres import PostgresRows
from agent.store.rollups import FIGURES, RollupSum, Series
from agent.store.store_queries import StoreQueries
from agent.store.tables import requests, rollup_series, rollups
from agent.store.transactions import request_write
from agent.store.writing import RequestWriter
from tests.store.migrated import migrated_in

# A whole number of minutes.
NOON = 1_790_000_040 // 60 * 60

# Each wait takes less than a second; a test that waits this long has failed.
WITHIN_S = 60.0

Key = tuple[str, str]


def judgement(verdict: Verdict = Verdict.MET, **by_objective: Verdict) -> Judgement:
    """A judgement; by default of one objective, `chat`, with the same verdict."""
    return Judgement(verdict, tuple(by_objective.items()) or (("chat", verdict),))


MET = judgement()


def request(number: int, judged: Judgement = MET, **given: Any) -> JudgedRequest:
    """The request of this number, which took a second; `given` replaces its values."""
    facts: dict[str, Any] = {
        "trace_id": f"{number:032x}",
        "span_id": f"{number:016x}",
        "vantage": Vantage.ENGINE,
        "status": Status.OK,
        "started_at": NOON + 0.25,
        "ended_at": NOON + 1.25,
        "received_at": NOON + 1.5,
        "request_id": f"request-{number}",
        "agent": "agent-0",
        "engine": "chat-0",
        "model": "llama",
    }
    return JudgedRequest(RequestRecord(**(facts | given)), judged)


def some(numbers: Iterable[int], **given: Any) -> list[JudgedRequest]:
    """The requests of these numbers."""
    return [request(number, **given) for number in numbers]


def gpu_sample(at: float, gpu: str = "GPU-1", **given: Any) -> GpuSample:
    """A sample of a GPU without facts; `given` replaces its values."""
    facts: dict[str, Any] = {"index": 0, "name": "NVIDIA H200", "facts": {}}
    return GpuSample(gpu=gpu, at=at, **(facts | given))


def engine_sample(at: float, **given: Any) -> EngineSample:
    """A sample of `chat-0` without facts; `given` replaces its values."""
    values: dict[str, Any] = {"engine": "chat-0", "dialect": "vllm", "model": "llama", "facts": {}}
    return EngineSample(at=at, **(values | given))


def restart(at: float, **given: Any) -> Event:
    """A restart of `chat-0`; `given` replaces its values."""
    values: dict[str, Any] = {
        "engine": "chat-0",
        "kind": EventKind.RESTART,
        "confidence": Confidence.CERTAIN,
    }
    return Event(at=at, **(values | given))


def ended_request(**given: Any) -> EndedRequest:
    """What an engine's plugin tells of a request of 2 s; `given` replaces its values."""
    values: dict[str, Any] = {
        **{"engine": "chat-0", "request_id": "chatcmpl-1", "ended_at": NOON + 1.25},
        **{"input_tokens": 100, "cached_tokens": 32, "output_tokens": 11, "preemptions": 2},
        **{"queue_s": 0.25, "prefill_s": 0.5, "decode_s": 1.0, "ttft_s": 0.9, "e2e_s": 2.0},
        "finish_reason": "length",
    }
    return EndedRequest(**(values | given))


def key_of(item: JudgedRequest) -> Key:
    """The trace id and span id of a request."""
    return (item.record.trace_id, item.record.span_id)


def keys_of(judged: Iterable[JudgedRequest]) -> list[Key]:
    """The sorted keys of these requests."""
    return sorted(key_of(item) for item in judged)


def store(engine: Engine, judged: Sequence[JudgedRequest]) -> list[JudgedRequest]:
    """Commit these together; returns the new ones."""
    return request_write(engine)(judged).new


def publish(engine: Engine, write: Callable[[Engine], object]) -> None:
    """Write to a database of either kind: to a shared one, from a new file."""
    if engine.dialect.name == "sqlite":
        write(engine)
        return
    with TemporaryDirectory() as folder, migrated_in(Path(folder)) as file:
        write(file)
        publish_file(file, engine)


def publish_file(file: Engine, shared: Engine) -> None:
    """Fold, and write to PostgreSQL what changed in a file since the last call."""
    driver: Any = shared.dialect.dbapi
    fold(file)
    with file.begin() as own, shared.begin() as connection:
        batch = batch_after(own, file_state(own).published, 10**9)
        if batch is None:
            return
        refusals = (driver.DataError, driver.IntegrityError)
        assert PostgresRows(refusals).write(connection, batch)[1] == 0
    with without_number(for_writing(file)).begin() as own:
        set_published(own, batch.last, None)


def store_in(engine: Engine, judged: Sequence[JudgedRequest]) -> None:
    """Store these in a database of either kind."""
    publish(engine, lambda file: store(file, judged))


def pages(page_after: Callable[[Cursor | None], PageOf[Any]]) -> Iterator[PageOf[Any]]:
    """Every page of a list."""
    page = page_after(None)
    yield page
    while page.next is not None:
        page = page_after(page.next)
        yield page


@contextmanager
def open_writer(engine: Engine) -> Iterator[RequestWriter]:
    """A writer on this database, closed at the end."""
    writer = RequestWriter(request_write(engine))
    try:
        yield writer
    finally:
        writer.close()


def stored_keys(engine: Engine) -> list[Key]:
    """The sorted keys of the rows in the database."""
    with engine.connect() as connection:
        rows = connection.execute(select(requests.c.trace_id, requests.c.span_id))
        return sorted((trace_id, span_id) for trace_id, span_id in rows)


def only_row(engine: Engine) -> Mapping[str, Any]:
    """The one row of the database by column name, as the store returns it."""
    (row,) = StoreQueries(engine).request("request-1")
    return row


def fold(engine: Engine) -> int:
    """Fold all changes into the rollups; returns their number."""
    return RollupStore(engine, "agent-0").fold()


RollupPlace = tuple[Any, ...]


def rollup_bytes(engine: Engine) -> dict[RollupPlace, tuple[bytes | None, ...]]:
    """The columns of each rollup with requests by its place, after all changes are folded.

    Series of several files are added up.
    """
    if engine.dialect.name == "sqlite":
        fold(engine)
    query = select(rollups, rollup_series).join(
        rollup_series, rollup_series.c.id == rollups.c.series
    )
    sums: dict[RollupPlace, RollupSum] = defaultdict(RollupSum)
    with engine.connect() as connection:
        for row in connection.execute(query).mappings():
            place = (row["width_s"], row["starts_at"], *(row[name] for name in Series._fields))
            sums[place].add(row["judged_by"], [row[name] for name in FIGURES])
    return {
        place: tuple(each.figures(place[-1])[name] for name in FIGURES)
        for place, each in sums.items()
        if each.tally().requests
    }


def counted_rollups(engine: Engine) -> dict[RollupPlace, Tally]:
    """The tally of each rollup, after all changes are folded."""
    return {place: decoded(place[-1], figures) for place, figures in rollup_bytes(engine).items()}


def decoded(objectives: str, figures: Sequence[bytes | None]) -> Tally:
    """The counts in the columns of one rollup."""
    rollup_sum = RollupSum()
    rollup_sum.add(objectives, figures)
    return rollup_sum.tally()


def counted_rows(engine: Engine) -> dict[RollupPlace, Tally]:
    """The expected tallies of the rollups, counted row by row."""
    counted: dict[RollupPlace, Tally] = {}
    with engine.connect() as connection:
        for row in connection.execute(select(requests).where(requests.c.counted)).mappings():
            facts = {str(name): value for name, value in row.items()}
            for place in _places(facts):
                _count(counted.setdefault(place, Tally()), facts)
    return counted


def _places(row: Mapping[str, Any]) -> Iterator[RollupPlace]:
    common = [row[name] or "" for name in ("agent", "engine", "model", "tenant")]
    names = list(json.loads(row["verdicts"]))
    objectives = json.dumps(names, ensure_ascii=False, separators=(",", ":"))
    lengths = [_input_length(row["input_tokens"])]
    for width_s in (10, 60, 3600, 86400):
        start = int(row["ended_at"] // width_s) * width_s
        for length in [*lengths, "*"] if width_s >= 3600 else lengths:
            yield (width_s, start, *common, length, objectives)


def _input_length(tokens: int | None) -> str:
    if tokens is None:
        return ""
    edges = {1024: "0-1k", 4096: "1k-4k", 16384: "4k-16k", 65536: "16k-64k"}
    return next((name for edge, name in edges.items() if tokens < edge), "64k+")


def _count(tally: Tally, row: Mapping[str, Any]) -> None:
    tally.requests += 1
    tally.statuses[row["status"]] = tally.statuses.get(row["status"], 0) + 1
    at_proxy = row["vantage"] in ("proxy", "joined")
    tally.seen_at_proxy += at_proxy
    tally.proxy_counted += at_proxy
    tally.proxy_ended += at_proxy and row["status"] not in ("cancelled", "invalid")
    tally.proxy_failed += at_proxy and row["status"] in ("error", "timeout", "throttled")
    tally.input_tokens += row["input_tokens"] or 0
    tally.input_tokens_known += row["input_tokens"] is not None
    tally.output_tokens += row["output_tokens"] or 0
    tally.output_tokens_known += row["output_tokens"] is not None
    for pair in {"": row["verdict"], **json.loads(row["verdicts"])}.items():
        counts = tally.verdicts.setdefault(pair, VerdictCounts())
        counts.requests += 1
        counts.output_tokens += row["output_tokens"] or 0
    for measure in MEASURES:
        if row[measure] is not None and row["status"] != Status.INVALID:
            bins, index = tally.bins.setdefault(measure, {}), bin_of(row[measure])
            bins[index] = bins.get(index, 0) + 1


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
