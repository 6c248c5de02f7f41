"""The connection of one client to a listening socket: uvicorn's HTTP protocol with limits."""

import asyncio
from collections import deque
from enum import Enum, auto
from itertools import chain
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agent.catalog.reasons import ClientCut
from agent.sources.socket_clients import SocketClients, unacknowledged_bytes

# uvicorn's own limit, which it applies only with its h11 parser.
MAX_HEAD_BYTES = 64 * 1024

# What a request takes in memory beside its bytes, and each line of its head.
_REQUEST_BYTES = 2048
_LINE_BYTES = 160

# vLLM's exporter gives up after 10 s in all, so a long delay would lose the batch.
RETRY_AFTER_S = 1
# Lines of a request that offers another protocol.
_UPGRADE_LINES = (b"upgrade", b"http2-settings")


class _Awaited(Enum):
    """What the connection waits for from its client."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with the limits of a socket, and a size limit on heads and trailers.

    A client holds the memory of its requests from their first byte until they are answered.
    A request for another protocol is served as HTTP/1.1, with its body, as RFC 9110 7.8 allows. A
    client that closes its sending side counts as gone.
    """

    _head_bytes = 0

    def __init__(self, *arguments: Any, clients: SocketClients, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clients = clients
        self._running: Any = None
        self._awaited = _Awaited.HEAD
        self._head_due_s = 0.0
        self._read_at_s = 0.0
        self._unread_bytes = 0
        self._unread_since_s: float | None = None
        self._waits_since_s: float | None = None
        self._ignores_upgrade = False
        self._held_bytes = self._unfinished_bytes = 0
        self._requests_bytes: deque[int] = deque()
        self.idle_since_s: float | None = None

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._await_head(idle_s=0.0)
        self._clients.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is served. uvicorn ends only the last one that it read."""
        self._clients.leave(self)
        self._requests_bytes.clear()
        self._hold(-self._held_bytes)
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self.idle_since_s = None
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        if self._requests_bytes:
            self._hold(-self._requests_bytes.popleft())
        super().on_response_complete()
        if self._awaited is _Awaited.NOTHING and self._answered:
            self._await_head(idle_s=self.timeout_keep_alive)

    @property
    def _answered(self) -> bool:
        return self._running is None or self._running.response_complete

    def _await_head(self, idle_s: float) -> None:
        self._awaited = _Awaited.HEAD
        self.idle_since_s = self.loop.time()
        self._head_due_s = self.idle_since_s + idle_s + self._clients.limits.head_s

    # Parsing

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request; refuse a head above the limit."""
        self._unset_keepalive_if_required()
        self._read_at_s = self.loop.time()
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        self._hold_unfinished()
        too_much = self._head_bytes > MAX_HEAD_BYTES or self._holds_too_much
        if too_much and not self.transport.is_closing():
            self._refuse_large()

    def _hold(self, change_bytes: int) -> None:
        self._held_bytes += change_bytes
        self._clients.held_bytes += change_bytes

    def _hold_unfinished(self) -> None:
        """Hold the head that is not complete, or nothing."""
        lines = self.headers if self._head_bytes and self._awaited is _Awaited.HEAD else ()
        unfinished_bytes = self._head_bytes + _LINE_BYTES * len(lines)
        self._hold(unfinished_bytes - self._unfinished_bytes)
        self._unfinished_bytes = unfinished_bytes

    @property
    def _holds_too_much(self) -> bool:
        return not self._clients.may_hold(self._held_bytes)

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as stopped:
                if not self._ignores_upgrade:
                    return
                # The parser takes no body after such a head, so another one parses the request.
                data = self._head_without_upgrade() + data[stopped.args[0] :]
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        self._ignores_upgrade = False
        lines = [b"%b: %b\r\n" % line for line in self.headers if line[0] not in _UPGRADE_LINES]
        first = (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"%b %b HTTP/%b\r\n%b\r\n" % (*first, b"".join(lines))

    def send_400_response(self, msg: str) -> None:
        """Refuse a malformed request, or a head above the limit."""
        if self._head_bytes > MAX_HEAD_BYTES or self._holds_too_much:
            self._refuse_large()
        else:
            self._clients.count(ClientCut.MALFORMED)
            super().send_400_response(msg)

    def _refuse_large(self) -> None:
        """Refuse a head above the limit, or requests for which there is no room."""
        head_too_large = self._head_bytes > MAX_HEAD_BYTES
        self._clients.count(ClientCut.HEAD_TOO_LARGE if head_too_large else ClientCut.TOO_MANY)
        if not self._answered:
            # A refusal would come into the middle of a response.
            self.abort()
        elif head_too_large:
            self._refuse(431, b"send a head of at most %d bytes" % MAX_HEAD_BYTES)
        else:
            self._refuse(503, b"the heads of all requests together are too large; try again")

    def _refuse(self, status: int, body: bytes) -> None:
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
            + b"content-length: %d\r\nretry-after: %d\r\n\r\n%b" % (len(body), RETRY_AFTER_S, body)
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        """Give the client a limited time for the rest of the head."""
        super().on_message_begin()
        if self._awaited is _Awaited.NOTHING or self._answered:
            self._awaited = _Awaited.HEAD
            self._head_due_s = self.loop.time() + self._clients.limits.head_s

    def on_headers_complete(self) -> None:
        """Handle the complete head. Raises ValueError, which stops the parser, above the limit."""
        # The bytes received may include a body, so count the head alone.
        if self._head_bytes > MAX_HEAD_BYTES:
            lines_bytes = sum(len(name) + len(value) + 4 for name, value in self.headers)
            if len(self.url) + lines_bytes > MAX_HEAD_BYTES:
                raise ValueError("the head is too long")
        self._head_bytes = 0
        self._hold_unfinished()
        if self.parser.should_upgrade():
            upgrade = self._get_upgrade()
            self._ignores_upgrade = upgrade is not None and not self.refuses_upgrade(upgrade)
            if self._ignores_upgrade:
                return
        request_bytes = _REQUEST_BYTES + _LINE_BYTES * len(self.headers) + len(self.url)
        request_bytes += sum(map(len, chain.from_iterable(self.headers)))
        self._requests_bytes.append(request_bytes)
        self._hold(request_bytes)
        if self._holds_too_much:
            raise ValueError("the requests are too large")
        self._awaited = _Awaited.BODY
        super().on_headers_complete()

    def refuses_upgrade(self, upgrade: bytes) -> bool:
        """Whether the application refuses a request that offers these protocols."""
        return False

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, which has no limit here unless it waits for its turn."""
        self._head_bytes = 0
        if self.pipeline:
            self._requests_bytes[-1] += len(body)
            self._hold(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Reset the count at the end of the request."""
        self._head_bytes = 0
        if self._ignores_upgrade:
            return
        self._awaited = _Awaited.NOTHING
        super().on_message_complete()
        if self._answered:
            self._await_head(idle_s=self.timeout_keep_alive)

    # The limits

    @property
    def stalled_since_s(self) -> float | None:
        """Return since when it neither sends the rest of a body nor takes its response."""
        if self._unread_since_s is None and self._awaited is _Awaited.BODY:
            return None if self.flow.read_paused else self._read_at_s
        return self._unread_since_s

    def overdue(self, now_s: float) -> ClientCut | None:
        """Return the limit that the client exceeds."""
        limits = self._clients.limits
        if self.flow.write_paused or self.transport.is_closing():
            return self._unread(now_s)
        self._unread_since_s = self._waits_since_s = None
        if self.flow.read_paused:
            self._read_at_s = now_s
        elif self._awaited is _Awaited.HEAD:
            if self._answered and now_s > self._head_due_s:
                return ClientCut.HEAD_TOO_SLOW
        elif self._awaited is _Awaited.BODY and now_s > self._read_at_s + limits.body_s:
            begun = not self._answered and self._running.response_started
            return None if begun else ClientCut.BODY_TOO_SLOW
        return None

    def _unread(self, now_s: float) -> ClientCut | None:
        """Whether the client takes nothing. A slow reader's kernel takes a part at a time."""
        unread_bytes = self.unsent_bytes()
        if (descriptor := self._descriptor()) is not None:
            unread_bytes += unacknowledged_bytes(descriptor)
        if self._unread_since_s is None or unread_bytes != self._unread_bytes:
            self._unread_bytes, self._unread_since_s = unread_bytes, now_s
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        late = now_s > self._unread_since_s + self._clients.limits.unread_s
        return ClientCut.RESPONSE_UNREAD if late else None

    def is_slow(self, now_s: float) -> bool:
        """Return whether the client takes its response too slowly, as the last sweep saw it."""
        if self._waits_since_s is None or self._unread_since_s is None:
            return False
        limits = self._clients.limits
        is_stalled = now_s >= self._unread_since_s + limits.stalls_s
        return is_stalled or now_s >= self._waits_since_s + limits.slow_s

    def cut(self, reason: ClientCut) -> None:
        """Close the connection, with a response that says why, if one can be sent."""
        self.idle_since_s = None
        if reason is ClientCut.BODY_TOO_SLOW and not self._running.response_started:
            self._refuse(408, b"no byte of the body came for %g s" % self._clients.limits.body_s)
        elif reason is ClientCut.TOO_MANY and not self._read_at_s:
            self._refuse(503, b"all connections are in use; try again")
        else:
            self.abort()

    def abort(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def paused_descriptor(self) -> int | None:
        """Return the descriptor if nothing is read from the client now."""
        return self._descriptor() if self.flow.read_paused else None

    def unsent_bytes(self) -> int:
        """Return the size of what waits in the agent until the client reads."""
        return self.transport.get_write_buffer_size()

    def _descriptor(self) -> int | None:
        socket = self.transport.get_extra_info("socket")
        descriptor = -1 if socket is None else socket.fileno()
        return None if descriptor < 0 else int(descriptor)
