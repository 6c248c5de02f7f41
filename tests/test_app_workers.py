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
from tests.real_parts.processes import ServerProcess, answers
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Simulator, rows_in
from tests.test_app_proxy import QUIET, Proxied, proxied_by

STREAMS = 12
TOKENS = 60
WORKER = "proxy worker 1"


@contextmanager
def two_workers(folder: Path, **proxy: str) -> Iterator[Proxied]:
    """An agent whose proxy has two workers, before a slow engine."""
    ports, scenario = AgentPorts.free(), {**QUIET, "time_scale": 0.5}
    with Simulator(folder, grpc=ports.grpc, service="engine-0", scenario=scenario) as engine:
        proxied = proxied_by(folder, ports, [engine], **proxy)
        with proxied.agent:
            yield proxied


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    with two_workers(tmp_path_factory.mktemp("workers")) as proxied:
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


def settled_rows(proxied: Proxied, prefix: str, wanted: Collection[str]) -> list[dict[str, Any]]:
    """The settled rows whose id begins so, once each of the wanted ids has one."""

    def read() -> list[dict[str, Any]]:
        rows = [
            row
            for row in rows_in(proxied.agent, 1)
            if row["request_id"].startswith(prefix) and row["counted"]
        ]
        return rows if {row["request_id"] for row in rows} >= set(wanted) else []

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


def answers_again(proxied: Proxied, killed: int) -> None:
    """Return when the API of the next agent answers."""

    def answers_now() -> bool:
        return is_back(proxied, "agent", killed) and answers(f"{proxied.agent.url}/readyz")

    eventually(answers_now, within_s=WITHIN_S, what="the API of the next agent")


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


def test_each_request_has_one_row_whenever_a_worker_or_the_agent_is_killed(
    proxied: Proxied,
) -> None:
    moments = random.Random(7)
    with Clients(proxied, "any-moment") as clients:
        for name in (WORKER, "agent", WORKER, "proxy worker 0"):
            threading.Event().wait(moments.random())
            back = partial(is_back, proxied, name, kill(proxied, name))
            eventually(back, within_s=WITHIN_S, what=f"the next {name}")
    rows = settled_rows(proxied, "any-moment", clients.complete | clients.cut)
    status_of = {row["request_id"]: row["status"] for row in rows}
    assert len(rows) == len(status_of)
    # A record is made some milliseconds after the last byte: a worker may be killed between.
    unrecorded = {each for each in clients.complete if status_of[each] != "ok"}
    error_of = {row["request_id"]: row["error"] for row in rows}
    assert {error_of[request_id] for request_id in unrecorded} <= {"worker_died"}
    assert len(unrecorded) < len(clients.complete) / 10
    # The worker may have ended before its client had the last bytes.
    assert {status_of[request_id] for request_id in clients.cut} <= {"ok", "error"}


def test_a_reload_under_load_refuses_no_request_and_cuts_no_stream(proxied: Proxied) -> None:
    streams = Streams(proxied, "reload")
    streams.begin()
    before = proxied.agent.process("agent").pid
    proxied.agent.send_signal(signal.SIGHUP)
    names: list[str] = []
    while not is_back(proxied, "agent", before) or not answers(f"{proxied.agent.url}/readyz"):
        names.append(f"reload-new-{len(names)}")
        assert proxied.chat(names[-1]).status_code == 200
        threading.Event().wait(0.05)
    streams.end()
    assert (streams.cut, len(streams.complete)) == ([], STREAMS)
    rows = settled_rows(proxied, "reload", {*names, *streams.complete})
    assert {row["status"] for row in rows} == {"ok"}
    eventually(lambda: workers(proxied) == 2, within_s=WITHIN_S, what="the end of the earlier")


def workers(proxied: Proxied) -> int:
    return sum(child.name().startswith("proxy worker") for child in proxied.agent.children())


def test_the_streams_of_earlier_workers_that_are_killed_get_rows_from_the_next_run(
    proxied: Proxied,
) -> None:
    # They would be open for minutes.
    streams = Streams(proxied, "earlier", tokens=8000)
    streams.begin()
    earlier = [proxied.agent.process(f"proxy worker {number}") for number in range(2)]
    retired, died = proxied.agent.log().count("streams go on"), len(deaths(proxied))
    proxied.agent.send_signal(signal.SIGHUP)
    eventually(
        lambda: proxied.agent.log().count("streams go on") == retired + 2,
        within_s=WITHIN_S,
        what="two workers that take no new connections",
    )
    assert proxied.chat("of-the-next-run").status_code == 200
    for each in earlier:
        each.send_signal(signal.SIGKILL)
    streams.end()
    assert (streams.complete, len(streams.cut)) == ([], STREAMS)
    rows = settled_rows(proxied, "earlier", streams.cut)
    assert {(row["status"], row["error"]) for row in rows} == {("error", "worker_died")}
    eventually(lambda: len(deaths(proxied)) >= died + 2, within_s=WITHIN_S, what="events")
    # The newest come first.
    evidence = [each["evidence"] for each in deaths(proxied)[: -died or None]]
    assert sorted(each["worker"] for each in evidence) == [0, 1]
    assert sum(each["requests_cut"] for each in evidence) == STREAMS
    assert sum(each["rows"] for each in evidence) == STREAMS
    cut = partial(proxied.metric, "llm_agent_proxy_failures_total", reason="worker_died")
    eventually(lambda: cut() == STREAMS, within_s=WITHIN_S, what="the count of cut requests")
    # The processes that made the rows end, and the workers of this run go on.
    eventually(lambda: len(proxied.agent.children()) == 3, within_s=WITHIN_S, what="their end")
    assert proxied.chat("after-them").status_code == 200


def deaths(proxied: Proxied) -> list[dict[str, Any]]:
    return proxied.agent.api.events(kind="PROXY_WORKER_DIED")


def test_fewer_workers_of_the_last_of_two_reloads_take_all_connections(tmp_path: Path) -> None:
    with two_workers(tmp_path, drain="0.1s") as own:
        before = own.agent.process("agent").pid
        for count in (2, 1):
            reload_with(own, count)
            # The second comes while the program starts anew.
            eventually(lambda: not runs(own, before), within_s=WITHIN_S, what="the agent's end")
        eventually(lambda: workers(own) == 1, within_s=WITHIN_S, what="one worker")
        listening = [
            each.status
            for each in own.agent.process("proxy worker 0").net_connections()
            if each.status == psutil.CONN_LISTEN
        ]
        # A listening socket that is closed resets the clients that wait in it.
        assert len(listening) == 2
        answers_again(own, before)
        assert own.chat("fewer-workers").status_code == 200
        stop_while_clients_keep_connections(own)


def reload_with(proxied: Proxied, count: int) -> None:
    file = proxied.folder / "agent.yml"
    settings = yaml.safe_load(file.read_text())
    settings["proxy"]["workers"] = count
    file.write_text(yaml.safe_dump(settings))
    proxied.agent.send_signal(signal.SIGHUP)


def runs(proxied: Proxied, pid: int) -> bool:
    return pid in [child.pid for child in proxied.agent.children()]


def stop_while_clients_keep_connections(proxied: Proxied) -> None:
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
    answers_again(proxied, kill(proxied, "agent"))
    assert proxied.chat("folder-removed").status_code == 200
    assert proxied.row("folder-removed")["status"] == "ok"


def test_a_sigterm_to_all_processes_lets_streams_end_stores_their_rows_and_refuses_new_requests(
    proxied: Proxied,
) -> None:
    streams = Streams(proxied, "stopped", tokens=200)
    streams.begin()
    supervisor = psutil.Process(proxied.agent.pid).parent()
    assert supervisor is not None
    os.killpg(os.getpgid(supervisor.pid), signal.SIGTERM)
    refused = eventually(lambda: refusal(proxied), within_s=WITHIN_S, what="a refusal")[0]
    assert refused.headers["Retry-After"]
    assert refused.json()["error"]["message"]
    # By each worker, also by one that has no stream.
    assert all(refusal(proxied) for _ in range(10))
    streams.end()
    assert (streams.cut, len(streams.complete)) == ([], STREAMS)
    eventually(lambda: not supervisor.is_running(), within_s=WITHIN_S, what="its end")
    proxied.agent.stop()
    assert "Traceback" not in proxied.agent.log()
    with closing(sqlite3.connect(proxied.folder / "goodput.db")) as database:
        query = "SELECT request_id, status FROM requests WHERE request_id LIKE 'stopped-%'"
        stored = database.execute(query).fetchall()
    assert sorted(stored) == sorted((request_id, "ok") for request_id in streams.complete)
    proxied.agent.start()


def refusal(proxied: Proxied) -> list[requests.Response]:
    # A `Response` with an error status is false in a condition.
    response = requests.get(f"{proxied.url}/v1/models", timeout=WITHIN_S)
    return [response] if response.status_code == 503 else []


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
    said = ("of a version that leaves nothing", "earlier worker: ended with status 0")
    agent.wait_until(lambda: all(each in log.read_text() for each in said), within_s=WITHIN_S)
    names = [each.name() for each in psutil.Process(agent.pid).children()]
    assert sorted(names) == ["agent", "proxy worker 0"]
    psutil.Process(agent.pid).terminate()
    assert agent.wait(within_s=WITHIN_S) == 0


def _no_trial() -> Trial:
    raise AssertionError("nothing is tried")
