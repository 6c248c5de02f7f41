"""The worker's side: keeps finished records, in shared memory, until the agent has stored them."""

import asyncio
import logging
import mmap
import os
import sys
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NamedTuple, Self

import msgspec

from agent.catalog.reasons import ProxyFailure
from agent.records.request import RequestRecord
from agent.sources.proxy.handover.messages import (
    RECORD_FIELDS,
    EncodedRequests,
    Engines,
    EngineState,
    FromAgent,
    FromWorker,
    HandoverAddress,
    ProxySpans,
    Retire,
    Rotation,
    Stored,
    WorkerDied,
    WorkerHello,
    WorkerStatus,
    encoded,
    framed,
    received,
)

SLOT_BYTES = 1024
# In all workers together: 16 MiB, of which only what was ever used takes memory.
MAX_SLOTS = 16_384

# Numbers before the lengths of the slots: the version of this layout, a checksum of the fields of
# a record, whether a worker has begun, and the records without slot.
_LAYOUT, _FIELDS, _BEGUN, _WITHOUT, _LENGTHS = range(5)
_NUMBER_BYTES = 4
_LAYOUT_VERSION = 1
_FIELDS_CHECKSUM = zlib.crc32(" ".join(RECORD_FIELDS).encode())


class LeftSlots(NamedTuple):
    """What a worker left: the records by slot, and how many of ended requests had none.

    `other_fields` says that another version of the program wrote the records.
    """

    records: Mapping[int, bytes]
    without: int
    other_fields: bool = False


class RequestSlots:
    """One slot for each request that is open or not stored yet, as far as there are free ones.

    Made before the worker is forked. A worker that is killed leaves its slots to the next one, or
    by their descriptor to a process of a later supervisor. The
    length of a slot is 0 while it is free or being written, so a half-written slot counts as free.
    """

    def __init__(self, slots: int = MAX_SLOTS) -> None:
        descriptor = os.memfd_create("request-slots")
        os.ftruncate(descriptor, _NUMBER_BYTES * _LENGTHS + (_NUMBER_BYTES + SLOT_BYTES) * slots)
        self._map(descriptor, slots)
        self._numbers[_LAYOUT], self._numbers[_FIELDS] = _LAYOUT_VERSION, _FIELDS_CHECKSUM

    @classmethod
    def left(cls, descriptor: int) -> Self:
        """Return the slots of an earlier run. Raises ValueError for another layout."""
        version = int.from_bytes(os.pread(descriptor, _NUMBER_BYTES, 0), sys.byteorder)
        if version != _LAYOUT_VERSION:
            raise ValueError(f"layout {version}; this version reads layout {_LAYOUT_VERSION}")
        slots, size_bytes = cls.__new__(cls), os.fstat(descriptor).st_size
        each_bytes = _NUMBER_BYTES + SLOT_BYTES
        slots._map(descriptor, (size_bytes - _NUMBER_BYTES * _LENGTHS) // each_bytes)
        return slots

    def _map(self, descriptor: int, slots: int) -> None:
        self.descriptor = descriptor
        self._first = _NUMBER_BYTES * (_LENGTHS + slots)
        self._bytes = memoryview(mmap.mmap(descriptor, 0))
        self._numbers = self._bytes[: self._first].cast("I")
        # The lowest ones first, as each page that was ever written takes memory.
        self._free = [*reversed(range(slots))]

    def begin(self) -> LeftSlots | None:
        """Begin as the only writer; returns what the worker before left, None if this is the first.

        What it left stays in its slots.
        """
        slots = range(len(self._numbers) - _LENGTHS)
        used = {slot: bytes(self._slot(slot)) for slot in slots if self._numbers[_LENGTHS + slot]}
        self._free = [slot for slot in reversed(slots) if slot not in used]
        without, self._numbers[_WITHOUT] = self._numbers[_WITHOUT], 0
        begun, self._numbers[_BEGUN] = self._numbers[_BEGUN], 1
        other_fields = self._numbers[_FIELDS] != _FIELDS_CHECKSUM
        return LeftSlots(used, without, other_fields) if begun else None

    def hold(self, record: bytes) -> int | None:
        """Put a record into a free slot; None if there is none, or the record is too large."""
        if not self._free or len(record) > SLOT_BYTES:
            return None
        slot = self._free.pop()
        self._write(slot, record)
        return slot

    def replace(self, slot: int, record: bytes) -> int | None:
        """Replace the record of a slot; None for one that is too large, which frees the slot."""
        if len(record) > SLOT_BYTES:
            self.free(slot)
            return None
        self._write(slot, record)
        return slot

    def free(self, slot: int) -> None:
        """Forget the record of a slot."""
        self._numbers[_LENGTHS + slot] = 0
        self._free.append(slot)

    def count_without(self, change: int) -> None:
        """Change the number of ended requests whose record has no slot."""
        self._numbers[_WITHOUT] += change

    def release(self) -> None:
        """Give the memory back, which other processes still have open. No slot is used again."""
        os.ftruncate(self.descriptor, 0)

    def _write(self, slot: int, record: bytes) -> None:
        self._numbers[_LENGTHS + slot] = 0
        at = self._first + SLOT_BYTES * slot
        self._bytes[at : at + len(record)] = record
        self._numbers[_LENGTHS + slot] = len(record)

    def _slot(self, slot: int) -> memoryview:
        at = self._first + SLOT_BYTES * slot
        return self._bytes[at : at + self._numbers[_LENGTHS + slot]]


_LOG = logging.getLogger(__name__)

# In all workers: a minute of a thousand requests a second, usually at about half a kilobyte each.
MAX_WAITING_RECORDS = 65_536
_MOST_BYTES_EACH = 1024
# Each holds up to 512 spans.
MAX_WAITING_BODIES = 64
BATCH_RECORDS = 512
# A record that follows another within this time waits for the rest of it, so that they are
# committed together.
BATCH_WITHIN_S = 0.25
_MAX_UNANSWERED_RECORDS = 4 * BATCH_RECORDS
_STATUS_EVERY_S = 1.0
_RETRY_S = 0.2
_DECODER = msgspec.msgpack.Decoder(FromAgent)
_RECORD = msgspec.msgpack.Decoder(RequestRecord)


class RecordQueue:
    """Records that are not known to be stored, each with its number, counted from 1.

    It takes `most` of them, fewer if they are large. Each is in its slot, too, if it has one.
    """

    def __init__(self, most: int, slots: RequestSlots) -> None:
        self._records: deque[tuple[msgspec.Raw, int | None]] = deque()
        self._slots = slots
        self._most = most
        self._size_bytes = 0
        self._stored = 0

    def __len__(self) -> int:
        return len(self._records)

    @property
    def stored(self) -> int:
        """The number of the last record that the agent has answered for."""
        return self._stored

    def append(self, record: bytes, slot: int | None = None) -> bool:
        """Keep a record, in this slot or else in a free one; False if too many wait."""
        size_bytes = self._size_bytes + len(record)
        if len(self._records) >= self._most or size_bytes > self._most * _MOST_BYTES_EACH:
            if slot is not None:
                self._slots.free(slot)
            return False
        hold = self._slots.hold
        slot = hold(record) if slot is None else self._slots.replace(slot, record)
        if slot is None:
            self._slots.count_without(1)
        self._records.append((msgspec.Raw(record), slot))
        self._size_bytes = size_bytes
        return True

    def after(self, number: int) -> list[msgspec.Raw]:
        """A batch of the records that follow this number."""
        first = number - self._stored
        end = min(first + BATCH_RECORDS, len(self._records))
        return [self._records[index][0] for index in range(first, end)]

    def answered(self, number: int) -> None:
        """Forget the records up to this number."""
        while self._stored < number and self._records:
            record, slot = self._records.popleft()
            self._size_bytes -= len(memoryview(record))
            self._stored += 1
            if slot is None:
                self._slots.count_without(-1)
            else:
                self._slots.free(slot)


class HandoverSender:
    """Sends records and counts to the agent, again after each loss of the connection.

    `on_engines` gets the agent's states of the engines. `on_retire` is called when the agent
    belongs to a later run. `live` returns the number of open exchanges, `rotation` the report. A
    process that only hands over records of a dead worker has none of the four.
    """

    def __init__(
        self,
        handover: HandoverAddress,
        worker: int,
        slots: RequestSlots,
        most_records: int = MAX_WAITING_RECORDS,
        *,
        on_engines: Callable[[Mapping[str, EngineState]], None] | None = None,
        on_retire: Callable[[], None] | None = None,
        live: Callable[[], int] | None = None,
        rotation: Callable[[], Rotation] | None = None,
    ) -> None:
        self._handover = handover
        self._hello = WorkerHello(worker, handover.run)
        self._on_engines = on_engines
        self._on_retire = on_retire
        self._live = live
        self._rotation = rotation
        self._slots = slots
        # By span id, until the request ends.
        self._open: dict[str, int] = {}
        self._queue = RecordQueue(most_records, slots)
        self._died: WorkerDied | None = None
        self._failures: Counter[str] = Counter()
        self._cut: Counter[str] = Counter()
        self._spans: deque[bytes] = deque()
        self._sent = 0
        # Of them, those that did not leave this process yet.
        self._sending = 0
        self._came = asyncio.Event()
        self._done = asyncio.Event()

    def begin(self, open_before: int) -> None:
        """Take over what the worker before left, if it died: the records of its ended requests, and
        of its open ones, of which `open_before` are counted, the records with their error."""
        left = self._slots.begin()
        if left is not None:
            rows = 0
            for slot, record in left.records.items():
                rows += self._take_left(slot, b"" if left.other_fields else record)
            self._died = died = WorkerDied(self._hello.worker, open_before, rows, left.without)
            self._failures[ProxyFailure.WORKER_DIED] += max(open_before, rows) + left.without
            _LOG.warning(
                "the proxy worker before this one died: %d open requests were cut, %d of them get "
                "a row; %d ended ones are lost", died.open, died.rows, died.lost
            )  # fmt: skip

    def _take_left(self, slot: int, data: bytes) -> bool:
        """Take over a record; returns whether its request was open."""
        try:
            record = _RECORD.decode(data)
        except msgspec.DecodeError:
            # Something else, or another version, wrote here. A worker that fails on it would fail
            # in each start.
            self._slots.free(slot)
            self.failed(ProxyFailure.RECORD_REFUSED)
            return False
        was_open = record.proxied is not None and record.proxied.error == ProxyFailure.WORKER_DIED
        if was_open:
            now = time.time()
            data = encoded(record._replace(ended_at=now, received_at=now))
        self._queue.append(data, slot)
        self._came.set()
        return was_open

    def opened(self, record: RequestRecord) -> None:
        """Keep what is known of an open request, for the case that this process dies."""
        slot = self._slots.hold(encoded(record))
        if slot is not None:
            self._open[record.span_id] = slot

    def lost(self, span_id: str) -> None:
        """Forget an open request of which no record comes."""
        slot = self._open.pop(span_id, None)
        if slot is not None:
            self._slots.free(slot)

    def take(self, record: RequestRecord) -> None:
        """Keep a record for the agent; the newest is dropped and counted if too many wait."""
        data = encoded(record)
        if self._queue.append(data, self._open.pop(record.span_id, None)):
            self._came.set()
        else:
            self.failed(ProxyFailure.STORE_BEHIND)

    def take_spans(self, body: bytes) -> None:
        """Keep a body of spans for the agent to forward; too many are dropped and counted."""
        if len(self._spans) >= MAX_WAITING_BODIES:
            self.failed(ProxyFailure.SPANS_BEHIND)
            return
        self._spans.append(body)
        self._came.set()

    def failed(self, reason: str) -> None:
        """Count a failure."""
        self._failures[reason] += 1

    def client_cut(self, reason: str) -> None:
        """Count a client that was cut off."""
        self._cut[reason] += 1

    async def run(self) -> None:
        """Hand over until cancelled."""
        while True:
            try:
                await self._connected()
            except (OSError, EOFError):
                # The agent is not up yet, or it is gone and will be back.
                pass
            except Exception:
                _LOG.exception("records could not be handed over; they are sent again")
            await asyncio.sleep(_RETRY_S)

    async def flush(self, within_s: float | None) -> int:
        """Wait until all records are stored, and all spans and counts sent; returns how many
        records the agent did not get in this time. None means no limit."""
        self._note_progress()
        try:
            async with asyncio.timeout(within_s):
                await self._done.wait()
        except TimeoutError:
            pass
        return len(self._queue) - self._unanswered + self._sending

    @property
    def _unanswered(self) -> int:
        """The records that went to the agent, and that it did not answer for."""
        return self._sent - self._queue.stored

    def _note_progress(self) -> None:
        counts = self._died or self._failures or self._cut
        if self._queue or self._spans or counts:
            self._done.clear()
        else:
            self._done.set()

    async def _connected(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._handover.socket)
        # What was sent is in the kernel, which gives it to the agent also if this process ends.
        writer.transport.set_write_buffer_limits(0)
        self._came.set()
        try:
            await self._send(writer, self._hello)
            if self._died is not None:
                await self._send(writer, self._died)
                self._died = None
            await _until_one_fails(
                self._read(reader), self._send_records(writer), self._send_status(writer)
            )
        finally:
            self._sent, self._sending = self._queue.stored, 0
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = await received(reader, _DECODER)
            if isinstance(message, Stored):
                self._queue.answered(message.number)
                self._came.set()
                self._note_progress()
            elif isinstance(message, Engines) and self._on_engines is not None:
                self._on_engines(message.states)
            elif isinstance(message, Retire) and self._on_retire is not None:
                self._on_retire()

    async def _send_records(self, writer: asyncio.StreamWriter) -> None:
        loop, next_s = asyncio.get_running_loop(), 0.0
        while True:
            await self._came.wait()
            self._came.clear()
            if len(self._queue) - self._unanswered < BATCH_RECORDS:
                await asyncio.sleep(next_s - loop.time())
            while self._spans:
                await self._send(writer, ProxySpans(self._spans.popleft()))
            self._note_progress()
            while self._unanswered < _MAX_UNANSWERED_RECORDS:
                batch = self._queue.after(self._sent)
                if not batch:
                    break
                next_s = loop.time() + BATCH_WITHIN_S
                self._sent, self._sending = self._sent + len(batch), len(batch)
                await self._send(writer, EncodedRequests(self._sent, batch))
                self._sending = 0

    async def _send_status(self, writer: asyncio.StreamWriter) -> None:
        while True:
            failures, self._failures = self._failures, Counter()
            cut, self._cut = self._cut, Counter()
            live = 0 if self._live is None else self._live()
            rotation = Rotation() if self._rotation is None else self._rotation()
            status = WorkerStatus(live, len(self._queue), failures, cut, rotation)
            await self._send(writer, status)
            self._note_progress()
            await asyncio.sleep(_STATUS_EVERY_S)

    async def _send(self, writer: asyncio.StreamWriter, message: FromWorker) -> None:
        writer.write(framed(message))
        await writer.drain()


async def _until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Run these together, and raise what one of them raises.

    A task group or `asyncio.gather` may lose a cancellation that comes when one of them fails.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
