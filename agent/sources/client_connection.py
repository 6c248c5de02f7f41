"""The clients of a listening socket and their limits, and the connection of each."""

import asyncio
import fcntl
import logging
import select
import struct
import termios
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE as STATUS_LINE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agent.catalog.reasons import ClientCut

_LOG = logging.getLogger(__name__)

# uvicorn's own limit, which it applies only with its h11 parser.
MAX_HEAD_BYTES = 64 * 1024

# What a request takes in memory beside its bytes, and each line of its head.
_REQUEST_BYTES = 2048
_LINE_BYTES = 160

# vLLM's exporter gives up after 10 s in all, so a long delay would lose the batch.
RETRY_AFTER_S = 1
_MALFORMED = 400
# Lines of a request that offers another protocol.
_UPGRADE_LINES = (b"upgrade", b"http2-settings")

OnCut = Callable[[str, ClientCut], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits for the clients of one listening socket; times are in seconds.

    `head_s` is until the head of a request is complete, `body_s` the longest time without a byte of
    an incomplete body. In `unread_s` a client must take something of a response that waits for it.
    Responses that wait for their clients have `unread_bytes` together; None means no limit. Beyond
    it, slow clients are cut off, those for which most waits first: who took nothing for `stalls_s`,
    or for whom something waits for `slow_s`. Requests that are not answered have `requests_bytes`
    together; beyond it, each client has an equal part. `send_buffer_bytes` of a response may wait
    in the kernel; None leaves it to the kernel, which takes several MiB.
    """

    connections: int = 256
    head_s: float = 30.0
    body_s: float = 60.0
    unread_s: float = 60.0
    stalls_s: float = 1.0
    slow_s: float = 10.0
    unread_bytes: int | None = None
    requests_bytes: int = 8 * 1024 * 1024
    send_buffer_bytes: int | None = None


class SocketClients:
    """The clients of one listening socket. `sweep` must be called about every second.

    `name` is the setting with the address. `on_cut` counts each client that was cut off.
    """

    def __init__(
        self, name: str, limits: ClientLimits = ClientLimits(), on_cut: OnCut | None = None
    ) -> None:
        self.name = name
        self.limits = limits
        # What the clients' requests take now, without the bodies that are read.
        self.held_bytes = 0
        self._on_cut = on_cut
        self._clients: set[BoundedClient] = set()
        self._logged: set[ClientCut] = set()
        self._empty = asyncio.Event()

    def __iter__(self) -> Iterator["BoundedClient"]:
        return iter(list(self._clients))

    async def all_left(self) -> None:
        """Wait until no client is left."""
        while self._clients:
            self._empty.clear()
            await self._empty.wait()

    def enter(self, client: "BoundedClient") -> None:
        """Take a new client. If there are too many, the one that is idle longest leaves.

        The new client leaves if no other is idle.
        """
        self._clients.add(client)
        if len(self._clients) > self.limits.connections:
            # A client that was cut off stays here until its connection is closed, but is not idle.
            idle = [one for one in self._clients if one.idle_since_s is not None]
            self._cut(min(idle, key=lambda one: one.idle_since_s or 0.0), ClientCut.TOO_MANY)

    def leave(self, client: "BoundedClient") -> None:
        """Forget a client whose connection is closed."""
        self._clients.discard(client)
        if not self._clients:
            self._empty.set()

    def sweep(self, now_s: float) -> None:
        """Cut off the clients that exceed a limit, and those that left unnoticed."""
        for client in self:
            if (reason := client.overdue(now_s)) is not None:
                self._cut(client, reason)
        for client in _gone(self._clients):
            client.transport.abort()
        if self.limits.unread_bytes is not None:
            self._cut_unread(self.limits.unread_bytes, now_s)

    def may_hold(self, size_bytes: int) -> bool:
        """Whether a client's requests may take `size_bytes`, which are in `held_bytes` already.

        Each client may always take an equal part of the whole, so large requests never keep small
        ones out.
        """
        whole_bytes, most = self.limits.requests_bytes, self.limits.connections
        return self.held_bytes <= whole_bytes or size_bytes <= whole_bytes // most

    def _cut_unread(self, limit_bytes: int, now_s: float) -> None:
        unsent = [(client.unsent_bytes(), client) for client in self._clients]
        excess_bytes = sum(size_bytes for size_bytes, _ in unsent) - limit_bytes
        # Never a response that was just made: the limit is for clients that do not take it.
        slow = [each for each in unsent if each[0] and each[1].is_slow(now_s)]
        for size_bytes, client in sorted(slow, key=lambda each: -each[0]):
            if excess_bytes <= 0:
                return
            self._cut(client, ClientCut.RESPONSES_WAIT)
            excess_bytes -= size_bytes

    def count(self, reason: ClientCut) -> None:
        """Count a client that was cut off or refused; log the first one of each reason."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOG.warning("%s: a client was cut off (%s); logged once", self.name, reason)
        if self._on_cut is not None:
            self._on_cut(self.name, reason)

    def _cut(self, client: "BoundedClient", reason: ClientCut) -> None:
        client.cut(reason)
        self.count(reason)


def _gone(clients: Iterable["BoundedClient"]) -> list["BoundedClient"]:
    """Return the clients that left while nothing is read from their connections."""
    paused = {client.descriptor(): client for client in clients if client.reading_paused}
    poll = select.poll()
    for descriptor in paused:
        if descriptor is not None:
            poll.register(descriptor, select.POLLRDHUP)
    return [paused[descriptor] for descriptor, _ in poll.poll(0)]


def _unacknowledged_bytes(descriptor: int) -> int:
    """Return the size of what the kernel holds until the other side takes it."""
    try:
        (size_bytes,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        # The connection is being closed.
        return 0
    return int(size_bytes)


class _Awaited(Enum):
    """What the connection waits for from its client."""

    HEAD = auto()
    BODY = auto()
    NOTHING = auto()


class BoundedClient(asyncio.Protocol, ABC):
    """A client's connection with the limits of a socket, and a size limit on heads and trailers.

    A client holds the memory of its requests from their first byte until they are answered.
    A request for another protocol is served as HTTP/1.1, with its body, as RFC 9110 7.8 allows. A
    client that closes its sending side counts as gone.

    A subclass has the parsed lines in `headers` and `url`, and serves the requests.
    """

    transport: asyncio.Transport
    headers: list[tuple[bytes, bytes]]
    url: bytes
    # Longer than most clients are idle, and than the 60 s for which most load balancers keep a
    # connection: none sends a request into one that is being closed.
    idle_s: float = 75

    def __init__(self, clients: SocketClients, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.parser: Any = _new_parser(self)
        self.headers = []
        self.url = b""
        self._clients = clients
        self._awaited = _Awaited.HEAD
        self._head_bytes = 0
        self._head_due_s = 0.0
        self._read_at_s = 0.0
        self._unread_bytes = 0
        self._unread_since_s: float | None = None
        self._waits_since_s: float | None = None
        self._ignores_upgrade = False
        self._held_bytes = self._unfinished_bytes = 0
        self._requests_bytes: deque[int] = deque()
        self.idle_since_s: float | None = None

    # What a subclass does

    @property
    @abstractmethod
    def reading_paused(self) -> bool:
        """Whether nothing is read from the client now."""

    @property
    @abstractmethod
    def writing_paused(self) -> bool:
        """Whether a response waits until the client takes it."""

    @property
    @abstractmethod
    def _answered(self) -> bool:
        """Whether no request is served now."""

    @property
    @abstractmethod
    def _response_started(self) -> bool:
        """Whether the request that is served has a part of its response."""

    def refuses_upgrade(self, upgrade: bytes) -> bool:
        """Whether a request that offers these protocols is refused."""
        return False

    @abstractmethod
    def _begin_request(self) -> None:
        """Note the first byte of a request."""

    @abstractmethod
    def _take_head(self) -> None:
        """Take the complete head; a request before it may not be answered yet."""

    @abstractmethod
    def _take_body(self, body: bytes) -> None:
        """Take a part of the body."""

    @abstractmethod
    def _end_request(self) -> None:
        """Note the end of the body."""

    # The connection

    def _enter(self) -> None:
        """Wait for the first request."""
        self._await_head(idle_s=0.0)
        self._clients.enter(self)

    def _leave(self) -> None:
        self._clients.leave(self)
        self._requests_bytes.clear()
        self._hold(-self._held_bytes)

    def _finish_answered(self) -> bool:
        """Free the memory of an answered request; returns whether the client is idle now."""
        if self._requests_bytes:
            self._hold(-self._requests_bytes.popleft())
        idle = self._awaited is _Awaited.NOTHING and self._answered
        if idle:
            self._await_head(idle_s=self.idle_s)
        return idle

    def _await_head(self, idle_s: float) -> None:
        self._awaited = _Awaited.HEAD
        self.idle_since_s = self.loop.time()
        self._head_due_s = self.idle_since_s + idle_s + self._clients.limits.head_s

    # Parsing

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request; refuse a head above the limit."""
        self._read_at_s = self.loop.time()
        self._head_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse_malformed()
        self._hold_unfinished()
        # What is held for a single request with a complete head was checked with the head.
        holds = self._head_bytes or len(self._requests_bytes) > 1
        too_much = self._head_bytes > MAX_HEAD_BYTES or (holds and self._holds_too_much)
        if too_much and not self.transport.is_closing():
            self._refuse_large()

    def _hold(self, change_bytes: int) -> None:
        self._held_bytes += change_bytes
        self._clients.held_bytes += change_bytes

    def _hold_unfinished(self) -> None:
        """Hold the head that is not complete, or nothing."""
        if not (self._head_bytes or self._unfinished_bytes):
            return
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
        self.parser = _new_parser(self)
        return b"%b %b HTTP/%b\r\n%b\r\n" % (*first, b"".join(lines))

    def _refuse_malformed(self) -> None:
        """Refuse a malformed request, or a head above the limit."""
        if self._head_bytes > MAX_HEAD_BYTES or self._holds_too_much:
            self._refuse_large()
            return
        self._clients.count(ClientCut.MALFORMED)
        if self._response_started:
            # A refusal would come into the middle of a response.
            self.transport.abort()
        else:
            self._refuse(_MALFORMED, b"Invalid HTTP request received.")

    def _refuse_large(self) -> None:
        """Refuse a head above the limit, or requests for which there is no room."""
        head_too_large = self._head_bytes > MAX_HEAD_BYTES
        self._clients.count(ClientCut.HEAD_TOO_LARGE if head_too_large else ClientCut.TOO_MANY)
        if not self._answered:
            self.transport.abort()
        elif head_too_large:
            self._refuse(431, b"send a head of at most %d bytes" % MAX_HEAD_BYTES)
        else:
            self._refuse(503, b"the heads of all requests together are too large; try again")

    def _refuse(self, status: int, body: bytes) -> None:
        retry = b"" if status == _MALFORMED else b"retry-after: %d\r\n" % RETRY_AFTER_S
        self.transport.write(
            STATUS_LINE[status]
            + b"content-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n" % len(body)
            + b"connection: close\r\n%b\r\n%b" % (retry, body)
        )
        self.transport.close()

    def on_message_begin(self) -> None:
        """Give the client a limited time for the rest of the head."""
        self._begin_request()
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
            upgrade = _upgrade(self.headers)
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
        self._take_head()

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body, which has no limit here unless it waits for its turn."""
        self._head_bytes = 0
        if len(self._requests_bytes) > 1:
            self._requests_bytes[-1] += len(body)
            self._hold(len(body))
        self._take_body(body)

    def on_message_complete(self) -> None:
        """Reset the count at the end of the request."""
        self._head_bytes = 0
        if self._ignores_upgrade:
            return
        self._awaited = _Awaited.NOTHING
        self._end_request()
        if self._answered:
            self._await_head(idle_s=self.idle_s)

    # The limits

    def overdue(self, now_s: float) -> ClientCut | None:
        """Return the limit that the client exceeds."""
        limits = self._clients.limits
        if self.writing_paused or self.transport.is_closing():
            return self._unread(now_s)
        self._unread_since_s = self._waits_since_s = None
        if self.reading_paused:
            self._read_at_s = now_s
        elif self._awaited is _Awaited.HEAD:
            if self._answered and now_s > self._head_due_s:
                return ClientCut.HEAD_TOO_SLOW
        elif self._awaited is _Awaited.BODY and now_s > self._read_at_s + limits.body_s:
            begun = not self._answered and self._response_started
            return None if begun else ClientCut.BODY_TOO_SLOW
        return None

    def _unread(self, now_s: float) -> ClientCut | None:
        """Whether the client takes nothing. A slow reader's kernel takes a part at a time."""
        unread_bytes = self.unsent_bytes()
        if (descriptor := self.descriptor()) is not None:
            unread_bytes += _unacknowledged_bytes(descriptor)
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
        unanswered = not (self._answered or self._response_started)
        if reason is ClientCut.BODY_TOO_SLOW and unanswered:
            self._refuse(408, b"no byte of the body came for %g s" % self._clients.limits.body_s)
        elif reason is ClientCut.TOO_MANY and not self._read_at_s:
            self._refuse(503, b"all connections are in use; try again")
        else:
            self.transport.abort()

    def unsent_bytes(self) -> int:
        """Return the size of what waits in the agent until the client reads."""
        return self.transport.get_write_buffer_size()

    def descriptor(self) -> int | None:
        """Return the descriptor of the connection; None once it is closed."""
        socket = self.transport.get_extra_info("socket")
        descriptor = -1 if socket is None else socket.fileno()
        return None if descriptor < 0 else int(descriptor)


def _new_parser(client: asyncio.Protocol) -> Any:
    parser = httptools.HttpRequestParser(client)
    # For a response to the first of several requests that were sent together.
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def _upgrade(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the protocols that a request offers to switch to, in lower case."""
    upgrade, connection = None, b""
    for name, value in headers:
        if name == b"upgrade":
            upgrade = value.lower()
        elif name == b"connection":
            connection = value.lower()
    return upgrade if b"upgrade" in [each.strip() for each in connection.split(b",")] else None


class BoundedProtocol(BoundedClient, HttpToolsProtocol):
    """uvicorn's HTTP protocol with these limits."""

    def __init__(self, *arguments: Any, clients: SocketClients, **options: Any) -> None:
        HttpToolsProtocol.__init__(self, *arguments, **options)
        BoundedClient.__init__(self, clients, self.loop)
        self.idle_s = self.timeout_keep_alive
        self._running: Any = None

    @property
    def reading_paused(self) -> bool:
        """Whether nothing is read from the client now."""
        return self.flow.read_paused

    @property
    def writing_paused(self) -> bool:
        """Whether a response waits until the client takes it."""
        return self.flow.write_paused

    @property
    def _answered(self) -> bool:
        return self._running is None or self._running.response_complete

    @property
    def _response_started(self) -> bool:
        return self._running is not None and bool(self._running.response_started)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        HttpToolsProtocol.connection_made(self, transport)
        self._enter()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that is served. uvicorn ends only the last one that it read."""
        self._leave()
        self.pipeline.clear()
        running = self._running
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        HttpToolsProtocol.connection_lost(self, exc)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a request."""
        self._unset_keepalive_if_required()
        BoundedClient.data_received(self, data)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        self.idle_since_s = None
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._finish_answered()

    def _begin_request(self) -> None:
        HttpToolsProtocol.on_message_begin(self)

    def _take_head(self) -> None:
        HttpToolsProtocol.on_headers_complete(self)

    def _take_body(self, body: bytes) -> None:
        HttpToolsProtocol.on_body(self, body)

    def _end_request(self) -> None:
        HttpToolsProtocol.on_message_complete(self)
