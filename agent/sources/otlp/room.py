"""Shares memory and gRPC's slots among senders: one that stalls gives way to the others."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from agent.sources.otlp.limits import (
    KEPT_FOR_SMALL_BYTES,
    MAX_BYTES_HELD,
    MAX_GRPC_READING,
    MAX_GRPC_WAITING,
    MAX_STALLED_KNOWN,
    PATIENCE_S,
    PROGRESS_BYTES,
    SMALL_BYTES,
)

# What happened while the event loop was busy is seen within this time.
_SEEN_WITHIN_S = 0.05


class NoRoom(Exception):
    """Other senders take all there is; the same export may be sent again."""


class BodyTooSlow(Exception):
    """A sender took too long to send its body."""

    def __init__(self) -> None:
        super().__init__("the body took too long to arrive; send smaller batches")


@dataclass(slots=True, eq=False)
class Place:
    """The memory that one sender holds. `deadline` ends the reading of a body that arrives."""

    room: "Room"
    held_bytes: int = 0
    deadline: asyncio.Timeout | None = None
    grown_bytes: int = 0
    grown_at: float = 0.0

    def hold(self, size_bytes: int) -> None:
        """Take more memory. Raises NoRoom."""
        self.room.hold(self, size_bytes)

    def give_way(self) -> None:
        """End the reading of this body, and give its memory back."""
        if self.deadline is not None:
            _end(self.deadline)
            self.deadline = None
        self.room.release(self)

    @asynccontextmanager
    async def arriving(self, within_s: float) -> AsyncIterator[None]:
        """The time in which the body arrives. Raises BodyTooSlow after it."""
        try:
            async with asyncio.timeout(self.room.within_s(within_s)) as self.deadline:
                self.grown_at = self.room.now()
                try:
                    yield
                finally:
                    self.deadline = None
        except TimeoutError as error:
            raise BodyTooSlow from error


class Room:
    """The memory for the bodies of all senders."""

    def __init__(
        self,
        capacity_bytes: int = MAX_BYTES_HELD,
        kept_bytes: int = KEPT_FOR_SMALL_BYTES,
        patience_s: float = PATIENCE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._for_large_bytes = capacity_bytes - kept_bytes
        self._patience_s = patience_s
        self.now = now
        self._held_bytes = 0
        self._stopping = False
        self._places: set[Place] = set()

    @property
    def fill(self) -> float:
        """The share of the memory that is held."""
        return self._held_bytes / self._capacity_bytes

    @contextmanager
    def place(self) -> Iterator[Place]:
        """The place of one sender, free again at the end."""
        place = Place(self)
        self._places.add(place)
        try:
            yield place
        finally:
            self._places.discard(place)
            self.release(place)

    def stop(self) -> None:
        """Give bodies that arrive no more than a moment from now on."""
        self._stopping = True
        for place in self._places:
            if place.deadline is not None:
                _end(place.deadline, self._patience_s)

    def within_s(self, within_s: float) -> float:
        """The time for a body to arrive."""
        return min(within_s, self._patience_s) if self._stopping else within_s

    def release(self, place: Place) -> None:
        """Take all memory back from a place."""
        self._held_bytes -= place.held_bytes
        place.held_bytes = 0

    def hold(self, place: Place, size_bytes: int) -> None:
        """Take more memory for a place. Raises NoRoom where no other gives way."""
        small = place.held_bytes + size_bytes <= SMALL_BYTES
        limit_bytes = self._capacity_bytes if small else self._for_large_bytes
        if self._held_bytes + size_bytes > limit_bytes:
            self._end_stalled(self._held_bytes + size_bytes - limit_bytes, place)
            if self._held_bytes + size_bytes > limit_bytes:
                raise NoRoom(
                    f"{self._held_bytes} bytes of spans are being stored; send again in a moment"
                )
        self._held_bytes += size_bytes
        place.held_bytes += size_bytes
        grown = place.held_bytes - place.grown_bytes
        if grown >= PROGRESS_BYTES and grown >= place.held_bytes >> 4:
            place.grown_bytes = place.held_bytes
            place.grown_at = self.now()

    def _end_stalled(self, needed_bytes: int, newcomer: Place) -> None:
        """End the reading of bodies that stall, the largest first, until enough is free."""
        before = self.now() - self._patience_s
        stalled = [
            place
            for place in self._places
            if place.deadline is not None and place.grown_at < before and place is not newcomer
        ]
        for place in sorted(stalled, key=lambda place: place.held_bytes, reverse=True):
            if needed_bytes > 0:
                needed_bytes -= place.held_bytes
                place.give_way()


@dataclass(slots=True, eq=False)
class _Call:
    """One call over gRPC: it waits for its `turn`, and then is read since `began`."""

    sender: str
    deadline: asyncio.Timeout
    turn: "asyncio.Future[None]"
    began: float = 0.0


class ReadingSlots:
    """The few messages that gRPC takes into memory at a time.

    A sender is a connection. One whose last message stalled waits behind the others, and one slot
    is for the others alone. Of these the newest is first: those that stall are soon the oldest.
    """

    def __init__(
        self,
        slots: int = MAX_GRPC_READING,
        max_waiting: int = MAX_GRPC_WAITING,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._slots = slots
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._reading: dict[_Call, None] = {}
        self._waiting: dict[_Call, None] = {}
        self._stalled: dict[str, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def slot(self, sender: str, within_s: float) -> AsyncIterator[None]:
        """One slot. Raises BodyTooSlow at the end of the time, or when this one gives way."""
        try:
            async with asyncio.timeout(within_s) as deadline:
                call = _Call(sender, deadline, asyncio.get_running_loop().create_future())
                try:
                    await self._enter(call)
                    yield
                finally:
                    self._leave(call)
        except TimeoutError as error:
            raise BodyTooSlow from error
        if self._stalled:
            self._stalled.pop(sender, None)

    def stop(self) -> None:
        """Give the calls that have begun no more than a moment from now on."""
        for call in (*self._reading, *self._waiting):
            _end(call.deadline, self._patience_s)

    async def _enter(self, call: _Call) -> None:
        if self._has_slot(call):
            self._begin(call)
            return
        if len(self._waiting) >= self._max_waiting:
            oldest = self._next(stalled=True) or next(iter(self._waiting))
            del self._waiting[oldest]
            _end(oldest.deadline)
        self._waiting[call] = None
        self._watch()
        await call.turn

    def _leave(self, call: _Call) -> None:
        self._reading.pop(call, None)
        self._waiting.pop(call, None)
        if self._waiting:
            self._admit()

    def _has_slot(self, call: _Call) -> bool:
        return len(self._reading) < self._slots - (call.sender in self._stalled)

    def _begin(self, call: _Call) -> None:
        call.began = asyncio.get_running_loop().time()
        self._reading[call] = None

    def _next(self, *, stalled: bool) -> _Call | None:
        """The oldest that waits and stalled before, or the newest that did not."""
        calls = self._waiting if stalled else reversed(self._waiting)
        return next((call for call in calls if (call.sender in self._stalled) is stalled), None)

    def _admit(self) -> None:
        while (call := self._next(stalled=False) or self._next(stalled=True)) is not None:
            if not self._has_slot(call):
                break
            del self._waiting[call]
            if not call.turn.done():
                call.turn.set_result(None)
                self._begin(call)
        self._watch()

    def _watch(self) -> None:
        """Look at the oldest message when it must be complete, if others wait."""
        if self._waiting and self._reading and self._timer is None:
            due = next(iter(self._reading)).began + self._patience_s
            self._timer = asyncio.get_running_loop().call_at(due, self._look_soon)

    def _look_soon(self) -> None:
        # A message that came while the loop was busy is handed over before the second look.
        self._timer = asyncio.get_running_loop().call_later(_SEEN_WITHIN_S, self._end_stalled)

    def _end_stalled(self) -> None:
        self._timer = None
        before = asyncio.get_running_loop().time() - self._patience_s
        overdue = [call for call in self._reading if call.began < before]
        for call in overdue[: len(self._waiting)]:
            del self._reading[call]
            self._stalled.pop(call.sender, None)
            self._stalled[call.sender] = None
            if len(self._stalled) > MAX_STALLED_KNOWN:
                del self._stalled[next(iter(self._stalled))]
            _end(call.deadline)
        self._admit()


def _end(deadline: asyncio.Timeout, after_s: float = 0.0) -> None:
    """Let what waits within a deadline end now, or soon."""
    if deadline.expired():
        return
    when, before = asyncio.get_running_loop().time() + after_s, deadline.when()
    deadline.reschedule(when if before is None else min(when, before))
