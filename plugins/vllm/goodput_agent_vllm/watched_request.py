"""One HTTP request while vLLM's front serves it, measured by what passes its ASGI calls."""

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from random import Random
from time import monotonic
from typing import TYPE_CHECKING, Any

from goodput_agent_vllm.core import Arrival, Ending, MeasuredExchange, RawHeaders, RequestRecord
from goodput_agent_vllm.middleware import App, Message, Receive, Scope, Send
from goodput_agent_vllm.open_requests import NO_SLOT, Slot

if TYPE_CHECKING:
    from goodput_agent_vllm.front import Front

# The key of a scope that another instance of the middleware has seen.
WATCHED = "goodput_agent_vllm"
# The key of a measured request's scope for what hooks of its engine note there: an object with
# `request_id`, the engine's, and `usage`, None before the end.
ENGINE_REQUEST = "goodput_agent_engine_request"

# A longer body is not read for the model and the other fields: that would take the front's loop
# tens of milliseconds.
MAX_BODY_BYTES = 8 * 1024 * 1024

# Pieces of a response are read so many at a time: that takes less time than to read each.
_READ_TOGETHER = 64

# `struct tcp_info` of Linux: milliseconds since the last data arrived.
_TCP_INFO, _TCP_INFO_BYTES = 11, 104
_last_data_received = struct.Struct("=52xI").unpack_from
# A connection that was open before may have been idle for long: its last data is this request.
_LONGEST_WAIT_S = 60.0

# The clock of these milliseconds is that of the kernel's ticks: CLOCK_MONOTONIC_COARSE.
_TICK_S = time.clock_getres(6)
# How much a wait counts in the mean of short ones.
_SHARE = 1 / 256

_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")
# The agent's proxy says so: see agent/catalog/spans.py.
_FROM_PROXY = frozenset((b"goodput=proxied", b"goodput=unsampled"))
_NO_TRACE, _NO_SPAN = b"0" * 32, b"0" * 16

# An application may set the seed of the generator that all share.
_random = Random()

# A trace id, a span id, and the header with both.
_Ids = tuple[str, str, RawHeaders]
# Those of the next request, made while none waits for its first token.
_prepared: list[_Ids] = []


def _new_ids() -> _Ids:
    ids = f"{_random.getrandbits(192):048x}"
    trace_id, span_id = ids[:32], ids[32:]
    return trace_id, span_id, ((b"traceparent", f"00-{trace_id}-{span_id}-01".encode()),)


def _prepare_ids() -> None:
    if not _prepared:
        _prepared.append(_new_ids())


def _forget_ids() -> None:
    _random.seed()
    _prepared.clear()


os.register_at_fork(after_in_child=_forget_ids)


class Trace:
    """The trace of a request, and a span id for its row.

    `headers` are those to add for vLLM: its span becomes the child of the row's, unless the client
    sent a trace of its own. `parent_span_id` is the client's.
    """

    __slots__ = ("_sent", "headers", "parent_span_id", "span_id", "trace_id")

    def __init__(self, sent: RawHeaders) -> None:
        self.headers: RawHeaders
        ids = _prepared.pop() if _prepared else _new_ids()
        self.trace_id, self.span_id, self.headers = ids
        self._sent = sent
        self.parent_span_id: str | None = None
        for name, value in sent:
            if name == b"traceparent":
                self.headers = ()
                self._continue(value)
                return

    def _continue(self, parent: bytes) -> None:
        found = _TRACEPARENT.fullmatch(parent)
        if found and found[1] != _NO_TRACE and found[2] != _NO_SPAN:
            self.trace_id, self.parent_span_id = found[1].decode(), found[2].decode()

    @property
    def proxied(self) -> bool:
        """Whether the request came through the agent's proxy."""
        values = [value for name, value in self._sent if name == b"tracestate"]
        if not values:
            return False
        states = b",".join(values).split(b",")
        return not _FROM_PROXY.isdisjoint(map(bytes.strip, states))

    def end(self, record: RequestRecord, response_model: str | None) -> None:
        """Do nothing: the agent makes a row of the record."""


def kernel_wait_s(receive: Receive) -> float:
    """How long the request's bytes waited for the front to read them; 0 if that is unknown.

    The step is that of the kernel's clock, up to 4 ms. uvicorn's objects are undocumented, so
    anything may be missing.
    """
    try:
        connection = receive.__self__.transport.get_extra_info("socket")  # type: ignore[attr-defined]
        # A Unix socket has no such option.
        info = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _TCP_INFO_BYTES)
        waited_s: float = _last_data_received(info)[0] / 1000
    except Exception:
        # Also of a client that has left: its socket is closed.
        return 0.0
    return waited_s if waited_s <= _LONGEST_WAIT_S else 0.0


class ShortWaits:
    """Estimates waits that are shorter than a tick of the kernel's clock.

    Such a wait is measured as nothing or, if a tick was within, as a whole one: only the mean of
    many is right. In a busy front, waits differ too much for that.
    """

    __slots__ = ("_mean_s",)

    def __init__(self) -> None:
        self._mean_s = 0.0

    def likely_s(self, measured_s: float) -> float:
        """Return how long a request most likely waited of which this was measured."""
        if measured_s > _TICK_S:
            return measured_s
        self._mean_s += (measured_s - self._mean_s) * _SHARE
        return self._mean_s if self._mean_s < _TICK_S / 4 else measured_s


def _client_left(receive: Receive) -> bool:
    """Whether uvicorn knows that the client left: applications may ask for the body alone."""
    return getattr(getattr(receive, "__self__", None), "disconnected", False) is True


class WatchedRequest:
    """Measures one request. `run` serves it; no error of the measuring reaches the application.

    Only what is needed is done before the application gets the request: the arrival and the trace.
    Until its first token, nothing is read.
    """

    __slots__ = (
        "_at_s",
        "_awaited",
        "_body",
        "_body_bytes",
        "_body_complete",
        "_broken",
        "_ended_s",
        "_exchange",
        "_front",
        "_gone_s",
        "_head",
        "_open",
        "_pieces",
        "_receive",
        "_reported",
        "_send",
        "_slot",
        "_times_s",
        "scope",
        "trace",
    )

    def __init__(self, front: "Front", scope: Scope, receive: Receive, send: Send) -> None:
        self._at_s = monotonic() - front.short_waits.likely_s(kernel_wait_s(receive))
        self._front = front
        self._receive = receive
        self._send = send
        headers = scope["headers"]
        self.trace = trace = Trace(headers)
        if trace.headers:
            headers = [*headers, *trace.headers]
        self.scope: Scope = {**scope, "headers": headers, WATCHED: True, ENGINE_REQUEST: None}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._body_complete = False
        # After an error of the measuring the request passes unmeasured.
        self._broken = False
        self._exchange: MeasuredExchange | None = None
        self._slot: Slot = NO_SLOT
        self._gone_s: float | None = None
        self._ended_s: float | None = None
        self._reported = False
        # The status and the headers of the response until they are read; None before and after.
        self._head: tuple[int, RawHeaders] | None = None
        # Whether the response's body has two pieces, and neither ended nor lost its client.
        self._open = False
        # What was sent and is not read yet, and when.
        self._pieces: list[bytes] = []
        self._times_s: list[float] = []
        # Whether its first token is awaited.
        self._awaited = True
        front.deferred.hold()

    async def run(self, app: App) -> None:
        """Serve the request, then report it."""
        failed = False
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            failed = True
            raise
        finally:
            if failed or self._ended_s is None:
                self._report(failed=failed)

    def report_ended(self) -> None:
        """Report the request if its response is complete; its application may go on."""
        if self._ended_s is not None:
            self._report(failed=False)

    def _report(self, *, failed: bool) -> None:
        """Report the request, unless that is done."""
        if self._reported:
            return
        self._reported = True
        self._release(now=False)
        self._front.forget(self)
        self._guarded(self._end, failed=failed)

    def _guarded(self, hook: Callable[..., object], *arguments: Any, **named: Any) -> None:
        if self._broken:
            return
        try:
            hook(*arguments, **named)
        except Exception:
            self._fail()

    def _fail(self) -> None:
        """One error of a request counts, however many would follow."""
        self._broken = True
        self._release(now=False)
        self._open = False
        self._body = []
        self._pieces, self._times_s = [], []
        self._front.failed()
        with contextlib.suppress(Exception):
            self._slot.close()

    def _release(self, *, now: bool) -> None:
        if self._awaited:
            self._awaited = False
            self._front.deferred.release(now=now)

    # What the application receives

    async def receive(self) -> Message:
        """Return the next message of the server."""
        message = await self._receive()
        if not self._broken:
            try:
                self._received(message)
            except Exception:
                self._fail()
        return message

    def _received(self, message: Message) -> None:
        if message["type"] == "http.disconnect":
            if self._gone_s is None and self._ended_s is None:
                self._gone_s = monotonic()
                self._open = False
            return
        piece = message.get("body", b"")
        self._body_bytes += len(piece)
        if self._body_bytes > MAX_BODY_BYTES:
            self._body = []
        elif self._exchange is None:
            self._body.append(piece)
        if not message.get("more_body", False):
            self._body_complete = True
            self._front.deferred.add(self._begin_guarded)

    # What the application sends

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message of the application to the server."""
        try:
            # Nearly every message is a piece of an open stream: no further call for these.
            if self._open and message.get("more_body") and (body := message.get("body")):
                now_s = monotonic()
                pieces, slot = self._pieces, self._slot
                pieces.append(body)
                self._times_s.append(now_s)
                slot.file.last_s[slot.place] = now_s
                if len(pieces) >= _READ_TOGETHER:
                    self._read()
            elif not self._broken:
                self._sent(message)
        except Exception:
            self._fail()
        return self._send(message)

    def _sent(self, message: Message) -> None:
        if self._gone_s is not None or self._ended_s is not None:
            # What follows after the client left is not its response.
            return
        now_s = monotonic()
        if message["type"] == "http.response.start":
            if _client_left(self._receive):
                self._gone_s = now_s
                return
            self._head = message["status"], message.get("headers", ())
        elif message["type"] == "http.response.body":
            body, more = message.get("body", b""), message.get("more_body", False)
            if body:
                if self._pieces:
                    # Not the first one: what is done now delays no first token.
                    self._open = True
                    self._release(now=more)
                self._slot.event(now_s)
                self._pieces.append(body)
                self._times_s.append(now_s)
            if not more:
                self._ended_s = now_s
                self._open = False
                # A client may send its next request at once, and must not wait for this.
                self._front.deferred.add(self.report_ended)

    # Measuring

    def _read(self) -> None:
        """Read what was sent since the last time."""
        exchange = self._begin()
        pieces, times_s = self._pieces, self._times_s
        if self._head is not None:
            (status, headers), self._head = self._head, None
            exchange.answered(status, headers, self._at_s)
        if pieces:
            self._pieces, self._times_s = [], []
            exchange.chunks(pieces, times_s)

    def _begin_guarded(self) -> None:
        self._guarded(self._begin)

    def _begin(self) -> MeasuredExchange:
        """Begin to measure, unless that has begun; return the measurement."""
        if self._exchange is None:
            whole = self._body_complete and self._body_bytes <= MAX_BODY_BYTES
            body = b"".join(self._body) if whole else None
            self._body = []
            at = time.time() - monotonic() + self._at_s
            self._exchange = exchange = self._front.begin(
                Arrival(
                    method=self.scope["method"],
                    path=path_of(self.scope),
                    headers=self.scope["headers"],
                    body=body,
                    at=at,
                    at_s=self._at_s,
                    # Of a request that is refused by its head, the body is not read.
                    client_left=not self._body_complete,
                ),
                self.trace,
            )
            exchange.parent_span_id = self.trace.parent_span_id
            exchange.catch_up()
            _prepare_ids()
            if self._ended_s is None and not self._reported:
                self._open_slot(exchange, at)
        return self._exchange

    def _open_slot(self, exchange: MeasuredExchange, at: float) -> None:
        self._slot = slot = self._front.opened(exchange, self.trace, at, self._at_s)
        if self._times_s:
            slot.event(self._times_s[-1])

    def _end(self, *, failed: bool) -> None:
        exchange = self._begin()
        self._read()
        self._slot.close()
        ending, at_s = self._ending(exchange, failed=failed)
        exchange.finish(at_s)
        if self._body_bytes > MAX_BODY_BYTES:
            exchange.sent(self._body_bytes)
        self._front.ended(self, exchange, ending, at_s)

    def _ending(self, exchange: MeasuredExchange, *, failed: bool) -> tuple[Ending, float]:
        """How it ended, and when."""
        if self._ended_s is not None:
            return Ending.COMPLETE, self._ended_s
        if self._gone_s is not None:
            return Ending.CLIENT_GONE, self._gone_s
        now_s = monotonic()
        if failed and not exchange.has_head:
            # The server outside of all middlewares turns the error into a response.
            exchange.answered(500, (), now_s)
            return Ending.COMPLETE, now_s
        return Ending.ENGINE_GONE, now_s


def path_of(scope: Scope) -> str:
    """The path of a request, without the prefix under which the server is reached."""
    path: str = scope["path"]
    root: str = scope.get("root_path", "")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path
