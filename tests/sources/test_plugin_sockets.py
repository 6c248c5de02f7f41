"""Where the agent listens for plugins, and whose records come there."""

import array
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from goodput_agent_vllm.sending import default_places as places_of_plugin

from agent.sources import plugin_sockets
from agent.sources.plugin_sockets import (
    PluginSocket,
    SenderLookup,
    SocketUnusable,
    default_places,
)
from tests.sources.host.machine import PaperMachine

ENGINES = {8000: "chat-0", 8001: "chat-1"}
FRONT, SHELL, SERVER = 40, 30, 50
SOCKETS = {700: 8000, 701: 8001, 702: 22}


class Machine:
    """Processes on paper, and the lookup of their engines at `now_s`."""

    def __init__(self, folder: Path) -> None:
        self.paper = PaperMachine(folder)
        self.paper.listens(SOCKETS)
        self.now_s = 0.0
        self.lookup = SenderLookup(ENGINES, self.paper.proc, lambda: self.now_s)

    def engine_of(self, pid: int) -> str | None:
        return self.lookup.engine_of(pid)

    def has_children(self, pid: int, *children: int) -> None:
        thread = self.paper.proc / f"{pid}/task/{pid}"
        thread.mkdir(parents=True)
        (thread / "children").write_text("".join(f"{child} " for child in children))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_sender_is_of_the_engine_at_whose_port_it_listens(machine: Machine) -> None:
    machine.paper.runs(FRONT, sockets=(699, 701))
    machine.paper.runs(SERVER, sockets=(700,))
    assert (machine.engine_of(FRONT), machine.engine_of(SERVER)) == ("chat-1", "chat-0")


def test_a_sender_may_be_the_parent_or_the_child_of_what_listens(machine: Machine) -> None:
    machine.paper.runs(SHELL)
    machine.paper.runs(FRONT, parent=SHELL, sockets=(700,))
    machine.paper.runs(SERVER, parent=FRONT)
    machine.has_children(SHELL, FRONT)
    assert (machine.engine_of(SHELL), machine.engine_of(SERVER)) == ("chat-0", "chat-0")


def test_a_sender_that_listens_elsewhere_is_unknown(machine: Machine) -> None:
    machine.paper.runs(FRONT, sockets=(702,))
    assert machine.engine_of(FRONT) is machine.engine_of(SERVER) is None
    assert machine.lookup.why_unknown(FRONT) == "it does not listen on port 8000, 8001"
    assert machine.lookup.why_unknown(FRONT) is None
    assert machine.lookup.why_unknown(0) == "it has ended, or is in another PID namespace"


def test_the_processes_of_another_user_are_unknown(machine: Machine) -> None:
    machine.paper.runs(FRONT)
    (machine.paper.proc / str(FRONT) / "fd").rmdir()
    assert machine.engine_of(FRONT) is None
    assert machine.lookup.why_unknown(FRONT) == "it is of another user, so its ports are not known"


def test_a_sender_is_looked_at_again_until_it_listens(machine: Machine) -> None:
    machine.paper.runs(FRONT)
    assert machine.engine_of(FRONT) is None
    (machine.paper.proc / str(FRONT) / "fd/9").symlink_to("socket:[700]")
    assert machine.engine_of(FRONT) is None
    machine.now_s += 0.1
    assert machine.engine_of(FRONT) == "chat-0"


def test_the_engine_of_a_process_outlives_it_until_another_has_its_pid(machine: Machine) -> None:
    machine.paper.runs(FRONT, sockets=(700,))
    assert machine.engine_of(FRONT) == "chat-0"
    # It no longer listens, as at the end of vLLM.
    machine.paper.listens({})
    assert machine.engine_of(FRONT) == "chat-0"
    machine.paper.ends(FRONT)
    assert machine.engine_of(FRONT) == "chat-0"
    machine.paper.runs(FRONT, started_s=11.0)
    assert machine.engine_of(FRONT) is None


def test_no_machine_has_so_many_senders(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_sockets, "_MAX_SENDERS", 3)
    for pid in range(FRONT, FRONT + 5):
        machine.paper.runs(pid, sockets=(700,))
        assert machine.engine_of(pid) == "chat-0"
        machine.paper.ends(pid)
    known = [pid for pid in range(FRONT, FRONT + 5) if machine.engine_of(pid)]
    assert known == [FRONT + 2, FRONT + 3, FRONT + 4]


# Places


def test_plugin_and_agent_look_in_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/of-this-session")
    uid = os.geteuid()
    assert [*map(str, default_places())] == [
        "/run/goodput-agent/vllm.sock",
        "/run/user/of-this-session/goodput-agent/vllm.sock",
        f"/tmp/goodput-agent-{uid}/vllm.sock",
    ]
    assert [*map(str, default_places())] == [*places_of_plugin()]
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(default_places()[1]) == f"/run/user/{uid}/goodput-agent/vllm.sock"
    assert [*map(str, default_places())] == [*places_of_plugin()]


@pytest.fixture
def places(tmp_path: Path) -> Sequence[Path]:
    """Three places, of which the first is in a folder that cannot be made."""
    (tmp_path / "first").write_text("not a folder")
    return [tmp_path / name / "vllm.sock" for name in ("first", "second", "third")]


@contextmanager
def shared(places: Sequence[Path]) -> Iterator[PluginSocket]:
    with closing(PluginSocket(places, senders=SenderLookup({}))) as opened:
        opened.open()
        yield opened


def test_the_shared_socket_is_in_the_first_place_that_can_be_made(places: Sequence[Path]) -> None:
    with shared(places) as opened:
        assert opened.path == places[1]
        assert opened.path.parent.stat().st_mode & 0o777 == 0o700
    assert [path.exists() for path in places] == [False, False, False]


def test_a_socket_that_its_agent_left_is_replaced(places: Sequence[Path]) -> None:
    places[1].parent.mkdir(0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as left:
        left.bind(str(places[1]))
    with shared(places) as opened:
        assert opened.path == places[1]


def test_a_place_that_an_agent_has_is_neither_taken_nor_passed_over(places: Sequence[Path]) -> None:
    with shared(places) as first, closing(PluginSocket(places)) as second:
        with pytest.raises(SocketUnusable, match=f"{places[1]} is the socket of another program$"):
            second.open()
        assert (first.path, second.path) == (places[1], None)
        second.close()
        assert first.path == places[1]
        assert not places[2].exists()


def test_of_two_agents_that_begin_at_once_one_listens(
    places: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one finds the place locked, and does not remove what the first has just made."""
    problems: list[str] = []

    def begins_too(path: Path) -> None:
        with pytest.raises(SocketUnusable) as refused:
            PluginSocket(places).open()
        problems.append(str(refused.value))

    monkeypatch.setattr(plugin_sockets, "_require_free", begins_too)
    with shared(places):
        assert problems[0].endswith(f"another agent begins to listen in {places[1].parent}")


@pytest.mark.parametrize("kind", ["link", "writable by others", "of another user"])
def test_a_folder_that_others_could_have_made_is_not_used(
    places: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = places[1].parent
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.mkdir(0o700)
    if kind == "writable by others":
        folder.chmod(0o770)
    if kind == "of another user":
        uid = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(SocketUnusable, match=f"{folder} is not a|listen at {places[1]}: Not a"):
        PluginSocket(places[:2]).open()
    assert not (tmp_path / "elsewhere" / "vllm.sock").exists()
    assert not places[1].exists()


def test_the_socket_of_another_user_is_passed_over(
    places: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugins of this user may not send there either."""

    class OfAnotherUser(socket.socket):
        def connect(self, address: Any) -> None:
            raise PermissionError(13, "Permission denied")

    with shared(places):
        monkeypatch.setattr("agent.sources.plugin_sockets.socket.socket", OfAnotherUser)
        with shared(places) as opened:
            assert opened.path == places[2]


# Senders


def test_a_datagram_comes_with_the_process_that_sent_it(places: Sequence[Path]) -> None:
    with shared(places) as opened:
        child = os.fork()
        if not child:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.sendto(b"of the child", str(opened.path))
            os._exit(0)
        os.waitpid(child, 0)
        assert opened.receive() == (b"of the child", child)
        assert opened.receive() is None


def test_descriptors_that_come_with_a_datagram_are_closed(places: Sequence[Path]) -> None:
    with shared(places) as opened, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 16))
        before = os.listdir("/proc/self/fd")
        sender.sendmsg([b"open"], [rights], 0, str(opened.path))
        assert opened.receive() == (b"open", os.getpid())
        assert os.listdir("/proc/self/fd") == before


def test_the_socket_of_an_engine_has_the_records_of_unknown_senders(tmp_path: Path) -> None:
    """As of an engine in a container, with the socket in a place where all plugins look."""
    machine = Machine(tmp_path)
    machine.paper.runs(FRONT, sockets=(701,))
    own = PluginSocket((tmp_path / "vllm.sock",), "chat-0", machine.lookup)
    assert (own.engine_of(FRONT), own.engine_of(0)) == ("chat-1", "chat-0")
    assert PluginSocket((tmp_path / "vllm.sock",), "chat-0").engine_of(FRONT) == "chat-0"
