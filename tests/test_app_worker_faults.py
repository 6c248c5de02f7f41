"""Open streams feel nothing of what happens to the agent and its database."""

import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
import requests
import uvloop

from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from benchmarks.proxy_load import LoadConnection, chat, connections
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.processes import ServerProcess, answers
from tests.real_parts.waiting import eventually

WITHIN_S = 120.0
STREAMS = 60
# These go to the engine itself. What delays them, too, is no fault of the proxy.
DIRECT = 6
EVENT_EVERY_S = 0.02
# What a fault takes away is away for seconds, and a stream that needs it would stand still for as
# long. A busy machine lets a worker wait for less.
LONGER_S = 1.0
AGENT, WORKERS = "agent", ("proxy worker 0", "proxy worker 1")

Arrivals = Sequence[float]


@dataclass(frozen=True, slots=True)
class Site:
    """An engine, the agent with two workers before it, and its PostgreSQL."""

    agent: AgentProcess
    postgres: PostgresServer
    database_url: str
    engine: int
    proxy: int

    def rows(self, prefix: str) -> set[str]:
        """The ids of the stored requests whose id begins so."""
        with suppress(requests.RequestException):
            found = {str(row["request_id"]) for row in self.agent.api.requests(limit="1000")}
            return {each for each in found if each.startswith(prefix)}
        return set()

    def cut_rows(self, prefix: str) -> set[tuple[str, str, str]]:
        """Status, error and verdict of the stored requests that did not end well."""
        rows = self.agent.api.requests(limit="1000", status="error")
        return {
            (str(row["status"]), str(row["error"]), str(row["verdict"]))
            for row in rows
            if str(row["request_id"]).startswith(prefix)
        }

    def dropped(self) -> float:
        """How many finished requests are counted as dropped."""
        with suppress(requests.RequestException, KeyError):
            exposition = self.agent.api.exposition()
            return total(exposition, "llm_agent_proxy_failures_total", reason="store_behind")
        return 0.0

    def accounts_for(self, finished: int, prefix: str, dropped_before: float) -> None:
        """Return when each finished request has its row or is counted as dropped."""

        def accounted() -> bool:
            return len(self.rows(prefix)) + self.dropped() - dropped_before >= finished

        eventually(accounted, within_s=WITHIN_S, what="the rows of all finished requests")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, engine, proxy = tmp_path_factory.mktemp("faults"), free_port(), free_port()
    command = [sys.executable, "-m", "benchmarks.proxy_engine", str(engine)]
    with tempfile.TemporaryDirectory(prefix="postgres-") as data:
        postgres = PostgresServer(Path(data))
        running = ServerProcess(command, folder / "engine.log")
        try:
            running.wait_until(
                lambda: answers(f"http://127.0.0.1:{engine}/metrics"), within_s=WITHIN_S
            )
            url = postgres.url("postgres")
            upgrade(shared := open_engine(url))
            shared.dispose()
            settings = {
                "engines": [{"name": "chat-0", "url": f"http://127.0.0.1:{engine}"}],
                "proxy": {"listen": f"127.0.0.1:{proxy}", "workers": 2, "join_wait": "0.1s"},
                "storage": {"publish_to": url, "query_timeout": "4s"},
                "nvml": {"enabled": False},
            }
            with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent:
                yield Site(agent, postgres, url, engine, proxy)
        finally:
            running.kill()
            postgres.stop()


@dataclass(frozen=True, slots=True)
class Watched:
    """When the pieces of each stream came; None for a stream that was cut."""

    proxied: Sequence[Arrivals | None]
    direct: Sequence[Arrivals | None]
    fault_at_s: float

    @property
    def cut(self) -> int:
        """How many streams were cut."""
        return self.proxied.count(None)

    def longer_s(self) -> float:
        """By how much the longest gap since the fault exceeds the longest one beside it.

        Beside it are the streams that went to the engine, and all streams before the fault.
        """
        gaps = [gap for arrivals in self.proxied if arrivals for gap in pairwise(arrivals)]
        since = [later - earlier for earlier, later in gaps if later >= self.fault_at_s]
        before = [later - earlier for earlier, later in gaps if later < self.fault_at_s]
        direct = [b - a for arrivals in self.direct if arrivals for a, b in pairwise(arrivals)]
        return max(since, default=0.0) - max(EVENT_EVERY_S, *before, *direct)


async def _watch(site: Site, name: str, fault: Callable[[], object]) -> Watched:
    async def stream(connection: LoadConnection, place: int, request: bytes) -> Arrivals | None:
        await asyncio.sleep(EVENT_EVERY_S * place / STREAMS)
        with suppress(ConnectionError):
            return await connection.arrivals_s(request)
        return None

    async with connections(site.proxy, STREAMS) as opened, connections(site.engine, DIRECT) as near:
        named = [chat(site.proxy, "decoded", f"{name}-{place}") for place in range(STREAMS)]
        proxied = asyncio.gather(*map(stream, opened, range(STREAMS), named))
        unnamed = [chat(site.engine, "decoded")] * DIRECT
        direct = asyncio.gather(*map(stream, near, range(DIRECT), unnamed))
        await asyncio.sleep(50 * EVENT_EVERY_S)
        fault_at_s = time.perf_counter()
        faulting = asyncio.create_task(asyncio.to_thread(fault))
        watched = Watched(await proxied, await direct, fault_at_s)
        await faulting
        return watched


def watch(
    site: Site, name: str, fault: Callable[[], object], repair: Callable[[], object] = lambda: None
) -> Watched:
    """Begin all streams, do the fault after 50 events of each, and read them to their ends.

    After the repair every finished request has its row, or is counted as dropped.
    """
    dropped = site.dropped()
    watched = uvloop.run(_watch(site, name, fault))
    repair()
    site.accounts_for(STREAMS - watched.cut, f"{name}-", dropped)
    assert watched.longer_s() <= LONGER_S
    return watched


def kill(site: Site, name: str) -> None:
    """Kill a process as kill -9 does, and wait for the next one."""
    killed = site.agent.process(name)
    killed.send_signal(signal.SIGKILL)

    def is_back() -> bool:
        with suppress(StopIteration):
            return bool(site.agent.process(name).pid != killed.pid)
        return False

    eventually(is_back, within_s=WITHIN_S, what=f"the next {name}")


def test_no_stream_feels_that_the_agent_is_killed(site: Site) -> None:
    assert watch(site, "agent", lambda: kill(site, AGENT)).cut == 0
    assert site.dropped() == 0


def test_a_killed_worker_takes_its_own_streams_alone(site: Site) -> None:
    own = []

    def fault() -> None:
        connections = site.agent.process(WORKERS[0]).net_connections()
        own.append(sum(each.laddr.port == site.proxy and bool(each.raddr) for each in connections))
        kill(site, WORKERS[0])

    watched = watch(site, "worker", fault)
    assert 0 < watched.cut == own[-1] < STREAMS
    # Each stream has its row, also one that was cut.
    site.accounts_for(STREAMS, "worker-", site.dropped())
    assert site.cut_rows("worker-") == {("error", "worker_died", "missed")}
    (event,) = [e for e in site.agent.api.events() if e["kind"] == "PROXY_WORKER_DIED"]
    assert (event["engine"], event["evidence"]["requests_cut"]) == (None, watched.cut)
    assert event["evidence"]["rows"] == watched.cut
    exposition = site.agent.api.exposition()
    reason = {"reason": "worker_died"}
    assert total(exposition, "llm_agent_proxy_failures_total", **reason) == watched.cut


def test_no_stream_feels_a_database_that_stops_in_the_middle_of_a_write(site: Site) -> None:
    with ExitStack() as stack:
        watched = watch(
            site, "frozen", lambda: stack.enter_context(site.postgres.frozen()), stack.close
        )
    assert watched.cut == 0


def test_no_stream_feels_queries_that_take_seconds(site: Site) -> None:
    def shared_database() -> str:
        body = requests.get(f"{site.agent.url}/readyz", timeout=60).json()
        return str(body["parts"]["shared database"])

    def fault() -> None:
        with (
            psycopg.connect(site.database_url.replace("+psycopg", "")) as connection,
            requests.Session() as session,
        ):
            connection.execute("LOCK TABLE requests IN ACCESS EXCLUSIVE MODE")
            began_s = time.monotonic()
            response = session.get(f"{site.agent.url}/api/v1/requests?limit=1000", timeout=60)
            assert response.status_code == 503
            assert time.monotonic() - began_s > 3

    # Otherwise the agent answers from its file.
    eventually(lambda: shared_database() == "ok", within_s=WITHIN_S, what="the shared database")
    assert watch(site, "query", fault).cut == 0
