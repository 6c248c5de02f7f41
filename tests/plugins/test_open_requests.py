"""The file of open requests: what the agent reads of it, and that the engine never notices."""

import asyncio
import os
import resource
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from goodput_agent_vllm import watched_request
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Message, Receive, Scope, Send
from goodput_agent_vllm.open_requests import FILE_BYTES, RECORD_BYTES, SLOTS, OpenRequests, Slot
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.open_requests import OpenRequest, OpenRequestsFile, read_open_requests
from tests.plugins.asgi_calls import WITHIN_S, Agent, Call, Engine, event, play, whole_body

ARRIVED_AT = 1_790_000_000.0
# Beyond every check of the file, which comes each 10 s.
STEP_S = 1000.0
POLL_S = 0.01


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "vllm.sock"


def made(socket_path: Path) -> OpenRequests:
    opened = OpenRequests.beside(str(socket_path))
    assert opened is not None
    return opened


@pytest.fixture
def opened(socket_path: Path) -> Iterator[OpenRequests]:
    file = made(socket_path)
    yield file
    file.close()


def begin(file: OpenRequests, record: bytes = b"row", arrived_s: float = 1.0) -> Slot:
    slot = file.open(record, ARRIVED_AT, arrived_s)
    assert slot is not None
    return slot


def read(file: OpenRequests) -> OpenRequestsFile:
    found = read_open_requests(Path(file.path))
    assert found.malformed == 0
    return found


def files(socket_path: Path) -> list[str]:
    return sorted(path.name for path in socket_path.parent.glob("*.open"))


# An operation opens a request with a record, or names an earlier one for an event or its end.
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.binary(max_size=RECORD_BYTES)),
        st.tuples(st.sampled_from(["event", "close"]), st.integers(0, 20)),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_a_reader_sees_what_is_open_after_any_operations(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, bytes | int]]
) -> None:
    file = made(tmp_path_factory.mktemp("run") / "vllm.sock")
    slots: list[Slot] = []
    expected: dict[int, OpenRequest] = {}
    for number, (operation, value) in enumerate(operations):
        now_s = number * STEP_S
        if isinstance(value, bytes):
            expected[len(slots)] = OpenRequest(ARRIVED_AT, now_s, None, value)
            slots.append(begin(file, value, now_s))
        elif value >= len(slots):
            continue
        elif operation == "close":
            slots[value].close()
            expected.pop(value, None)
        else:
            slots[value].event(now_s)
            if at := expected.get(value):
                expected[value] = replace(at, last_s=now_s)
    found = read(file)
    assert found.owner_lives
    assert found.pid == os.getpid()
    assert sorted(found.requests, key=lambda each: each.arrived_s) == list(expected.values())
    for slot in slots:
        slot.close()
    file.close()


def test_requests_beyond_the_slots_are_counted_and_get_one_when_another_ends(
    opened: OpenRequests,
) -> None:
    slots = [begin(opened) for _ in range(SLOTS)]
    assert opened.open(b"one too many", ARRIVED_AT, 1.0) is None
    assert opened.too_many == 1
    assert len(read(opened).requests) == SLOTS
    slots.pop().close()
    slots.append(begin(opened, b"the next"))
    assert sum(each.record == b"the next" for each in read(opened).requests) == 1
    for slot in slots:
        slot.close()


def test_a_record_that_is_too_long_is_counted_and_takes_no_slot(opened: OpenRequests) -> None:
    assert opened.open(b"x" * (RECORD_BYTES + 1), ARRIVED_AT, 1.0) is None
    assert (opened.too_long, opened.too_many) == (1, 0)
    assert read(opened).requests == []


def test_an_ended_request_does_not_change_the_next_one_in_its_slot(opened: OpenRequests) -> None:
    first = begin(opened, b"a longer record than the next")
    first.event(2.0)
    first.close()
    second = begin(opened, b"next", 3.0)
    first.event(4.0)
    first.close()
    (only,) = read(opened).requests
    assert only == OpenRequest(ARRIVED_AT, 3.0, None, b"next")
    second.close()


def test_a_clean_end_leaves_no_file_unless_requests_are_open(socket_path: Path) -> None:
    idle, busy = made(socket_path), made(socket_path)
    slot = begin(busy)
    idle.close()
    busy.close()
    assert files(socket_path) == [Path(busy.path).name]
    found = read(busy)
    assert not found.owner_lives
    assert [each.record for each in found.requests] == [b"row"]
    # What comes after the end is harmless.
    slot.event(5.0)
    slot.close()
    busy.close()
    assert busy.open(b"late", ARRIVED_AT, 6.0) is None


def test_the_file_is_whole_on_disk_so_that_no_write_needs_room(opened: OpenRequests) -> None:
    found = os.stat(opened.path)
    assert found.st_size == FILE_BYTES
    assert found.st_blocks * 512 >= FILE_BYTES


def test_only_its_user_may_write_the_file_and_its_group_may_read_it(opened: OpenRequests) -> None:
    assert stat.S_IMODE(os.stat(opened.path).st_mode) == 0o640


def test_a_folder_that_comes_later_is_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 1.0
    monkeypatch.setattr("goodput_agent_vllm.open_requests.time.monotonic", lambda: now_s)
    path = tmp_path / "later" / "vllm.sock"
    assert OpenRequests.beside(str(path)) is None
    path.parent.mkdir()
    now_s = 10.9
    assert OpenRequests.beside(str(path)) is None
    now_s = 11.1
    made(path).close()
    assert caplog.messages == []


def test_a_file_system_without_room_has_no_file_and_a_warning(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 1, before[1]))
    try:
        assert OpenRequests.beside(str(socket_path)) is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(socket_path) == []
    assert caplog.messages == ["open requests are not kept: [Errno 27] File too large"]


def test_a_deleted_file_is_made_again_with_all_that_is_open(
    socket_path: Path, opened: OpenRequests
) -> None:
    slot = begin(opened, b"first", arrived_s=1.0)
    slot.event(2.0)
    Path(opened.path).unlink()
    second = begin(opened, b"second", arrived_s=1.0 + STEP_S)
    slot.event(3.0 + STEP_S)
    found = read(opened)
    assert found.owner_lives
    last_s = {each.record: each.last_s for each in found.requests}
    assert last_s == {b"first": 3.0 + STEP_S, b"second": None}
    slot.close()
    second.close()
    opened.close()
    assert files(socket_path) == []


def test_a_deleted_folder_hinders_no_request(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    file = made(tmp_path / "run" / "vllm.sock")
    Path(file.path).unlink()
    (tmp_path / "run").rmdir()
    slot = begin(file, arrived_s=STEP_S)
    slot.event(STEP_S)
    slot.close()
    file.close()


# Of a front

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
FIRST: Message = {"type": "http.response.body", "body": event("a"), "more_body": True}


def test_an_open_request_is_in_the_file_until_its_end(tmp_path: Path) -> None:
    async def opened(agent: Agent, engine: Engine, app: App) -> None:
        seen: list[Any] = []

        async def looking(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            await send(START)
            await send(FIRST)
            await send(FIRST)
            await asyncio.sleep(0)
            seen.append(requests())
            await send({"type": "http.response.body", "body": event("b", "stop")})

        def requests() -> Any:
            (path,) = tmp_path.glob("*.open")
            return read_open_requests(path).requests

        await Call().through(GoodputMiddleware(looking))
        ((request,),) = seen
        assert request.last_s is not None
        assert requests() == []

    play(tmp_path, opened)


def test_a_request_that_waits_long_is_in_the_file_before_its_first_piece(tmp_path: Path) -> None:
    async def opened(agent: Agent, engine: Engine, app: App) -> None:
        def requests() -> Sequence[OpenRequest]:
            return [
                each
                for path in tmp_path.glob("*.open")
                for each in read_open_requests(path).requests
            ]

        async def slow(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            async with asyncio.timeout(WITHIN_S):
                while not requests():
                    await asyncio.sleep(POLL_S)
            (before,) = requests()
            assert before.last_s is None
            await send(START)
            await send(FIRST)
            (after,) = requests()
            assert after.last_s is not None
            await send({"type": "http.response.body", "body": event("b", "stop")})

        await Call().through(GoodputMiddleware(slow))

    play(tmp_path, opened)


def test_the_file_has_the_time_of_each_piece_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = count(1000.0)
    monkeypatch.setattr(watched_request, "monotonic", lambda: float(next(clock_s)))
    seen: list[Any] = []

    async def opened(agent: Agent, engine: Engine, app: App) -> None:
        async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            await send(START)
            await send(FIRST)
            for _ in range(128):
                await send(FIRST)
                await asyncio.sleep(0)
                (path,) = tmp_path.glob("*.open")
                (request,) = read_open_requests(path).requests
                seen.append(request.last_s)
            await send({"type": "http.response.body", "body": event("b", "stop")})

        await Call().through(GoodputMiddleware(streaming))

    play(tmp_path, opened)
    assert seen == sorted({*seen})
    assert len(seen) == 128
