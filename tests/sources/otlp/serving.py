"""The product's two OTLP servers on free ports, in an event loop that lives beside the tests."""

import asyncio
import gc
import sys
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import uvloop

from agent.catalog.reasons import VALUES_DROPPED, ExportRefused, SpanRejected
from agent.errors import StoreUnavailable
from agent.records.engine import EngineIdentity
from agent.records.request import RequestRecord
from agent.sources.listening import AsgiServer, open_socket
from agent.sources.otlp.grpc import OtlpGrpc
from agent.sources.otlp.http import OtlpHttp
from agent.sources.otlp.limits import SMALL_BYTES
from agent.sources.otlp.payload import Body
from agent.sources.otlp.receiver import Accept, ExportCounter, Receiver
from agent.sources.otlp.span_reader import ExportContent, Identify, SpanReader
from tests.real_parts.waiting import eventually

Result = TypeVar("Result")

WITHIN_S = 30.0
_NO_PRECEDENCE = nullcontext()


class LoopThread:
    """An event loop of the kind that the agent runs in."""

    def __enter__(self) -> Self:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event-loop")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WITHIN_S)

    def call(self, act: Callable[[], object]) -> None:
        """Do something in the loop, where its events belong."""
        self._loop.call_soon_threadsafe(act)

    @contextmanager
    def entered(self, context: AbstractAsyncContextManager[Result]) -> Iterator[Result]:
        value = self.run(_coroutine(context.__aenter__()))
        try:
            yield value
        finally:
            self.run(_coroutine(context.__aexit__(None, None, None)))


async def _coroutine(work: Awaitable[Result]) -> Result:
    return await work


@dataclass(slots=True)
class ExportCounts:
    """What the receiver reports, and a way to wait for it."""

    contents: list[ExportContent] = field(default_factory=list)
    refused_bodies: Counter[str] = field(default_factory=Counter)

    def exported(self, content: ExportContent) -> None:
        """An export was read and stored; what it lost has one of the words that there are."""
        assert content.screened.keys() <= set(VALUES_DROPPED)
        assert content.rejected.keys() <= set(SpanRejected)
        self.contents.append(content)

    def refused(self, reason: ExportRefused) -> None:
        self.refused_bodies[reason] += 1

    def forget(self) -> None:
        self.contents.clear()
        self.refused_bodies.clear()

    def wait(self, seen: Callable[[Self], object]) -> None:
        """Return when `seen` is true of what was reported."""
        eventually(lambda: seen(self), within_s=WITHIN_S, what="a report of the receiver")


class Accepted:
    """Takes records as a store would; `gate` makes it wait, `failure` makes it fail."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.records: list[RequestRecord] = []
        self.batches: list[int] = []
        self.failure: Exception | None = None
        self.unstorable = 0
        self.gate: asyncio.Event | None = None
        self.entered = threading.Event()

    async def __call__(self, records: Sequence[RequestRecord]) -> int:
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        self.records.extend(records)
        self.batches.append(len(records))
        return self.unstorable

    @property
    def record(self) -> RequestRecord:
        (record,) = self.records
        return record


def by_service_name(attributes: Mapping[str, object]) -> EngineIdentity:
    """The engine is what the resource says of itself; its model is not known."""
    name = attributes.get("service.name")
    return EngineIdentity(engine=name if isinstance(name, str) else None, model=None)


@dataclass(frozen=True, slots=True)
class Serving:
    """A receiver that listens; `counts`, `accepted` and `forwarded` show what became of exports."""

    grpc_port: int
    http_port: int
    receiver: Receiver
    counts: ExportCounts
    accepted: Accepted
    forwarded: list[Body]

    @property
    def grpc_url(self) -> str:
        return f"http://127.0.0.1:{self.grpc_port}"

    @property
    def traces_url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}/v1/traces"

    def forget(self) -> None:
        """Be as new to the next test: servers take longer to stop than most tests take."""
        self.counts.forget()
        self.accepted.forget()
        self.forwarded.clear()


@asynccontextmanager
async def serving(
    accept: Accept | None = None,
    *,
    counter: ExportCounter | None = None,
    forward: Callable[[Body], None] | None = None,
    identify: Identify = by_service_name,
    client_sampling: bool = True,
    precedence: AbstractContextManager[object] = _NO_PRECEDENCE,
) -> AsyncIterator[Serving]:
    """Both servers around one receiver, stopped in the order of the agent's own stop."""
    counts, accepted, forwarded = ExportCounts(), Accepted(), list[Body]()
    receiver = Receiver(
        SpanReader(identify, "tester"),
        accept or accepted,
        forward or forwarded.append,
        counter or counts,
        time.time,
        client_sampling=client_sampling,
        precedence=precedence,
    )
    grpc_server = OtlpGrpc(receiver, "127.0.0.1:0")
    http_server = AsgiServer(OtlpHttp(receiver), open_socket("otlp.http", "127.0.0.1", 0))
    await grpc_server.start()
    http_server.start()
    try:
        yield Serving(grpc_server.port, http_server.port, receiver, counts, accepted, forwarded)
    finally:
        await grpc_server.stop(0.0)
        await http_server.stop()
        await receiver.close()


@contextmanager
def in_hand(loop: LoopThread, served: Serving, size_bytes: int) -> Iterator[None]:
    """Small bodies of other senders, of so many bytes together."""

    stack = ExitStack()

    async def take() -> None:
        for left_bytes in range(size_bytes, 0, -SMALL_BYTES):
            stack.enter_context(served.receiver.reserve()).add(min(left_bytes, SMALL_BYTES))

    async def give_back() -> None:
        stack.close()

    loop.run(take())
    try:
        yield
    finally:
        loop.run(give_back())


UNSTORABLE = "unstorable"


async def serve_alone() -> None:
    """Serve in a process of its own until standard input ends; write the ports of gRPC and HTTP."""

    async def drop(records: Sequence[RequestRecord]) -> int:
        if any(record.request_id == UNSTORABLE for record in records):
            raise StoreUnavailable("not now")
        return 0

    async with serving(drop, forward=lambda body: None) as served:
        sys.stdout.write(f"{served.grpc_port} {served.http_port}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    # The agent's collector comes seldom; what waits for it is to be seen.
    gc.disable()
    uvloop.run(serve_alone())
