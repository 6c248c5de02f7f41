"""Files of open requests: of killed fronts, of live ones, and of anybody else."""

import os
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from goodput_agent_vllm.open_requests import (
    FILE_BYTES,
    FORMAT,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    RECORD_BYTES,
    SLOT_BYTES,
    SLOTS,
    OpenRequests,
)

from agent.catalog.metrics import UNKNOWN
from agent.catalog.reasons import PluginDropped
from agent.sources.open_requests import (
    FileRefused,
    LiveRequests,
    OpenRequest,
    OpenRequestsWatch,
    read_open_requests,
)
from agent.sources.plugin_sockets import PluginSocket, SenderLookup

ENGINE = "chat-0"
ARRIVED_AT = 1_790_000_000.0
PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"

# A front with a request that waits, one that streams and one that ended. It says so, and then
# waits for the end of its input.
FRONT = f"""
import os, sys
sys.path.insert(0, {str(PLUGIN)!r})
from goodput_agent_vllm.open_requests import OpenRequests
file = OpenRequests.beside(sys.argv[1])
waiting = file.open(b"waiting", {ARRIVED_AT}, 1.0)
streaming = file.open(b"streaming", {ARRIVED_AT} + 1, 2.0)
streaming.event(3.0)
streaming.event(4.5)
file.open(b"ended", {ARRIVED_AT} + 2, 3.0).close()
"""
WAITS = "print(flush=True)\nsys.stdin.read()\n"
ENDS_ITS_REQUESTS = "waiting.close()\nstreaming.close()\n"
# The child waits for the same input, and says when it runs.
FORKS = "if not os.fork():\n    " + WAITS.replace("\n", "\n    ").rstrip() + "\n    os._exit(0)\n"
OPEN = [
    OpenRequest(ARRIVED_AT, 1.0, None, b"waiting"),
    OpenRequest(ARRIVED_AT + 1, 2.0, 4.5, b"streaming"),
]


@contextmanager
def running(script: str, socket_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs a script until it waits for its input."""
    command = [sys.executable, "-c", script, str(socket_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(script.count("print")):
            assert process.stdout.readline() == b"\n"
        yield process


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


class Consumer:
    """Keeps what it gets; while `away` it takes nothing."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, Sequence[OpenRequest]]] = []
        self.away = False

    def on_front_ended(self, engine: str, requests: Sequence[OpenRequest]) -> None:
        if self.away:
            raise OSError("the database is away")
        self.requests.append((engine, requests))


class Counts:
    def __init__(self) -> None:
        self.dropped: Counter[PluginDropped] = Counter()

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        assert engine == (UNKNOWN if reason is PluginDropped.UNKNOWN_ENGINE else ENGINE)
        self.dropped[reason] += count


class Watched:
    """A folder with the socket of one engine, and what watches it at `now_s`."""

    def __init__(self, folder: Path) -> None:
        self.socket_path = folder / "vllm.sock"
        self.consumer, self.counts = Consumer(), Counts()
        self.now_s = 0.0
        self.socket = PluginSocket((self.socket_path,), ENGINE)
        self.socket.open()
        self.watch = self.watching(self.socket)

    def watching(self, socket: PluginSocket) -> OpenRequestsWatch:
        return OpenRequestsWatch(
            [socket], [self.consumer], self.counts, monotonic=lambda: self.now_s
        )

    def files(self) -> list[Path]:
        return sorted(self.socket_path.parent.glob("*.open"))

    def hostile(self, content: bytes) -> Path:
        path = Path(f"{self.socket_path}.{'0' * 16}.open")
        path.write_bytes(content)
        return path


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    yield made
    made.socket.close()


@pytest.fixture
def front(watched: Watched) -> Iterator[OpenRequests]:
    file = OpenRequests.beside(str(watched.socket_path))
    assert file is not None
    yield file
    file.close()


def test_the_requests_of_a_killed_front_are_handed_over_once(watched: Watched) -> None:
    with running(FRONT + WAITS, watched.socket_path) as process:
        assert watched.watch.check()[ENGINE].open == 2
        (path,) = watched.files()
        assert read_open_requests(path).requests == OPEN
        kill(process)
        found = read_open_requests(path)
        assert (found.owner_lives, found.requests, found.pid) == (False, OPEN, process.pid)
    assert watched.watch.check() == {}
    assert watched.consumer.requests == [(ENGINE, OPEN)]
    assert watched.files() == []
    watched.watch.check()
    assert len(watched.consumer.requests) == 1


def test_a_killed_front_is_dead_although_a_child_of_it_lives(watched: Watched) -> None:
    with running(FRONT + FORKS + WAITS, watched.socket_path) as process:
        kill(process)
        watched.watch.check()
        assert watched.consumer.requests == [(ENGINE, OPEN)]


def test_a_front_that_ends_its_requests_leaves_no_file(watched: Watched) -> None:
    with running(FRONT + ENDS_ITS_REQUESTS + WAITS, watched.socket_path) as process:
        assert watched.watch.check()[ENGINE] == LiveRequests(0, 0, None)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
    assert watched.files() == []
    assert watched.watch.check() == {}
    assert watched.consumer.requests == []


def test_requests_are_handed_over_again_until_they_are_taken(watched: Watched) -> None:
    with running(FRONT + WAITS, watched.socket_path) as process:
        kill(process)
    watched.consumer.away = True
    watched.watch.check()
    assert len(watched.files()) == 1
    watched.consumer.away = False
    watched.watch.check()
    assert watched.consumer.requests == [(ENGINE, OPEN)]
    assert watched.files() == []


def test_a_file_that_cannot_be_deleted_is_handed_over_once(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    with running(FRONT + WAITS, watched.socket_path) as process:
        kill(process)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuse)
        watched.watch.check()
        watched.watch.check()
    assert watched.consumer.requests == [(ENGINE, OPEN)]


def test_a_stream_without_an_event_for_a_while_is_stalled(
    watched: Watched, front: OpenRequests
) -> None:
    slots = [front.open(b"row", ARRIVED_AT, 1.0) for _ in range(3)]
    for slot, last_s in zip(slots, (5.0, 8.0, None), strict=True):
        assert slot is not None
        if last_s is not None:
            slot.event(last_s)
    watched.now_s = 14.9
    assert watched.watch.check() == {ENGINE: LiveRequests(3, 0, None)}
    watched.now_s = 16.0
    assert watched.watch.check() == {ENGINE: LiveRequests(3, 1, 11.0)}
    watched.now_s = 18.5
    assert watched.watch.check() == {ENGINE: LiveRequests(3, 2, 13.5)}
    assert watched.watch.live(ENGINE) == LiveRequests(3, 2, 13.5)
    for slot in slots:
        assert slot is not None
        slot.close()


def test_the_times_of_a_front_are_of_the_clock_that_the_watch_reads(
    watched: Watched, front: OpenRequests
) -> None:
    """Whatever reads CLOCK_MONOTONIC, in whatever process: an event of now is no stall."""
    slot = front.open(b"row", time.time(), time.monotonic())
    assert slot is not None
    slot.event(time.monotonic())
    usual = OpenRequestsWatch([watched.socket], (), watched.counts)
    assert usual.check() == {ENGINE: LiveRequests(1, 0, None)}
    slot.close()


def test_all_fronts_of_an_engine_are_added_up(watched: Watched, front: OpenRequests) -> None:
    slot = front.open(b"row", ARRIVED_AT, 1.0)
    assert slot is not None
    with running(FRONT + WAITS, watched.socket_path) as process:
        assert watched.watch.check()[ENGINE].open == 3
        kill(process)
    assert watched.watch.check()[ENGINE].open == 1
    assert watched.consumer.requests == [(ENGINE, OPEN)]
    slot.close()


def test_an_engine_without_a_file_has_no_figures(watched: Watched) -> None:
    assert watched.watch.check() == {}
    assert watched.watch.live(ENGINE) is None


def test_files_beside_the_socket_of_another_agent_are_left_to_it(watched: Watched) -> None:
    with running(FRONT + WAITS, watched.socket_path) as process:
        kill(process)
    watched.socket.close()
    assert watched.watch.check() == {}
    assert watched.consumer.requests == []
    assert len(watched.files()) == 1


def header(
    *,
    magic: bytes = MAGIC,
    version: int = FORMAT,
    slots: int = SLOTS,
    record_bytes: int = RECORD_BYTES,
) -> bytes:
    packed = HEADER.pack(magic, version, 0, slots, record_bytes, 7, ARRIVED_AT)
    return packed.ljust(HEADER_BYTES, b"\0")


REFUSED = {
    "foreign": (b"#!/bin/sh\n" * 1000, PluginDropped.NOT_OURS),
    "one byte": (b"G", PluginDropped.NOT_OURS),
    "other format": (
        header(version=FORMAT + 1).ljust(FILE_BYTES, b"\0"),
        PluginDropped.OTHER_FORMAT,
    ),
    "earlier format": (header(version=1).ljust(FILE_BYTES, b"\0"), PluginDropped.OTHER_FORMAT),
    "truncated": (header().ljust(FILE_BYTES - 1, b"\0"), PluginDropped.MALFORMED),
    "header alone": (header(), PluginDropped.MALFORMED),
    "too long": (header().ljust(FILE_BYTES + 1, b"\0"), PluginDropped.MALFORMED),
    "no slots": (header(slots=0), PluginDropped.MALFORMED),
    "slots without end": (header(slots=2**32 - 1, record_bytes=2**32 - 1), PluginDropped.MALFORMED),
}


@pytest.mark.parametrize(("content", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_file_of_something_else_is_refused_counted_once_and_left(
    watched: Watched, content: bytes, reason: PluginDropped
) -> None:
    path = watched.hostile(content)
    assert watched.watch.check() == watched.watch.check() == {}
    assert watched.counts.dropped == {reason: 1}
    assert path.exists()
    assert watched.consumer.requests == []


def test_a_huge_file_is_not_read(watched: Watched) -> None:
    slots, record_bytes = 16_384, 65_536
    path = watched.hostile(header(slots=slots, record_bytes=record_bytes))
    os.truncate(path, HEADER_BYTES + slots * (SLOT_BYTES + record_bytes))
    with pytest.raises(FileRefused, match="need"):
        read_open_requests(path)


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_only_a_regular_file_is_opened(watched: Watched, tmp_path: Path, kind: str) -> None:
    path = Path(f"{watched.socket_path}.{'0' * 16}.open")
    target = tmp_path / "target"
    target.write_bytes(header().ljust(FILE_BYTES, b"\0"))
    make = {"fifo": os.mkfifo, "link": lambda path: path.symlink_to(target), "folder": os.mkdir}
    make[kind](path)
    assert watched.watch.check() == {}
    assert watched.counts.dropped == {PluginDropped.NOT_OURS: 1}
    assert target.exists()


def test_a_file_that_is_being_made_is_neither_refused_nor_dead(watched: Watched) -> None:
    path = watched.hostile(b"")
    watched.watch.check()
    path.write_bytes(bytes(FILE_BYTES))
    watched.watch.check()
    assert watched.counts.dropped == {}
    assert path.exists()


def slot(length: int, arrived_at: float, arrived_s: float, last_s: float) -> bytes:
    packed = struct.pack("@B7xQddd", 1, length, arrived_at, arrived_s, last_s)
    return packed.ljust(SLOT_BYTES, b"\0")


NAN, INFINITY = float("nan"), float("inf")
MALFORMED = [
    slot(RECORD_BYTES + 1, 1.0, 1.0, 0.0),
    slot(2**64 - 1, 1.0, 1.0, 0.0),
    slot(1, NAN, 1.0, 0.0),
    slot(1, 1.0, INFINITY, 0.0),
    slot(1, 1.0, 5.0, 4.0),
    slot(1, 1.0, 5.0, NAN),
    slot(1, 1.0, 5.0, INFINITY),
]


def test_a_slot_that_cannot_be_true_is_counted_and_the_others_are_read(watched: Watched) -> None:
    slots = b"".join([*MALFORMED, slot(3, 1.0, 5.0, 7.0)])
    content = bytearray((header() + slots).ljust(FILE_BYTES, b"\0"))
    record_at = HEADER_BYTES + SLOTS * SLOT_BYTES + len(MALFORMED) * RECORD_BYTES
    content[record_at : record_at + 3] = b"row"
    watched.hostile(bytes(content))
    watched.watch.check()
    only = OpenRequest(1.0, 5.0, 7.0, b"row")
    assert watched.consumer.requests == [(ENGINE, [only])]
    assert watched.counts.dropped == {PluginDropped.MALFORMED: len(MALFORMED)}


def test_a_file_that_may_not_be_read_is_counted(
    watched: Watched, front: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        assert watched.watch.check() == {}
    assert watched.counts.dropped == {PluginDropped.UNREADABLE: 1}
    assert watched.watch.check()[ENGINE].open == 0


def test_a_file_that_its_live_front_has_just_made_again_is_not_dead(
    watched: Watched, front: OpenRequests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front unlocks the deleted file, which the reader has open, and makes the next one."""

    def made_again(descriptor: int, operation: int) -> None:
        Path(front.path).unlink(missing_ok=True)

    monkeypatch.setattr("agent.sources.open_requests.fcntl.flock", made_again)
    watched.watch.check()
    assert watched.consumer.requests == []


@pytest.mark.parametrize("name", ["vllm.sock2", "chat.sock"])
def test_files_of_other_sockets_are_left_alone(
    watched: Watched, front: OpenRequests, name: str
) -> None:
    named_alike = watched.socket_path.with_name("vllm.sock.notes.open")
    named_alike.write_bytes(b"mine")
    with closing(PluginSocket((watched.socket_path.with_name(name),), ENGINE)) as other:
        other.open()
        assert watched.watching(other).check() == {}
    assert watched.watch.check()[ENGINE].open == 0
    assert watched.counts.dropped == {}
    assert named_alike.exists()


class Lookup(SenderLookup):
    """Knows the engines of the processes that it is told of."""

    def __init__(self) -> None:
        super().__init__({})
        self.engines: dict[int, str] = {}

    def engine_of(self, pid: int) -> str | None:
        return self.engines.get(pid)


@pytest.fixture
def shared(watched: Watched) -> Lookup:
    """The engines of processes whose files are beside the shared socket."""
    lookup = Lookup()
    watched.socket.close()
    watched.socket = PluginSocket((watched.socket_path,), senders=lookup)
    watched.socket.open()
    watched.watch = watched.watching(watched.socket)
    return lookup


def test_a_file_beside_the_shared_socket_is_of_its_fronts_engine_also_after_its_end(
    watched: Watched, shared: Lookup
) -> None:
    with running(FRONT + WAITS, watched.socket_path) as process:
        shared.engines[process.pid] = "chat-1"
        assert watched.watch.check() == {"chat-1": LiveRequests(2, 0, None)}
        kill(process)
    # Another process may have this PID now.
    shared.engines[process.pid] = "chat-2"
    assert watched.watch.check() == {}
    assert watched.consumer.requests == [("chat-1", OPEN)]
    assert watched.files() == []


def test_a_file_of_an_unknown_front_is_of_no_engine_and_goes_when_its_front_ends(
    watched: Watched, shared: Lookup
) -> None:
    with running(FRONT + WAITS, watched.socket_path) as process:
        assert watched.watch.check() == {}
        assert len(watched.files()) == 1
        kill(process)
    watched.watch.check()
    assert watched.consumer.requests == []
    assert watched.files() == []
    assert watched.counts.dropped == {PluginDropped.UNKNOWN_ENGINE: 2}
