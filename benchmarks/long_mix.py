"""Spans and proxied streams under faults for 15 minutes: nothing is lost, nothing is doubled."""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

import psutil
import psycopg
import requests
import uvloop

from benchmarks.proxy_load import chat
from tests.real_parts.agent_process import AgentOfUser, AgentPorts
from tests.real_parts.ports import free_port
from tests.real_parts.postgres import PostgresServer
from tests.real_parts.processes import ServerProcess, answers
from tests.real_parts.span_sender import ConstantLoad
from tests.real_parts.waiting import eventually

SECONDS = float(os.environ.get("BENCH_MIX_S", "900"))
FAULTS = int(os.environ.get("BENCH_MIX_FAULTS", "43"))
SEED = int(os.environ.get("BENCH_MIX_SEED", "20261126"))
STREAMS_PER_S = 3.3
# Three senders of three spans each.
_SPANS_EVERY_S = 0.035
_SETTLED_WITHIN_S = 90.0
_UP_WITHIN_S = 120.0
_LAST = b"0\r\n\r\n"
_WORKERS = ("proxy worker 0", "proxy worker 1")
_GARBAGE_POSTS = 50
_LEAVERS = 20
_LEFT = "left"


@dataclass(slots=True)
class Engine:
    """A scripted engine on a port of its own, which may be killed and started again."""

    port: int
    log: Path
    process: ServerProcess | None = None

    def start(self) -> None:
        """Return when it responds."""
        command = [sys.executable, "-m", "benchmarks.proxy_engine", str(self.port)]
        self.process = ServerProcess(command, self.log)
        url = f"http://127.0.0.1:{self.port}/metrics"
        self.process.wait_until(lambda: answers(url), within_s=_UP_WITHIN_S)

    def kill(self) -> None:
        """Kill it as kill -9 does."""
        if self.process is not None:
            self.process.kill()


@dataclass(slots=True)
class Site:
    """Two engines, an agent with two proxy workers before them, and its PostgreSQL."""

    folder: Path
    ports: AgentPorts
    proxy: int
    engines: Sequence[Engine]
    agent: AgentOfUser
    postgres: PostgresServer
    database: str
    config: str

    @property
    def config_file(self) -> Path:
        """The settings of the agent."""
        return self.folder / "agent.yml"

    def rows(self, query: str) -> Counter[str]:
        """How many rows of the shared database have each value of the query's one column."""
        with psycopg.connect(self.database.replace("+psycopg", "")) as connection:
            return Counter(str(row[0]) for row in connection.execute(query.encode()))


class Streams:
    """Clients that send a stream each, and note how it ended for them.

    `finished`: to its last byte. `cut`: broken off after the first byte. `refused`: not status 200.
    `unseen`: no byte of a response came, so perhaps no worker saw the request. `left`: the client
    went away.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._open: set[asyncio.Task[None]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self.ended: dict[str, str] = {}
        self.leave = 0

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def stop(self) -> None:
        """Send no more; return when all streams have ended."""
        self._stop.set()
        self._thread.join()

    def named(self, *endings: str) -> set[str]:
        """The request ids of the streams that ended so."""
        return {name for name, ending in self.ended.items() if ending in endings}

    async def _run(self) -> None:
        began, number = time.monotonic(), 0
        while not self._stop.is_set():
            task = asyncio.create_task(self._stream(f"mix-{number}"))
            self._open.add(task)
            task.add_done_callback(self._open.discard)
            number += 1
            await asyncio.sleep(max(0.0, began + number / STREAMS_PER_S - time.monotonic()))
        await asyncio.gather(*self._open)

    async def _stream(self, name: str) -> None:
        self.ended[name] = "unseen"
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(chat(self._port, "decoded", name))
                await self._read(reader, name)
            finally:
                writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader, name: str) -> None:
        tail = b""
        while data := await reader.read(65536):
            if self.ended[name] == "unseen":
                self.ended[name] = "cut" if data.startswith(b"HTTP/1.1 200") else "refused"
            tail = (tail + data)[-len(_LAST) :]
            if self.ended[name] == "cut" and self.leave > 0:
                self.leave -= 1
                self.ended[name] = _LEFT
                return
            if tail == _LAST:
                self.ended[name] = "finished"
                return


def _kill(site: Site, name: str) -> None:
    """Kill a process of the agent, and wait for the next one."""
    killed = site.agent.process(name)
    killed.send_signal(signal.SIGKILL)

    def is_back() -> bool:
        with suppress(StopIteration, psutil.NoSuchProcess):
            return bool(site.agent.process(name).pid != killed.pid)
        return False

    eventually(is_back, within_s=_UP_WITHIN_S, what=f"the next {name}")


def _freeze_agent(site: Site, _streams: Streams) -> None:
    process = site.agent.process("agent")
    process.suspend()
    time.sleep(5)
    process.resume()


def _hang_up(site: Site, _streams: Streams) -> None:
    site.agent.send_signal(signal.SIGHUP)


def _hang_up_with_mistake(site: Site, _streams: Streams) -> None:
    site.config_file.write_text(site.config + "\nprices: [{from: 2026-13-01}]\n")
    site.agent.send_signal(signal.SIGHUP)
    time.sleep(8)
    site.config_file.write_text(site.config)


def _restart(site: Site, _streams: Streams) -> None:
    site.agent.stop()
    site.agent.start()


def _kill_engine(site: Site, _streams: Streams) -> None:
    engine = random.choice(site.engines)
    engine.kill()
    time.sleep(5)
    engine.start()


def _freeze_engine(site: Site, _streams: Streams) -> None:
    process = random.choice(site.engines).process
    assert process is not None, "the engine runs"
    os.kill(process.pid, signal.SIGSTOP)
    time.sleep(8)
    os.kill(process.pid, signal.SIGCONT)


def _stop_postgres(site: Site, _streams: Streams) -> None:
    site.postgres.stop()
    time.sleep(10)
    site.postgres.restart()


def _kill_postgres(site: Site, _streams: Streams) -> None:
    site.postgres.kill()
    site.postgres.restart()


def _freeze_postgres(site: Site, _streams: Streams) -> None:
    with site.postgres.frozen():
        time.sleep(8)


def _send_garbage(site: Site, _streams: Streams) -> None:
    url = f"http://127.0.0.1:{site.ports.http}/v1/traces"
    headers = {"Content-Type": "application/x-protobuf"}
    with suppress(requests.RequestException):
        for _ in range(_GARBAGE_POSTS):
            requests.post(url, data=random.randbytes(5000), headers=headers, timeout=10)


def _query_much(site: Site, _streams: Streams) -> None:
    def ask() -> None:
        for _ in range(10):
            with suppress(requests.RequestException):
                requests.get(f"{site.agent.url}/api/v1/summary?window=24h", timeout=30)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _let_clients_leave(_site: Site, streams: Streams) -> None:
    streams.leave += _LEAVERS


Fault = Callable[[Site, Streams], None]
_FAULTS: dict[str, Fault] = {
    "agent killed": lambda site, _: _kill(site, "agent"),
    "worker killed": lambda site, _: _kill(site, random.choice(_WORKERS)),
    "agent frozen": _freeze_agent,
    "SIGHUP": _hang_up,
    "SIGHUP with a mistake": _hang_up_with_mistake,
    "restart": _restart,
    "engine killed": _kill_engine,
    "engine frozen": _freeze_engine,
    "PostgreSQL stopped": _stop_postgres,
    "PostgreSQL killed": _kill_postgres,
    "PostgreSQL frozen": _freeze_postgres,
    "garbage": _send_garbage,
    "many queries": _query_much,
    "clients leave": _let_clients_leave,
}


def _schedule() -> list[str]:
    """Each fault in turn, in an order by chance."""
    names = list(islice(cycle(_FAULTS), FAULTS))
    random.shuffle(names)
    return names


def _do_faults(site: Site, streams: Streams) -> Counter[str]:
    """Do all faults, and return how often each was done."""
    began, names = time.monotonic(), _schedule()
    for place, name in enumerate(names):
        due = began + SECONDS * (place + 0.5) / len(names)
        time.sleep(max(0.0, due - time.monotonic()))
        print(f"long mix, {time.monotonic() - began:.0f} s: {name}", flush=True)
        _FAULTS[name](site, streams)
    time.sleep(max(0.0, began + SECONDS - time.monotonic()))
    return Counter(names)


@dataclass(frozen=True, slots=True)
class Account:
    """What was sent, against the rows of the shared database."""

    spans: set[str]
    streams: Streams
    span_rows: Counter[str]
    stream_rows: Counter[str]

    @property
    def lost_spans(self) -> set[str]:
        """The acknowledged spans without a row."""
        return self.spans - self.span_rows.keys()

    @property
    def lost_streams(self) -> set[str]:
        """The streams without a row of which the client got at least one byte of an engine."""
        return self.streams.named("finished", "cut", _LEFT) - self.stream_rows.keys()

    @property
    def doubled(self) -> set[str]:
        """The requests with two rows."""
        rows = self.span_rows + self.stream_rows
        return {name for name, number in rows.items() if number > 1}

    def print(self) -> None:
        """Print the figures."""
        ended = Counter(self.streams.ended.values())
        endings = ", ".join(f"{number:,} {name}" for name, number in ended.most_common())
        print(
            f"long mix: {FAULTS} faults in {SECONDS:.0f} s, seed {SEED}; {len(self.spans):,} spans "
            f"acknowledged, {len(self.lost_spans)} lost; {len(self.streams.ended):,} streams "
            f"({endings}), {len(self.lost_streams)} without a row; {len(self.doubled)} doubled "
            f"(targets 0)"
        )
        for name in sorted(self.lost_streams)[:20]:
            print(f"long mix: no row of {name}, {self.streams.ended[name]}")


def _site(folder: Path, stack: ExitStack) -> Site:
    # The server's user must be able to open it.
    folder.chmod(0o755)
    (folder / "server").mkdir()
    postgres = PostgresServer(folder / "server")
    stack.callback(postgres.stop)
    engines = [Engine(free_port(), folder / f"engine-{number}.log") for number in range(2)]
    for engine in engines:
        stack.callback(engine.kill)
        engine.start()
    ports, proxy = AgentPorts.free(), free_port()
    settings = {
        "engines": [
            {"name": f"chat-{number}", "url": f"http://127.0.0.1:{engine.port}"}
            for number, engine in enumerate(engines)
        ],
        "proxy": {
            "listen": f"127.0.0.1:{proxy}",
            "workers": len(_WORKERS),
            "join_wait": "1s",
            "drain": "30s",
        },
        "storage": {"publish_to": postgres.url("postgres")},
        "nvml": {"enabled": False},
    }
    agent = stack.enter_context(AgentOfUser.with_settings(folder, ports, settings))
    config = (folder / "agent.yml").read_text()
    return Site(folder, ports, proxy, engines, agent, postgres, postgres.url("postgres"), config)


def _account(site: Site, load: ConstantLoad, streams: Streams) -> Account:
    wanted = load.acknowledged | streams.named("finished", "cut", _LEFT)

    def read() -> Account:
        return Account(
            load.acknowledged,
            streams,
            site.rows("SELECT trace_id FROM requests WHERE request_id NOT LIKE 'mix-%'"),
            site.rows("SELECT request_id FROM requests WHERE request_id LIKE 'mix-%'"),
        )

    account, deadline = read(), time.monotonic() + _SETTLED_WITHIN_S
    while wanted - _names(account) and time.monotonic() < deadline:
        time.sleep(5)
        account = read()
    return account


def _names(account: Account) -> set[str]:
    both: Iterable[str] = (*account.span_rows, *account.stream_rows)
    return set(both)


def run() -> bool:
    """Print the figures; return whether nothing is lost, doubled or unsaid."""
    random.seed(SEED)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        site = _site(Path(name), stack)
        load, streams = ConstantLoad(site.ports.http, _SPANS_EVERY_S), Streams(site.proxy)
        load.start()
        streams.start()
        try:
            done = _do_faults(site, streams)
        finally:
            load.stop()
            streams.stop()
        account = _account(site, load, streams)
        account.print()
        events = Counter(each["kind"] for each in site.agent.api.events(window="24h"))
        print(f"long mix: events {json.dumps(events, sort_keys=True)}")
        if kept := os.environ.get("BENCH_MIX_LOG"):
            Path(kept).write_text(site.agent.log())
    unsaid = done["worker killed"] - events["PROXY_WORKER_DIED"]
    return not (account.lost_spans or account.lost_streams or account.doubled or unsaid)
