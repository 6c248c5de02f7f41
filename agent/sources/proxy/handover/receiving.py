"""The agent's side of the handover: records come from the workers, states of engines go to them."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from agent.catalog.reasons import ProxyFailure
from agent.errors import StoreUnavailable
from agent.records.request import RequestRecord
from agent.sources.proxy.handover.messages import (
    RECORD_FIELDS,
    EncodedRequests,
    Engines,
    EngineState,
    FinishedRequests,
    HandoverAddress,
    ProxySpans,
    Retire,
    Rotation,
    Stored,
    WorkerDied,
    WorkerHello,
    WorkerStatus,
    framed,
    received,
)

_LOG = logging.getLogger(__name__)

_ENGINES_EVERY_S = 0.5
_FIRST_DELAY_S = 0.5
_MAX_DELAY_S = 10.0
_HELLO = msgspec.msgpack.Decoder(WorkerHello)
_MESSAGES = msgspec.msgpack.Decoder(FinishedRequests | ProxySpans | WorkerStatus | WorkerDied)
_OTHER_VERSION = msgspec.msgpack.Decoder(EncodedRequests | ProxySpans | WorkerStatus | WorkerDied)

_Batches = asyncio.Queue[FinishedRequests | EncodedRequests]

# Returns how many of the records can never be stored; raises StoreUnavailable.
AcceptRecords = Callable[[Sequence[RequestRecord]], Awaitable[int]]


class HandoverReceiver:
    """Takes the records of all workers. Workers of an earlier run get the message to retire.

    `accept` returns when records are committed. `engines` is what the agent knows of them now.
    `on_failure` and `on_cut` are called for each failure and each cut client of a worker,
    `on_died` for each worker that died, `on_spans` gets bodies to forward, `on_rotation` the counts
    of each worker's rotation.
    """

    def __init__(
        self,
        handover: HandoverAddress,
        *,
        accept: AcceptRecords,
        engines: Callable[[], Mapping[str, EngineState]],
        on_failure: Callable[[str], None],
        on_cut: Callable[[str], None],
        on_died: Callable[[WorkerDied], None],
        on_spans: Callable[[bytes], None] | None,
        on_rotation: Callable[[Rotation], None] | None = None,
    ) -> None:
        self._handover = handover
        self._accept = accept
        self._engines = engines
        self._on_failure = on_failure
        self._on_cut = on_cut
        self._on_died = on_died
        self._on_spans = on_spans
        self._on_rotation = on_rotation
        # By connection; the task that serves it is its key.
        self._statuses: dict[asyncio.Task[None], WorkerStatus] = {}
        self._server: asyncio.Server | None = None

    @property
    def workers(self) -> int:
        """The workers that are connected."""
        return len(self._statuses)

    @property
    def live(self) -> int:
        """The exchanges that are open in all workers."""
        return sum(status.live for status in self._statuses.values())

    @property
    def rotations(self) -> list[Rotation]:
        """The newest rotation of each worker."""
        return [status.rotation for status in list(self._statuses.values())]

    @property
    def waiting(self) -> int:
        """The records that wait in all workers."""
        return sum(status.waiting for status in self._statuses.values())

    async def start(self) -> None:
        """Listen, in place of an earlier run of the agent."""
        # Somebody may have cleaned up.
        self._handover.socket.parent.mkdir(mode=0o700, exist_ok=True)
        self._handover.socket.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, self._handover.socket)

    async def close(self) -> None:
        """Take no more records; those without an acknowledgement stay in their workers."""
        if self._server is not None:
            self._server.close()
        serving = list(self._statuses)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Some versions of asyncio log a traceback for each task of their own that is cancelled.
        task = asyncio.create_task(self._serve(reader, writer))
        self._statuses[task] = WorkerStatus(0, 0, {}, {})
        task.add_done_callback(self._statuses.pop)
        task.add_done_callback(lambda _: writer.close())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        # A worker sends no more batches than it may have unanswered.
        batches: _Batches = asyncio.Queue()
        works = [
            asyncio.create_task(work)
            for work in (self._send_engines(writer), self._store_all(batches, writer))
        ]
        try:
            await self._read(task, batches, reader, writer)
        except (EOFError, OSError, ValueError) as error:
            _LOG.info("a worker of the proxy left: %s", error)
            self._statuses[task] = WorkerStatus(0, 0, {}, {})
            # If the worker has ended, only these batches hold its last records.
            await batches.join()
        finally:
            for work in works:
                work.cancel()

    async def _read(
        self,
        task: "asyncio.Task[None]",
        batches: "_Batches",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        hello = await received(reader, _HELLO)
        if hello.run != self._handover.run:
            writer.write(framed(Retire()))
        decoder = _MESSAGES if hello.fields == RECORD_FIELDS else _OTHER_VERSION
        while True:
            message = await received(reader, decoder)
            if isinstance(message, WorkerStatus):
                self._statuses[task] = message
                self._count(message)
            elif isinstance(message, WorkerDied):
                self._on_died(message)
            elif isinstance(message, ProxySpans):
                if self._on_spans is not None:
                    self._on_spans(message.body)
            else:
                batches.put_nowait(message)

    async def _store_all(self, batches: "_Batches", writer: asyncio.StreamWriter) -> None:
        while True:
            batch = await batches.get()
            if isinstance(batch, FinishedRequests):
                await self._store(batch.records)
            else:
                self._failed(ProxyFailure.RECORD_REFUSED, len(batch.records))
            writer.write(framed(Stored(batch.number)))
            batches.task_done()

    async def _store(self, records: Sequence[RequestRecord]) -> None:
        """Return when the records are stored or refused; the worker keeps the next ones."""
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                refused = await self._accept(records)
            except StoreUnavailable as error:
                _LOG.warning("%d proxied requests wait for the database: %s", self.waiting, error)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
                continue
            except Exception:
                # These records can never be stored, and must not delay the next ones.
                _LOG.exception("%d proxied requests could not be stored", len(records))
                refused = len(records)
            self._failed(ProxyFailure.RECORD_REFUSED, refused)
            return

    def _count(self, status: WorkerStatus) -> None:
        if self._on_rotation is not None:
            self._on_rotation(status.rotation)
        for reason, count in status.failures.items():
            self._failed(reason, count)
        for reason, count in status.cut.items():
            for _ in range(count):
                self._on_cut(reason)

    def _failed(self, reason: str, count: int) -> None:
        for _ in range(count):
            self._on_failure(reason)

    async def _send_engines(self, writer: asyncio.StreamWriter) -> None:
        sent: Mapping[str, EngineState] | None = None
        while True:
            states = self._engines()
            if states != sent:
                writer.write(framed(Engines(states)))
                sent = states
            await asyncio.sleep(_ENGINES_EVERY_S)
