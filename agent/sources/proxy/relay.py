"""Relays one request to an engine and the response to the client."""

import asyncio
from collections.abc import Sequence

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.client_response import ClientResponse
from agent.sources.proxy.connection_pool import ConnectionPool
from agent.sources.proxy.engine_connection import EngineConnection
from agent.sources.proxy.engine_request import RequestBody, engine_head
from agent.sources.proxy.error_responses import (
    NO_WEBSOCKET,
    STOPPING,
    ErrorResponse,
    timed_out,
    unreachable,
)
from agent.sources.proxy.exchange import Arrival, Ending, RawHeaders, Reads, joined
from agent.sources.proxy.guard import GuardedExchange
from agent.sources.proxy.headers import RequestHead, for_client, redirect_to_proxy
from agent.sources.proxy.load_balancer import ProxiedEngine
from agent.sources.proxy.relay_context import Receive, RelayContext, Scope, Send

# Engines that are tried for one request, as long as no engine got any of it.
_ENGINES_TRIED = 2
# RFC 9110 10.2.2: statuses with a meaning for `location`.
_LOCATED = frozenset((201, *range(300, 400)))


class Relay:
    """One exchange. `run` relays it to its end; `interrupt` ends it from outside."""

    __slots__ = (
        "_body",
        "_connection",
        "_context",
        "_ending",
        "_engine",
        "_exchange",
        "_head",
        "_response",
        "_scope",
        "_task",
        "_unsent",
        "_watcher",
    )

    def __init__(self, context: RelayContext, scope: Scope, receive: Receive, send: Send) -> None:
        self._context = context
        self._scope = scope
        self._response = ClientResponse(scope, send)
        self._head = RequestHead(scope["headers"])
        self._body = RequestBody(receive, self._head.declared_bytes, context.room)
        self._unsent = b""
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._exchange: GuardedExchange | None = None
        self._engine: ProxiedEngine | None = None
        self._connection: EngineConnection | None = None
        self._ending: Ending | None = None

    async def run(self) -> None:
        """Relay to the end. A client that already has the head is cut off on failure."""
        self._task = asyncio.current_task()
        try:
            await self._relay()
        except asyncio.CancelledError:
            if self._ending is None or self._task is None:
                raise
            self._task.uncancel()
        finally:
            self._leave()
        if self._ending is Ending.REFUSED:
            await self._response.fail(STOPPING)

    def interrupt(self, ending: Ending) -> None:
        """End the exchange now; does nothing if it is over."""
        if self._ending is None and self._task is not None:
            self._end(ending)
            self._task.cancel()

    async def respond(self, error: ErrorResponse) -> None:
        """Send a response of the proxy's own; does nothing if a response has begun."""
        await self._response.fail(error)

    def _leave(self) -> None:
        self._end(Ending.REFUSED)
        self._release()
        self._body.free()
        self._response.client.when_gone = None
        # After a complete response the watcher ends without a cancel.
        if self._watcher is not None and self._ending is not Ending.COMPLETE:
            self._watcher.cancel()

    def _end(self, ending: Ending, at_s: float | None = None) -> bytes:
        """End the exchange unless it has ended; return the last bytes for the client."""
        if self._ending is not None:
            return b""
        self._ending = ending
        if self._exchange is None:
            return b""
        return self._exchange.ended(
            ending, self._context.clocks.monotonic() if at_s is None else at_s
        )

    def _release(self) -> None:
        """Give the connection back to the pool, or close it if it cannot be reused."""
        if self._engine is None:
            return
        if self._connection is not None:
            if self._body.unread:
                self._connection.abort()
            self._context.pools[self._engine.name].give_back(self._connection)
            self._connection = None
        self._context.balancer.open_requests.add(self._engine.name, -1)
        self._engine = None

    # The request

    async def _relay(self) -> None:
        if b"websocket" in self._head.upgrades:
            await self._end_with(Ending.REFUSED, NO_WEBSOCKET)
            return
        await self._read_request()
        if self._body.client_left:
            if self._exchange is not None:
                self._exchange.sent(len(self._unsent))
            self._end(Ending.CLIENT_GONE)
            return
        connection = await self._connect()
        if connection is not None:
            self._send_request(connection)
            self._watch(connection)
            if self._exchange is not None:
                # In the next turn of the event loop, because the request leaves at the end of this.
                asyncio.get_running_loop().call_soon(self._exchange.catch_up)
            await self._relay_response(connection)

    async def _read_request(self) -> None:
        """Read the body or its beginning, and start measuring."""
        scope, clocks, measuring = self._scope, self._context.clocks, self._context.measuring
        if measuring is None or not measuring.wants(scope["method"], scope["path"]):
            self._unsent = await self._body.read_piece()
            return
        at, at_s = clocks.now(), clocks.monotonic()
        self._unsent = await self._body.read(self._context.limits)
        self._exchange = measuring.begin(
            Arrival(
                method=scope["method"],
                path=scope["path"],
                headers=scope["headers"],
                body=None if self._body.unread else self._unsent,
                at=at,
                at_s=at_s,
                client_left=self._body.client_left,
            )
        )
        if self._exchange is not None:
            self._response.added_headers = self._exchange.added_headers
            self._unsent = self._exchange.take_body() or self._unsent

    async def _connect(self) -> EngineConnection | None:
        """Connect to the best reachable engine; None after an error response to the client."""
        failed, limit_s = None, self._context.limits.connect_s
        for engine in self._candidates()[:_ENGINES_TRIED]:
            self._engine = engine
            self._context.balancer.open_requests.add(engine.name, 1)
            if self._exchange is not None:
                self._exchange.routed(engine.name)
            pool = self._context.pools[engine.name]
            try:
                self._connection = pool.take() or await pool.connect()
            except TimeoutError:
                failed = Ending.TIMEOUT, timed_out(engine.name, "accept a connection", limit_s)
            except OSError as error:
                gone = unreachable(engine.name, error.strerror or str(error))
                failed = Ending.UNREACHABLE, gone
            else:
                return self._connection
            self._release()
        assert failed is not None
        await self._end_with(*failed)
        return None

    @property
    def _pool(self) -> ConnectionPool:
        assert self._engine is not None, "an engine was chosen"
        return self._context.pools[self._engine.name]

    def _candidates(self) -> Sequence[ProxiedEngine]:
        balancer = self._context.balancer
        try:
            return balancer.candidates(None if self._exchange is None else self._exchange.model)
        except Exception:
            self._context.on_failure(ProxyFailure.CHOOSE)
            return balancer.engines

    def _send_request(self, connection: EngineConnection) -> None:
        replacements: RawHeaders = ()
        # A large body must not stay in memory while its response passes.
        body, self._unsent = self._unsent, b""
        if self._exchange is not None:
            replacements = self._exchange.headers
            if self._body.unread:
                self._exchange.sent(len(body))
        framing = self._body.framing(len(body))
        head = engine_head(self._scope, self._head, self._pool, replacements, framing)
        bodyless = self._scope["method"] == "HEAD"
        connection.send_request(head + self._body.framed(body), bodyless=bodyless)
        connection.when_drained(self._body.free)

    def _watch(self, connection: EngineConnection) -> None:
        """End the exchange when the client leaves, and relay the unread body meanwhile."""
        self._response.watch(lambda: self.interrupt(Ending.CLIENT_GONE))
        if self._body.unread:
            sent = None if self._exchange is None else self._exchange.sent
            self._watcher = asyncio.create_task(self._body.relay(connection, sent))

    # The response

    async def _relay_response(self, connection: EngineConnection) -> None:
        assert self._engine is not None
        name, limit_s = self._engine.name, self._context.limits.answer_s
        try:
            await connection.wait_for_head(limit_s)
        except TimeoutError:
            late = timed_out(name, "start its response", limit_s or 0.0)
            await self._end_with(Ending.TIMEOUT, late)
        except ConnectionError as error:
            await self._end_with(Ending.UNREACHABLE, unreachable(name, str(error)))
        else:
            await self._send_engine_head(connection)
            await self._relay_body(connection)

    async def _end_with(self, ending: Ending, error: ErrorResponse) -> None:
        """End the exchange and send the client an error response."""
        self._end(ending)
        self._release()
        await self._response.fail(error)

    async def _send_engine_head(self, connection: EngineConnection) -> None:
        status = connection.status or 0
        headers: RawHeaders = connection.headers
        if self._exchange is not None:
            headers = self._exchange.answered(status, headers, connection.head_at_s)
        lines = for_client(status, headers)
        if status in _LOCATED and self._head.host is not None:
            proxy = self._scope["scheme"].encode() + b"://" + self._head.host
            lines = redirect_to_proxy(lines, self._pool.origin, proxy)
        await self._response.begin(status, lines)

    async def _relay_body(self, connection: EngineConnection) -> None:
        """Relay the pieces as they arrive. A cut response stays unfinished for the client, too.

        The server then closes the client's connection, so that the client sees the cut.
        """
        try:
            last = await self._relay_pieces(connection)
        except TimeoutError:
            rest = self._end(Ending.TIMEOUT)
        except ConnectionError:
            rest = self._end(Ending.ENGINE_GONE)
        else:
            last += self._end(Ending.COMPLETE, connection.read_at_s)
            self._release()
            await self._response.send(last, more=False)
            return
        self._release()
        if rest:
            await self._response.send(rest, more=True)

    async def _relay_pieces(self, connection: EngineConnection) -> bytes:
        """Relay all but the last pieces; return those. Raises TimeoutError and ConnectionError."""
        gap_s = self._context.limits.gap_s
        if gap_s is None:
            # A wait for the next piece with a time limit must see each piece.
            connection.pass_on = self._pass_on
        while True:
            data = self._measured(await connection.read(gap_s))
            if connection.complete:
                return data
            if data:
                await self._response.send(data, more=True)

    def _measured(self, reads: Reads) -> bytes:
        return joined(reads) if self._exchange is None else self._exchange.chunks(reads)

    def _pass_on(self, data: bytes, at_s: float) -> bool:
        """Send a piece now; False if it must wait for the client."""
        client = self._response.client
        if not client.takes_now():
            return False
        kept = self._measured(((data, at_s),))
        if kept:
            client.write(kept)
        return True
