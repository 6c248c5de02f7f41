"""The API on a real socket over a real database, with a clock that the test holds."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import uvloop
from fastapi import FastAPI
from sqlalchemy import Engine

from agent.analysis.verdicts import Judge
from agent.outputs.api.routes import ApiContext, make_api
from agent.outputs.web import first_page, runbooks
from agent.records.event import Event
from agent.records.gpu import GpuSample
from agent.records.minute import MinuteRow, RequestCost
from agent.records.objective import Objective
from agent.records.request import RequestRecord
from agent.sources.listening import AsgiServer, open_socket
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from agent.store.minute_sums import MinuteQueries
from agent.store.minutes import MinuteStore
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.rollup_store import RollupStore
from agent.store.store_queries import StoreQueries
from agent.store.writing import Joining, request_settle, request_write
from tests.records.making import NOON, judged

WITHIN_S = 30.0

KEEP_REQUESTS_S = 7 * 86400.0
KEEP_ROLLUPS_S = 400 * 86400.0


@dataclass(slots=True)
class Around:
    """What a test decides about the agent around the API."""

    now: float = NOON + 333.75
    problems: list[str] = field(default_factory=list)
    engines: list[Mapping[str, Any]] = field(default_factory=list)


class Api:
    """One running API, and what a test may put into its database."""

    def __init__(self, url: str, engine: Engine, around: Around) -> None:
        self.url = url
        self.around = around
        self._engine = engine
        self._write = request_write(engine)
        self._observations = ObservationStore(engine, "agent-0")
        self._other_observations = ObservationStore(engine, "agent-1")
        self._session = requests.Session()

    def store(self, records: Sequence[RequestRecord], objectives: Sequence[Objective]) -> None:
        """Store these requests as judged by these objectives."""
        self._write(judged(records, objectives))

    def join(self, judge: Judge, wait_s: float) -> None:
        """From now on, join the views of requests."""
        self._joining = Joining(agent="agent-0", judge=judge, wait_s=wait_s)
        self._write = request_write(self._engine, self._joining)

    def settle(self, now: float) -> None:
        """Count what has waited long enough by now."""
        request_settle(self._engine, self._joining)(now)

    def keep_house(self) -> None:
        """Fold what was stored into rollups, and let go of what is kept no longer by now."""
        now = self.around.now
        RollupStore(self._engine, "agent-0").fold(now)
        Retention(self._engine).expire(now - KEEP_REQUESTS_S, now - KEEP_ROLLUPS_S, now)

    def keep(self, *events: Event) -> None:
        """Store these events."""
        for event in events:
            self._observations.write_event(event)

    def keep_gpus(self, *samples: GpuSample, others: Sequence[GpuSample] = ()) -> None:
        """Store these readings of this agent, and those of another one."""
        self._observations.write_gpu_samples(samples)
        self._other_observations.write_gpu_samples(others)

    def keep_minutes(self, *minutes: MinuteRow) -> None:
        """Store these minutes of an engine."""
        MinuteStore(self._engine, "agent-0").write(minutes, (), self.around.now)

    def price(self, records: Sequence[RequestRecord]) -> None:
        """Give each of these an eighth of a dollar by its number, at 4 dollars an hour."""
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
        MinuteStore(self._engine, "agent-0").write((), parts, self.around.now)

    def promise(self, objectives: Sequence[Objective]) -> None:
        """Put these objectives in force."""
        ObjectiveStore(self._engine, "agent-0").write_in_force(objectives, self.around.now)

    def answer(self, path: str, **parameters: Any) -> requests.Response:
        """Whatever is answered."""
        return self._session.get(f"{self.url}{path}", params=parameters, timeout=WITHIN_S)

    def ask(self, path: str, **parameters: Any) -> Any:
        """The JSON of an answer that must be good."""
        answer = self.answer(f"/api/v1/{path}", **parameters)
        assert answer.status_code == 200, answer.text[:500]
        return answer.json()

    def refusal(self, path: str, **parameters: Any) -> tuple[int, str]:
        """The status and the sentence of an answer that must be a refusal."""
        answer = self.answer(f"/api/v1/{path}", **parameters)
        told = answer.json()
        assert list(told) == ["detail"], answer.text[:500]
        return answer.status_code, told["detail"]

    def pages(self, path: str, **parameters: Any) -> Iterator[list[dict[str, Any]]]:
        """The items of each page of a list."""
        cursor: dict[str, Any] = {}
        while True:
            page = self.ask(path, **parameters, **cursor)
            assert list(page) == ["items", "next"]
            yield page["items"]
            if page["next"] is None:
                return
            cursor = {"cursor": page["next"]}

    def close(self) -> None:
        """Let go of the connection."""
        self._session.close()


@contextmanager
def open_api(folder: Path, *, migrated: bool = True) -> Iterator[Api]:
    """An API over a new database in this folder; without its tables where not `migrated`."""
    engine = open_engine(f"sqlite:///{folder / 'goodput.db'}")
    if migrated:
        upgrade(engine)
    around = Around()
    with served(make_api(_surroundings(engine, around))) as url:
        api = Api(url, engine, around)
        yield api
        api.close()
    engine.dispose()


def _surroundings(engine: Engine, around: Around) -> ApiContext:
    return ApiContext(
        queries=StoreQueries(engine),
        minutes=MinuteQueries(engine).minutes,
        now=lambda: around.now,
        longest_window_s=KEEP_ROLLUPS_S,
        metrics=lambda accept: (b"# asked for " + accept.encode(), "text/plain; version=0.0.4"),
        engines=lambda: around.engines,
        problems=lambda: around.problems,
        page=first_page(),
        runbooks=runbooks(),
        version="1.2.3",
        simulated=True,
    )


@contextmanager
def served(api: FastAPI) -> Iterator[str]:
    """The URL of a server in an event loop of its own."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="api")
    thread.start()
    server = AsgiServer(api, open_socket("tests", "127.0.0.1", 0))
    loop.call_soon_threadsafe(server.start)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(WITHIN_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
