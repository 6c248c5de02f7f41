"""The proxy's workers go on without the agent, and without each other."""

import os
import random
import shutil
import signal
import socket
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
import requests
import yaml

from agent.app.processes import run_processes
from agent.app.supervising import Trial
from agent.errors import SettingsInvalid
from agent.settings import Settings
from tests.real_parts.agent_process import AgentPorts
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Simulator, rows_in
from tests.test_app_proxy import QUIET, Proxied, proxied_by

STREAMS = 12
TOKENS = 60
WORKER = "proxy worker 1"


@contextmanager
def two_workers(folder: Path, time_scale: float = 1.0, **proxy: str) -> Iterator[Proxied]:
    """An agent whose proxy has two workers, before an engine that is so many times as fast."""
    ports, scenario = AgentPorts.free(), {**QUIET, "time_scale": time_scale}
    with Simulator(folder, grpc=ports.grpc, service="engine-0", scenario=scenario) as engine:
        proxied = proxied_by(folder, ports, [engine], **proxy)
        with proxied.agent:
            yield proxied


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with two_workers(tmp_path_factory.mktemp("workers")) as proxied:
        yield proxied


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Proxied]:
    """Its streams of many tokens are open for minutes."""
    with two_workers(tmp_path, 0.1) as proxied:
        yield proxied


@dataclass
class Streams:
    """Open streams, each read by a thread to its end."""

    proxied: Proxied
    name: str
    tokens: int = TOKENS
    cut: list[str] = field(default_factory=list)
    complete: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)
    _readers: list[threading.Thread] = field(default_factory=list)

    def begin(self) -> None:
        """Return when each stream has its first event."""
        for number in range(STREAMS):
            reader = threading.Thread(target=self._read, args=(f"{self.name}-{number}",))
            reader.start()
            self._readers.append(reader)
        eventually(
            lambda: len(self.begun) == STREAMS, within_s=WITHIN_S, what="the first event of each"
        )

    def _read(self, request_id: str) -> None:
        try:
            with self.proxied.post(
                self.tokens, {"X-Request-Id": request_id}, ignore_eos=True
            ) as response:
                lines = response.iter_lines()
                next(lines)
                self.begun.append(request_id)
                last = [line for line in lines if line][-1]
        except requests.RequestException:
            self.cut.append(request_id)
        else:
            (self.complete if last == b"data: [DONE]" else self.cut).append(request_id)

    def end(self) -> None:
        """Return when all have ended."""
        for reader in self._readers:
            reader.join()


def settled_rows(proxied: Proxied, wanted: Collection[str]) -> dict[str, dict[str, Any]]:
    """The settled rows of these requests by id, once each has one."""

    def read() -> dict[str, dict[str, Any]]:
        rows = {
            row["request_id"]: row
            for row in rows_in(proxied.agent, 1)
            if row["request_id"] in wanted and row["counted"]
        }
        return rows if len(rows) == len(wanted) else {}

    return eventually(read, within_s=WITHIN_S, what=f"the rows of {len(wanted)} requests")


def kill(proxied: Proxied, name: str) -> int:
    """Kill a process; returns its id."""
    process = proxied.agent.process(name)
    process.send_signal(signal.SIGKILL)
    return process.pid


def is_back(proxied: Proxied, name: str, killed: int) -> bool:
    """Whether another process does the work of the killed one."""
    try:
        return proxied.agent.process(name).pid != killed
    except StopIteration:
        return False


def _answers(proxied: Proxied) -> bool:
    try:
        return requests.get(f"{proxied.agent.url}/readyz", timeout=5).ok
    except requests.RequestException:
        return False


class Clients:
    """Clients that send one short request after another, and note what each got."""

    def __init__(self, proxied: Proxied, name: str) -> None:
        self._proxied = proxied
        self._name = name
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(4)]
        self.complete: set[str] = set()
        # Of a request that got nothing, nobody knows whether a worker had read it.
        self.cut: set[str] = set()

    def __enter__(self) -> Self:
        for each in self._threads:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()

    def _run(self, number: int) -> None:
        place = 0
        while not self._stop.is_set():
            self._send(f"{self._name}-{number}-{place}", tokens=1 + place % 7)
            place += 1

    def _send(self, request_id: str, tokens: int) -> None:
        got: list[bytes] = []
        # A worker may be killed between the last event and the end of the response.
        ended = self.cut
        with (
            suppress(requests.RequestException),
            self._proxied.post(tokens, {"X-Request-Id": request_id}) as response,
        ):
            got += filter(None, response.iter_lines())
            ended = self.complete if got[-1:] == [b"data: [DONE]"] else self.cut
        if got:
            ended.add(request_id)

    def rows(self) -> list[dict[str, Any]]:
        """The settled rows of their requests, once there is one of each that got something."""

        def read() -> list[dict[str, Any]]:
            rows = [
                row
                for row in rows_in(self._proxied.agent, 1)
                if row["request_id"].startswith(self._name) and row["counted"]
            ]
            ids = {row["request_id"] for row in rows}
            return rows if ids >= self.complete | self.cut else []

        return eventually(read, within_s=WITHIN_S, what="a row of each request")


def test_each_request_has_one_row_whenever_a_worker_or_the_agent_is_killed(
    proxied: Proxied,
) -> None:
    moments = random.Random(7)
    with Clients(proxied, "any-moment") as clients:
        for name in (WORKER, "agent", WORKER, "proxy worker 0"):
            threading.Event().wait(moments.random())
            killed = kill(proxied, name)
            back = partial(is_back, proxied, name, killed)
            eventually(back, within_s=WITHIN_S, what=f"the next {name}")
    eventually(lambda: _answers(proxied), within_s=WITHIN_S, what="the API of the next agent")
    rows = clients.rows()
    status_of = {row["request_id"]: row["status"] for row in rows}
    assert len(rows) == len(status_of)
    assert {status_of[request_id] for request_id in clients.complete} == {"ok"}
    # The worker may have ended before its client had the last bytes.
    assert {status_of[request_id] for request_id in clients.cut} <= {"ok", "error"}


def test_a_reload_under_load_refuses_no_request_and_cuts_no_stream(proxied: Proxied) -> None:
    streams = Streams(proxied, "reload")
    streams.begin()
    before = proxied.agent.process("agent").pid
    proxied.agent.send_signal(signal.SIGHUP)
    names: list[str] = []
    while not is_back(proxied, "agent", before) or not _answers(proxied):
        names.append(f"reload-new-{len(names)}")
        assert proxied.chat(names[-1]).status_code == 200
        threading.Event().wait(0.05)
    streams.end()
    assert (streams.cut, len(streams.complete)) == ([], STREAMS)
    rows = settled_rows(proxied, {*names, *streams.complete})
    assert {row["status"] for row in rows.values()} == {"ok"}
    eventually(lambda: _workers(proxied) == 2, within_s=WITHIN_S, what="the end of the earlier")


def test_the_streams_of_earlier_workers_that_are_killed_get_rows_from_the_next_run(
    slow: Proxied,
) -> None:
    streams = Streams(slow, "earlier", tokens=5000)
    streams.begin()
    earlier = [slow.agent.process(f"proxy worker {number}") for number in range(2)]
    slow.agent.send_signal(signal.SIGHUP)
    # They take no new connections.
    eventually(
        lambda: slow.agent.log().count("streams go on") == 2, within_s=WITHIN_S, what="two retire"
    )
    assert slow.chat("of-the-next-run").status_code == 200
    for each in earlier:
        each.send_signal(signal.SIGKILL)
    streams.end()
    assert (streams.complete, len(streams.cut)) == ([], STREAMS)
    rows = settled_rows(slow, streams.cut)
    assert {(row["status"], row["error"]) for row in rows.values()} == {("error", "worker_died")}

    def died() -> list[dict[str, Any]]:
        events = [e for e in slow.agent.api.events() if e["kind"] == "PROXY_WORKER_DIED"]
        return events if len(events) >= len(earlier) else []

    evidence = [each["evidence"] for each in eventually(died, within_s=WITHIN_S, what="events")]
    assert sorted(each["worker"] for each in evidence) == [0, 1]
    assert sum(each["requests_cut"] for each in evidence) == STREAMS
    assert sum(each["rows"] for each in evidence) == STREAMS
    eventually(lambda: _cut(slow) == STREAMS, within_s=WITHIN_S, what="the count of cut requests")
    # The processes that made the rows end, and the workers of this run go on.
    eventually(lambda: len(slow.agent.children()) == 3, within_s=WITHIN_S, what="their end")
    assert slow.chat("after-them").status_code == 200


def _cut(proxied: Proxied) -> float:
    return proxied.metric("llm_agent_proxy_failures_total", reason="worker_died")


def _workers(proxied: Proxied) -> int:
    return sum(child.name().startswith("proxy worker") for child in proxied.agent.children())


def test_fewer_workers_of_the_last_of_three_reloads_take_all_connections(tmp_path: Path) -> None:
    with two_workers(tmp_path, drain="0.1s") as own:
        before = own.agent.process("agent").pid
        for count in (2, 2, 1):
            # The later ones come while the program starts anew.
            _reload_with(own, count)
            eventually(lambda: not _runs(own, before), within_s=WITHIN_S, what="the agent's end")
        eventually(lambda: _workers(own) == 1, within_s=WITHIN_S, what="one worker")
        listening = [
            each.status
            for each in own.agent.process("proxy worker 0").net_connections()
            if each.status == psutil.CONN_LISTEN
        ]
        # A listening socket that is closed resets the clients that wait in it.
        assert len(listening) == 2
        eventually(lambda: _answers(own), within_s=WITHIN_S, what="the API of the next agent")
        assert own.chat("fewer-workers").status_code == 200
        _stop_while_clients_keep_connections(own)


def _reload_with(proxied: Proxied, workers: int) -> None:
    file = proxied.folder / "agent.yml"
    settings = yaml.safe_load(file.read_text())
    settings["proxy"]["workers"] = workers
    file.write_text(yaml.safe_dump(settings))
    proxied.agent.send_signal(signal.SIGHUP)


def _runs(proxied: Proxied, pid: int) -> bool:
    return pid in [child.pid for child in proxied.agent.children()]


def _stop_while_clients_keep_connections(proxied: Proxied) -> None:
    """No worker must be killed for them."""
    address = ("127.0.0.1", int(proxied.url.rpartition(":")[2]))
    with ExitStack() as stack:
        for _ in range(STREAMS):
            client = stack.enter_context(socket.create_connection(address))
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\n")
        proxied.agent.stop()
    assert "ended with status -9" not in proxied.agent.log()
    assert "clients were cut off" in proxied.agent.log()


def test_an_agent_comes_back_though_somebody_removed_its_folder(proxied: Proxied) -> None:
    unix = proxied.agent.process("agent").net_connections("unix")
    (socket_file,) = {str(each.laddr) for each in unix if "handover.sock" in str(each.laddr)}
    shutil.rmtree(Path(socket_file).parent)
    killed = kill(proxied, "agent")
    eventually(lambda: is_back(proxied, "agent", killed), within_s=WITHIN_S, what="the next agent")
    eventually(lambda: _answers(proxied), within_s=WITHIN_S, what="the API of the next agent")
    assert proxied.chat("folder-removed").status_code == 200
    assert proxied.row("folder-removed")["status"] == "ok"


@pytest.mark.slow
def test_a_sigterm_to_all_processes_lets_streams_end_and_stores_their_rows(tmp_path: Path) -> None:
    with two_workers(tmp_path) as proxied:
        streams = Streams(proxied, "stopped")
        streams.begin()
        supervisor = psutil.Process(proxied.agent.pid).parent()
        assert supervisor is not None
        os.killpg(os.getpgid(supervisor.pid), signal.SIGTERM)
        streams.end()
        assert (streams.cut, len(streams.complete)) == ([], STREAMS)
        eventually(lambda: not supervisor.is_running(), within_s=WITHIN_S, what="its end")
        proxied.agent.stop()
    assert "Traceback" not in proxied.agent.log()
    with closing(sqlite3.connect(tmp_path / "goodput.db")) as database:
        stored = database.execute("SELECT request_id, status FROM requests").fetchall()
    assert sorted(stored) == sorted((request_id, "ok") for request_id in streams.complete)


def test_a_taken_port_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings.model_validate({
            "engines": [{"name": "chat-0", "url": "http://127.0.0.1:9"}],
            "proxy": {"listen": f"127.0.0.1:{taken.getsockname()[1]}"},
        })  # fmt: skip
        with pytest.raises(SettingsInvalid, match="choose another address"):
            run_processes(settings, lambda _: 0, _no_trial)
    assert not list(tmp_path.iterdir())


# An agent that is asked to stop as soon as it has its folder, and one whose interpreter is gone
# when it is to start anew.
STOPPED_EARLY = """
import os, runpy, signal, tempfile
make = tempfile.mkdtemp
def made(**given):
    folder = make(**given)
    os.kill(os.getpid(), signal.SIGTERM)
    return folder
tempfile.mkdtemp = made
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""
# Its trial finds an interpreter, and there is none when it is to become the new agent.
LOSES_INTERPRETER = """
import os, runpy
execv = os.execv
os.execv = lambda _, arguments: execv("/nowhere/python", arguments)
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""

# What a supervisor of a version that has other descriptors of its workers leaves.
OF_ANOTHER_VERSION = """
import json, os, runpy, tempfile
os.environ.setdefault("_GOODPUT_AGENT_LEFT", json.dumps({
    "address": "127.0.0.1:9", "listening": [], "folder": tempfile.mkdtemp(), "workers": [],
    "memories": [[None, {"ring": 3}]],
}))
runpy.run_module("agent", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[str], ServerProcess]]:
    """Starts an agent with a proxy by a program, with a folder for temporary files."""
    (tmp_path / "temporary").mkdir()
    settings = {
        "engines": [{"name": "chat-0", "url": "http://127.0.0.1:9"}],
        "listen": {"port": free_port()},
        "otlp": {"grpc": None, "http": f"127.0.0.1:{free_port()}"},
        "proxy": {"listen": f"127.0.0.1:{free_port()}"},
        "storage": {"file": str(tmp_path / "goodput.db")},
    }
    config = tmp_path / "agent.yml"
    config.write_text(yaml.safe_dump(settings))
    with ExitStack() as stack:
        yield lambda program: stack.enter_context(
            ServerProcess(
                [sys.executable, "-c", program, "run", "--config", config],
                tmp_path / "agent.log",
                environment={"TMPDIR": str(tmp_path / "temporary")},
            )
        )


def test_a_stop_as_early_as_it_can_be_leaves_no_folder(
    tmp_path: Path, command: Callable[[str], ServerProcess]
) -> None:
    assert command(STOPPED_EARLY).wait(within_s=WITHIN_S) == 0
    assert not list((tmp_path / "temporary").iterdir())


def test_an_agent_goes_on_if_its_interpreter_is_gone_after_the_trial_of_a_reload(
    tmp_path: Path, command: Callable[[str], ServerProcess]
) -> None:
    said = "the new agent cannot start, so this one goes on"
    agent = command(LOSES_INTERPRETER)

    def pids(name: str) -> list[int]:
        children = psutil.Process(agent.pid).children()
        return [each.pid for each in children if each.name() == name]

    before = eventually(lambda: pids("proxy worker 0"), within_s=WITHIN_S, what="a worker")
    psutil.Process(agent.pid).send_signal(signal.SIGHUP)
    log = tmp_path / "agent.log"
    agent.wait_until(lambda: said in log.read_text(), within_s=WITHIN_S)
    eventually(lambda: pids("agent"), within_s=WITHIN_S, what="the agent")
    assert pids("proxy worker 0") == before
    psutil.Process(agent.pid).terminate()
    assert agent.wait(within_s=WITHIN_S) == 0
    assert not list((tmp_path / "temporary").iterdir())


def test_what_another_version_left_of_a_worker_ends_nothing(
    tmp_path: Path, command: Callable[[str], ServerProcess]
) -> None:
    agent, log = command(OF_ANOTHER_VERSION), tmp_path / "agent.log"
    for said in ("of a version that leaves nothing", "earlier worker: ended with status 0"):
        agent.wait_until(partial(_is_in, said, log), within_s=WITHIN_S)
    names = [each.name() for each in psutil.Process(agent.pid).children()]
    assert sorted(names) == ["agent", "proxy worker 0"]
    psutil.Process(agent.pid).terminate()
    assert agent.wait(within_s=WITHIN_S) == 0


def _is_in(text: str, file: Path) -> bool:
    return text in file.read_text()


def _no_trial() -> Trial:
    raise AssertionError("nothing is tried")
