"""How the plugin finds the agent's socket without a setting."""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from goodput_agent_vllm import sending
from goodput_agent_vllm.datagrams import hello_record
from goodput_agent_vllm.sending import PATH_VARIABLE, Sender


@contextmanager
def agent_at(path: Path) -> Iterator[socket.socket]:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as opened:
        opened.bind(str(path))
        opened.setblocking(False)
        yield opened


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sequence[Path]:
    """The places of this machine, of which none is there yet."""
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    found = [tmp_path / name / "vllm.sock" for name in ("run", "user", "tmp")]
    monkeypatch.setattr(sending, "default_places", lambda: tuple(map(str, found)))
    return found


@pytest.fixture(params=["", "auto"])
def sender(
    places: Sequence[Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sender]:
    monkeypatch.setenv(PATH_VARIABLE, request.param)
    with closing(Sender(pause_s=0.0)) as opened:
        yield opened


def sends(sender: Sender) -> float | None:
    """Add a record and send it now; the seconds until the next attempt."""
    sender.add(hello_record())
    return sender.flush()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_agent_is_found_in_each_place(
    sender: Sender, places: Sequence[Path], place: int
) -> None:
    with agent_at(places[place]) as agent:
        assert sends(sender) is None
        assert agent.recv(65_536)
    assert sender.path == str(places[place])


def test_it_is_looked_for_each_second_until_it_is_there(
    sender: Sender, places: Sequence[Path]
) -> None:
    assert sends(sender) == 1.0
    assert sender.path is None
    # The next attempt is not made before its time.
    with agent_at(places[1]) as agent:
        sender.add(hello_record())
        assert 0 < (sender.send() or 0) <= 1.0
        assert sender.flush() is None
        assert agent.recv(65_536)


def test_the_agent_that_took_a_datagram_keeps_the_plugin(
    sender: Sender, places: Sequence[Path]
) -> None:
    with agent_at(places[1]) as agent:
        sends(sender)
        with agent_at(places[0]) as other:
            sends(sender)
            with pytest.raises(BlockingIOError):
                other.recv(65_536)
        assert len([agent.recv(65_536) for _ in range(2)]) == 2
    with agent_at(places[0]) as following:
        sends(sender)
        assert following.recv(65_536)


def test_an_agent_that_is_behind_keeps_the_plugin(sender: Sender, places: Sequence[Path]) -> None:
    with agent_at(places[0]) as agent:
        while not sends(sender):
            pass
        with agent_at(places[1]) as other:
            assert sends(sender)
            with pytest.raises(BlockingIOError):
                other.recv(65_536)
        assert agent.recv(65_536)


@pytest.mark.parametrize("kind", ["link", "writable by others", "of another user"])
def test_nothing_is_sent_to_what_another_user_could_have_made(
    sender: Sender,
    places: Sequence[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    folder = places[2].parent
    with agent_at(places[2]) as agent:
        if kind == "link":
            folder.rename(tmp_path / "elsewhere")
            folder.symlink_to(tmp_path / "elsewhere")
        if kind == "writable by others":
            folder.chmod(0o777)
        with monkeypatch.context() as patched:
            if kind == "of another user":
                uid = os.geteuid()
                patched.setattr(os, "geteuid", lambda: uid + 1)
            assert sends(sender) == 1.0
        with pytest.raises(BlockingIOError):
            agent.recv(65_536)


def test_the_path_of_the_environment_is_the_only_one(
    places: Sequence[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tmp_path / "given" / "vllm.sock"
    monkeypatch.setenv(PATH_VARIABLE, str(given))
    with agent_at(places[0]) as agent, closing(Sender(pause_s=0.0)) as sender:
        # Before the agent is there: open requests are kept beside it.
        assert sender.path == str(given)
        assert sends(sender) == 1.0
        with pytest.raises(BlockingIOError):
            agent.recv(65_536)
        # No other user's folder: who gave the path knows whose it is.
        given.parent.mkdir(0o777)
        with agent_at(given) as right:
            sends(sender)
            assert right.recv(65_536)


def test_a_plugin_that_may_not_look_for_an_agent_sends_nothing(
    places: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "none")
    with agent_at(places[0]) as agent, closing(Sender(pause_s=0.0)) as sender:
        assert sends(sender) == 1.0
        assert sender.path is None
        with pytest.raises(BlockingIOError):
            agent.recv(65_536)
