"""How senders share memory and slots: those that stall give way, the others do not."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

import pytest

from agent.sources.otlp.limits import PROGRESS_BYTES, SMALL_BYTES
from agent.sources.otlp.room import BodyTooSlow, NoRoom, Place, ReadingSlots, Room

Result = TypeVar("Result")

KIB = 1024
MIB = 1024 * KIB
LONG_S = 30.0
PATIENCE_S = 5.0


class Clock:
    """Time as the test wants it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def room(clock: Clock) -> Room:
    """Room for 10 MiB, of which 2 are kept for small bodies."""
    return Room(10 * MIB, 2 * MIB, PATIENCE_S, clock)


def run(work: Awaitable[Result]) -> Result:
    """What a coroutine returns within the time of a test."""

    async def bounded() -> Result:
        return await asyncio.wait_for(work, LONG_S)

    return asyncio.run(bounded())


def test_memory_is_taken_until_there_is_no_more_and_given_back(room: Room) -> None:
    with room.place() as first:
        first.hold(5 * MIB)
        first.hold(3 * MIB)
        with room.place() as second, pytest.raises(NoRoom, match="8388608 bytes of spans"):
            second.hold(2 * MIB)
    with room.place() as third:
        third.hold(8 * MIB)


def test_large_bodies_leave_room_for_small_ones(room: Room) -> None:
    with ExitStack() as places:
        places.enter_context(room.place()).hold(8 * MIB)
        for _ in range(2):
            places.enter_context(room.place()).hold(SMALL_BYTES)
        with room.place() as late, pytest.raises(NoRoom):
            late.hold(1)


def test_the_agents_own_room_has_place_for_eight_usual_exports_beside_large_ones() -> None:
    room = Room()
    with ExitStack() as places:
        with suppress(NoRoom):
            while True:
                places.enter_context(room.place()).hold(8 * MIB)
        for _ in range(8):
            places.enter_context(room.place()).hold(SMALL_BYTES)


async def arrive(room: Room, size_bytes: int, until: asyncio.Event, began: list[Place]) -> None:
    """A body that stalls after so many bytes."""
    with room.place() as place:
        async with place.arriving(LONG_S):
            place.hold(size_bytes)
            began.append(place)
            await until.wait()


async def stalling(
    room: Room, sizes_bytes: list[int], meanwhile: Callable[[list[Place]], None]
) -> list[BaseException | None]:
    """What becomes of bodies that stall, and of what comes meanwhile."""
    until, began = asyncio.Event(), list[Place]()
    tasks = [asyncio.create_task(arrive(room, size, until, began)) for size in sizes_bytes]
    while len(began) < len(tasks):
        await asyncio.sleep(0)
    meanwhile(began)
    await asyncio.sleep(0)
    until.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_the_largest_body_that_stalls_gives_way(room: Room, clock: Clock) -> None:
    def meanwhile(_: list[Place]) -> None:
        with room.place() as newcomer, pytest.raises(NoRoom):
            newcomer.hold(3 * MIB)
        clock.now_s += PATIENCE_S + 1
        with room.place() as newcomer:
            newcomer.hold(3 * MIB)

    small, large = run(stalling(room, [3 * MIB, 5 * MIB], meanwhile))
    assert small is None
    assert isinstance(large, BodyTooSlow)
    with room.place() as place:
        place.hold(8 * MIB)


def test_a_body_that_grows_does_not_give_way(room: Room, clock: Clock) -> None:
    def meanwhile(began: list[Place]) -> None:
        clock.now_s += PATIENCE_S + 1
        began[0].hold(MIB)
        with room.place() as newcomer, pytest.raises(NoRoom):
            newcomer.hold(2 * MIB)

    assert run(stalling(room, [6 * MIB], meanwhile)) == [None]


@pytest.mark.parametrize("drip_bytes", [1, PROGRESS_BYTES - 1])
def test_a_body_that_drips_gives_way(room: Room, clock: Clock, drip_bytes: int) -> None:
    def meanwhile(began: list[Place]) -> None:
        clock.now_s += PATIENCE_S + 1
        began[0].hold(drip_bytes)
        with room.place() as newcomer:
            newcomer.hold(3 * MIB)

    (failure,) = run(stalling(room, [6 * MIB], meanwhile))
    assert isinstance(failure, BodyTooSlow)


def test_a_body_that_is_complete_does_not_give_way(room: Room, clock: Clock) -> None:
    async def complete() -> None:
        with room.place() as place:
            async with place.arriving(LONG_S):
                place.hold(8 * MIB)
            clock.now_s += PATIENCE_S + 1
            with room.place() as newcomer, pytest.raises(NoRoom):
                newcomer.hold(2 * MIB)

    run(complete())


def test_a_body_has_its_time_even_where_nobody_waits(room: Room) -> None:
    async def wait() -> None:
        with room.place() as place:
            async with place.arriving(0.01):
                await asyncio.Event().wait()

    with pytest.raises(BodyTooSlow):
        run(wait())


def test_bodies_that_arrive_have_but_a_moment_at_the_end() -> None:
    async def check() -> None:
        room = Room(patience_s=0.01)
        until, began = asyncio.Event(), list[Place]()
        before = asyncio.create_task(arrive(room, MIB, until, began))
        while not began:
            await asyncio.sleep(0)
        room.stop()
        after = asyncio.create_task(arrive(room, MIB, until, began))
        assert all(isinstance(e, BodyTooSlow) for e in await failures(before, after))

    run(check())


def test_a_body_whose_time_is_over_can_give_way_as_well(room: Room) -> None:
    async def check() -> None:
        until, began = asyncio.Event(), list[Place]()
        task = asyncio.create_task(arrive(room, MIB, until, began))
        while not began:
            await asyncio.sleep(0)
        assert began[0].deadline is not None
        began[0].deadline.reschedule(asyncio.get_running_loop().time())
        # The time is over, and the sender has not heard of it yet.
        await asyncio.sleep(0)
        assert began[0].deadline.expired()
        began[0].give_way()
        assert [type(failure) for failure in await failures(task)] == [BodyTooSlow]

    run(check())


async def failures(*tasks: "asyncio.Task[None]") -> list[BaseException | None]:
    """What each of them raised."""
    return [
        result if isinstance(result, BaseException) else None
        for result in await asyncio.gather(*tasks, return_exceptions=True)
    ]


# Slots


class Calls:
    """Calls over gRPC that take slots; each ends when the test says so."""

    def __init__(self, **limits: Any) -> None:
        self.slots = ReadingSlots(**limits)
        self.entered: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def begin(self, *names: str) -> None:
        """Begin calls, and let them come as far as they can."""
        for name in names:
            self.ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._call(name))
        await self.settle()

    async def settle(self) -> None:
        """Let all calls come as far as they can."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        """A message is complete."""
        self.ends[name].set()
        await self.settle()

    async def failure(self, name: str) -> BaseException | None:
        """Why a call failed, once it has ended."""
        await asyncio.wait([self.tasks[name]])
        return self.tasks[name].exception()

    async def _call(self, name: str) -> None:
        # Calls of one letter and several numbers are of one connection.
        async with self.slots.slot(name.rstrip("123"), LONG_S):
            self.entered.append(name)
            await self.ends[name].wait()


def test_a_slot_that_is_free_goes_to_the_newest_that_waits() -> None:
    async def check() -> None:
        calls = Calls(slots=2, patience_s=LONG_S)
        await calls.begin("a", "b", "c", "d")
        assert calls.entered == ["a", "b"]
        await calls.end("a")
        assert calls.entered == ["a", "b", "d"]
        await calls.end("b")
        assert calls.entered == ["a", "b", "d", "c"]
        await calls.end("c")
        await calls.end("d")
        assert [await calls.failure(name) for name in "abcd"] == [None] * 4
        await calls.begin("e", "f")
        assert calls.entered[-2:] == ["e", "f"]
        await calls.end("e")
        await calls.end("f")

    run(check())


def test_messages_that_stall_give_way_and_their_senders_wait_behind_others() -> None:
    async def check() -> None:
        calls = Calls(slots=2, patience_s=0.01)
        await calls.begin("a", "b", "new")
        assert isinstance(await calls.failure("a"), BodyTooSlow)
        await calls.settle()
        assert calls.entered == ["a", "b", "new"]
        await calls.begin("a2")
        await calls.end("b")
        # The last slot is kept for connections without a stalled message.
        assert calls.entered == ["a", "b", "new"]
        await calls.begin("c")
        assert calls.entered == ["a", "b", "new", "c"]
        await calls.end("c")
        await calls.end("new")
        assert calls.entered == ["a", "b", "new", "c", "a2"]
        await calls.end("a2")
        assert [await calls.failure(name) for name in ("b", "new", "c", "a2")] == [None] * 4

    run(check())


def test_a_sender_whose_message_is_complete_is_as_good_as_others() -> None:
    async def check() -> None:
        calls = Calls(slots=2, patience_s=0.01)
        await calls.begin("a", "b", "c")
        assert isinstance(await calls.failure("a"), BodyTooSlow)
        await calls.settle()
        await calls.end("b")
        await calls.end("c")
        await calls.begin("a1")
        await calls.end("a1")
        await calls.begin("d", "a2")
        assert calls.entered == ["a", "b", "c", "a1", "d", "a2"]
        await calls.end("d")
        await calls.end("a2")

    run(check())


def test_the_oldest_of_too_many_that_wait_gives_way() -> None:
    async def check() -> None:
        calls = Calls(slots=1, max_waiting=2, patience_s=LONG_S)
        await calls.begin("reads", "oldest", "waits", "newest")
        assert isinstance(await calls.failure("oldest"), BodyTooSlow)
        for name in ("reads", "newest", "waits"):
            await calls.end(name)
            assert await calls.failure(name) is None
        assert calls.entered == ["reads", "newest", "waits"]

    run(check())


def test_a_caller_that_leaves_gives_its_slot_or_its_turn_back() -> None:
    async def check() -> None:
        calls = Calls(slots=1, patience_s=LONG_S)
        await calls.begin("reads", "waits", "leaves")
        calls.tasks["leaves"].cancel()
        await calls.settle()
        calls.tasks["reads"].cancel()
        await calls.settle()
        assert calls.entered == ["reads", "waits"]
        await calls.end("waits")
        await calls.begin("next")
        assert calls.entered[-1] == "next"
        await calls.end("next")

    run(check())


def test_calls_have_but_a_moment_at_the_end() -> None:
    async def check() -> None:
        calls = Calls(slots=1, patience_s=0.01)
        await calls.begin("reads", "waits")
        calls.slots.stop()
        for name in ("reads", "waits"):
            assert isinstance(await calls.failure(name), BodyTooSlow)

    run(check())
