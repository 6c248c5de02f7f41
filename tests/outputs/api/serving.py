"""The API on a real socket over a real database, with a clock that the test sets."""

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import requests
import uvloop
from sqlalchemy import Engine, text
from sqlalchemy import event as sqlalchemy_event

from agent.analysis.verdicts import Judge
from agent.outputs.api.api_context import ApiContext
from agent.outputs.api.routes import live_figures, make_api
from agent.outputs.web.documents import documents
from agent.records.engine import EngineSample, EngineStatus
from agent.records.engine_counts import EngineCounts
from agent.records.event import Event
from agent.records.gpu import GpuSample
from agent.records.minute import MinuteRow, RequestCost
from agent.records.objective import ExplainedRequest, Objective
from agent.records.request import RequestRecord
from agent.settings.access import AccessPolicy
from agent.sources.listening import AsgiServer, open_socket
from agent.store.claim import AgentState, NameClaim
from agent.store.connection import open_engine
from agent.store.explanations import ExplanationStore
from agent.store.folding import RollupStore
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.stored_queries import stored_queries
from agent.store.transactions import Joining, request_settle, request_write
from tests.records.making import NOON, judged
from tests.store.making import publish_file
from tests.store.migrated import migrated_file, migrated_in

WITHIN_S = 120.0

KEEP_REQUESTS_S = 7 * 86400.0
KEEP_ROLLUPS_S = 400 * 86400.0
QUERY_LIMIT_S = 60.0


@dataclass(slots=True)
class ServedAgent:
    """The clock, problems, engines and GPUs of the agent, set by a test."""

    now: float = NOON + 333.75
    problems: list[str] = field(default_factory=list)
    engines: list[Mapping[str, Any]] = field(default_factory=list)
    gpus: list[Mapping[str, Any]] = field(default_factory=list)
    setups: list[Mapping[str, Any]] = field(default_factory=list)
    states: dict[str, EngineStatus] = field(default_factory=dict)
    tenant_budgets: dict[str, float] = field(default_factory=dict)
    metrics: Callable[[str], tuple[bytes, str]] = lambda accept: (
        b"# asked for " + accept.encode(),
        "text/plain; version=0.0.4",
    )


class Api:
    """One running API, with methods that fill its database and query it.

    Requests are written to a file; a shared database gets them from there.
    """

    def __init__(self, url: str, engine: Engine, file: Engine, agent: ServedAgent) -> None:
        self.url = url
        self.agent = agent
        self._engine = engine
        self._file = file
        self._write = request_write(file)
        self._observations = ObservationStore(engine, "agent-0")
        self._other_observations = ObservationStore(engine, "agent-1")
        self._session = requests.Session()

    @contextmanager
    def counted_statements(self) -> Iterator[list[str]]:
        """The statements that the database gets in the block."""
        seen: list[str] = []

        def note(*arguments: Any) -> None:
            seen.append(arguments[2])

        sqlalchemy_event.listen(self._engine, "before_cursor_execute", note)
        yield seen
        sqlalchemy_event.remove(self._engine, "before_cursor_execute", note)

    def store(self, records: Sequence[RequestRecord], objectives: Sequence[Objective]) -> None:
        """Judge these requests by these objectives and store them."""
        self._write(judged(records, objectives))
        self._publish()

    def _publish(self) -> None:
        if self._file is not self._engine:
            publish_file(self._file, self._engine)

    def join(self, judge: Judge, wait_s: float) -> None:
        """Join the views of requests that are stored from now on."""
        self._joining = Joining(judge=judge, wait_s=wait_s)
        self._write = request_write(self._file, self._joining)

    def explain(self, *items: ExplainedRequest) -> None:
        """Store these explanations."""
        ExplanationStore(self._file, "agent-0").explain(items, self.agent.now)
        self._publish()

    def settle(self, now: float) -> None:
        """Settle the requests that have waited long enough at `now`."""
        request_settle(self._file, self._joining)(now)
        self._publish()

    def fold_and_expire(self) -> None:
        """Fold stored changes into rollups, then expire old rows."""
        now = self.agent.now
        RollupStore(self._file, "agent-0").fold()
        Retention(self._engine).expire(now - KEEP_REQUESTS_S, now - KEEP_ROLLUPS_S, now)

    def store_events(self, *events: Event, agent: str = "agent-0") -> None:
        """Store these events."""
        for event in events:
            ObservationStore(self._engine, agent).write_event(event)

    def store_engine_sample(
        self, engine: str, at: float, counts: EngineCounts | None = None
    ) -> None:
        """Store a sample of an engine without a fact, and what the engine counted before it."""
        sample = EngineSample(engine=engine, at=at, dialect="vllm", model=None, facts={})
        ObservationStore(self._file, "agent-0").write_engine_sample(sample, counts)
        self._publish()

    def store_gpus(self, *samples: GpuSample, others: Sequence[GpuSample] = ()) -> None:
        """Store GPU samples of this agent and of another one."""
        self._observations.write_gpu_samples(samples)
        self._other_observations.write_gpu_samples(others)

    def store_minutes(self, *minutes: MinuteRow, agent: str = "agent-0") -> None:
        """Store these minutes of an engine."""
        MinuteStore(self._engine, agent).write(minutes, (), self.agent.now)

    def price(self, records: Sequence[RequestRecord]) -> None:
        """Price each request at its number in eighths of a dollar, at 4 dollars per GPU hour."""
        parts = [
            RequestCost(
                row=number,
                vantage=item.vantage.value,
                complete=True,
                cost_usd=int(item.trace_id, 16) / 8,
                gpu_hours=int(item.trace_id, 16) / 32,
            )
            for number, item in enumerate(records, start=1)
        ]
        MinuteStore(self._file, "agent-0").write((), parts, self.agent.now)
        self._publish()

    def beat(self, name: str, *engines: Mapping[str, Any], simulated: bool = False) -> None:
        """Show that an agent of this name lives, and what its engines are."""
        state = AgentState(engines=lambda: engines, simulated=simulated)
        claim = NameClaim(name, f"elsewhere:1:{name}", state=state)
        claim.take(self._engine)
        claim.beat(self._engine)

    def execute(self, statement: str, **values: Any) -> None:
        """Execute a statement on the database, such as one that damages a row."""
        with self._engine.begin() as connection:
            connection.execute(text(statement), values)

    def value(self, query: str) -> Any:
        """Return the one value that a query of the database finds."""
        with self._engine.connect() as connection:
            return connection.scalar(text(query))

    def set_objectives(self, objectives: Sequence[Objective], *, agent: str = "agent-0") -> None:
        """Put these objectives in force."""
        ObjectiveStore(self._engine, agent).write_in_force(objectives, self.agent.now)

    def get(self, path: str, **parameters: Any) -> requests.Response:
        """Return the response to a GET."""
        return self._session.get(f"{self.url}{path}", params=parameters, timeout=WITHIN_S)

    def query(self, path: str, **parameters: Any) -> Any:
        """Return the JSON of a response that must have status 200."""
        response = self.get(f"/api/v1/{path}", **parameters)
        assert response.status_code == 200, response.text[:500]
        return response.json()

    def refusal(self, path: str, **parameters: Any) -> tuple[int, str]:
        """Return the status and the sentence of a refused query."""
        response = self.get(f"/api/v1/{path}", **parameters)
        body = response.json()
        assert response.headers["Content-Type"] == "application/problem+json"
        assert list(body) == ["title", "status", "detail"], response.text[:500]
        assert body["status"] == response.status_code
        return response.status_code, body["detail"]

    def pages(self, path: str, **parameters: Any) -> Iterator[list[dict[str, Any]]]:
        """Yield the items of each page of a list."""
        cursor: dict[str, Any] = {}
        while True:
            page = self.query(path, **parameters, **cursor)
            assert list(page) == ["items", "next"]
            yield page["items"]
            if page["next"] is None:
                return
            cursor = {"cursor": page["next"]}

    def close(self) -> None:
        """Close the connection."""
        self._session.close()


@contextmanager
def open_api(
    folder: Path,
    *,
    migrated: bool = True,
    access: AccessPolicy | None = None,
    trace_url: str | None = None,
) -> Iterator[Api]:
    """Serve an API over a new database in this folder, which has no tables unless `migrated`."""
    file = folder / "goodput.db"
    if migrated:
        file.write_bytes(migrated_file())
    with open_api_at(f"sqlite:///{file}", access, trace_url) as api:
        yield api


@contextmanager
def open_api_at(
    url: str, access: AccessPolicy | None = None, trace_url: str | None = None
) -> Iterator[Api]:
    """Serve an API over the database at this URL."""
    engine = open_engine(url)
    agent = ServedAgent()
    context = _context(engine, agent, access or AccessPolicy())
    context = replace(context, trace_url=trace_url)
    live = live_figures(context)
    with (
        _file_of(engine) as file,
        served(make_api(context, live), live.stop) as api_url,
    ):
        api = Api(api_url, engine, file, agent)
        yield api
        api.close()
    engine.dispose()


@contextmanager
def _file_of(engine: Engine) -> Iterator[Engine]:
    """The engine of SQLite itself; of a shared database a new file."""
    if engine.dialect.name == "sqlite":
        yield engine
        return
    with TemporaryDirectory() as folder, migrated_in(Path(folder)) as file:
        yield file


def _context(engine: Engine, agent: ServedAgent, access: AccessPolicy) -> ApiContext:
    queries = stored_queries(engine)
    return ApiContext(
        read=lambda work: work(queries),
        now=lambda: agent.now,
        longest_window_s=KEEP_ROLLUPS_S,
        rows_kept_s=KEEP_REQUESTS_S,
        query_limit_s=QUERY_LIMIT_S,
        metrics=lambda accept: agent.metrics(accept),
        engines=lambda: agent.engines,
        gpus=lambda: agent.gpus,
        setups=lambda: agent.setups,
        states=lambda: agent.states,
        problems=lambda: agent.problems,
        parts=lambda: {"store": "ok"},
        access=access,
        documents=documents(),
        tenant_budgets=agent.tenant_budgets,
        version="1.2.3",
        simulated=True,
    )


@contextmanager
def served(api: Any, on_stop: Callable[[], None] = lambda: None) -> Iterator[str]:
    """Serve an API on an event loop of its own and yield its URL."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="api")
    thread.start()
    server = AsgiServer(api, open_socket("tests", "127.0.0.1", 0))
    loop.call_soon_threadsafe(server.start)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        loop.call_soon_threadsafe(on_stop)
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(WITHIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
