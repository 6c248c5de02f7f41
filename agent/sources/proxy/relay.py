"""Relays one request to an engine and the response to the client."""

import asyncio
from collections.abc import Sequence

from agent.catalog.reasons import EjectionReason, ProxyFailure
from agent.sources.proxy.client_response import (
    NO_WEBSOCKET,
    STOPPING,
    ClientResponse,
    ErrorResponse,
    timed_out,
    unreachable,
)
from agent.sources.proxy.engine_connection import ConnectionPool, EngineConnection
from agent.sources.proxy.engine_request import RequestBody, engine_head
from agent.sources.proxy.exchange import Arrival, Ending, GuardedExchange, RawHeaders, Reads, joined
from agent.sources.proxy.headers import RequestHead, for_client, redirect_to_proxy, retry_after
from agent.sources.proxy.load_balancer import FAILED, THROTTLING, Attempt, ProxiedEngine
from agent.sources.proxy.relay_context import Receive, RelayContext, Scope, Send

# Engines that are tried for one request, as long as no engine got any of it.
_ENGINES_TRIED = 2
# The engine did not take the request (RFC 9110 15.6.4), so another one may.
_NOT_TAKEN = 503
_NOT_FOUND = 404
# A 404 of this path may mean an earlier response that the request names.
_RESPONSES = "/v1/responses"
_Failed = tuple[Ending, ErrorResponse]
# RFC 9110 10.2.2: statuses with a meaning for `location`.
_LOCATED = frozenset((201, *range(300, 400)))


class Relay:
    """One exchange. `run` relays it to its end; `interrupt` ends it from outside."""

    __slots__ = (
        "_attempt",
        "_body",
        "_connection",
        "_context",
        "_ending",
        "_exchange",
        "_head",
        "_kept",
        "_response",
        "_reused",
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
        self._body = RequestBody(receive, self._head.declared_bytes, context.body_memory)
        self._unsent = b""
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._exchange: GuardedExchange | None = None
        self._attempt: Attempt | None = None
        # The body, while the request may have to be sent again.
        self._kept: bytes | None = None
        self._reused = False
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
        self._forget_body()
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
        if self._attempt is None:
            return
        if self._connection is not None:
            if self._body.unread:
                self._connection.abort()
            self._pool.give_back(self._connection)
            self._connection = None
        self._attempt.close()
        self._attempt = None

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
        connection = await self._connect(self._candidates()[:_ENGINES_TRIED])
        if connection is not None:
            # A large body must not stay in memory while its response passes.
            body, self._unsent = self._unsent, b""
            self._keep(body)
            self._send_request(connection, body)
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

    async def _connect(self, engines: Sequence[ProxiedEngine]) -> EngineConnection | None:
        """Connect to the first reachable engine; None after an error response to the client."""
        failed, limit_s = None, self._context.limits.connect_s
        for engine in engines:
            counts = self._scope["method"] == "POST"
            self._attempt = attempt = Attempt(self._context.balancer, engine, counts=counts)
            if self._exchange is not None:
                self._exchange.routed(engine.name)
            try:
                self._connection = self._pool.take()
                self._reused = self._connection is not None
                self._connection = self._connection or await self._pool.connect()
            except TimeoutError:
                failed = Ending.TIMEOUT, timed_out(engine.name, "accept a connection", limit_s)
            except OSError as error:
                gone = unreachable(engine.name, error.strerror or str(error))
                failed = Ending.UNREACHABLE, gone
            else:
                return self._connection
            attempt.failed(EjectionReason.UNREACHABLE)
            self._release()
        assert failed is not None
        await self._end_with(*failed)
        return None

    @property
    def _pool(self) -> ConnectionPool:
        assert self._attempt is not None, "an engine was chosen"
        return self._context.pools[self._attempt.engine.name]

    def _candidates(self, but: ProxiedEngine | None = None) -> Sequence[ProxiedEngine]:
        balancer = self._context.balancer
        model = None if self._exchange is None else self._exchange.model
        try:
            return balancer.candidates(model, probes=self._scope["method"] == "POST", but=but)
        except Exception:
            self._context.on_failure(ProxyFailure.CHOOSE)
            return () if but else balancer.engines

    def _keep(self, body: bytes) -> None:
        """Keep the body of a generation request for another engine, if there is memory."""
        several = len(self._context.balancer.engines) > 1
        known = several and self._exchange is not None and not self._body.unread
        if known and self._context.kept_memory.take(0, len(body)):
            self._kept = body

    def _forget_body(self) -> None:
        if self._kept is not None:
            self._context.kept_memory.give_back(len(self._kept))
            self._kept = None

    def _send_request(self, connection: EngineConnection, body: bytes) -> None:
        assert self._attempt is not None, "an engine was chosen"
        replacements: RawHeaders = ()
        if self._exchange is not None:
            replacements = self._exchange.headers
            if self._body.unread:
                self._exchange.sent(len(body))
        framing = self._body.framing(len(body))
        head = engine_head(self._scope, self._head, self._pool, replacements, framing)
        bodyless = self._scope["method"] == "HEAD"
        connection.send_request(head + self._body.framed(body), bodyless=bodyless)
        connection.when_drained(self._body.free)
        self._attempt.sent(connection)

    def _watch(self, connection: EngineConnection) -> None:
        """End the exchange when the client leaves, and relay the unread body meanwhile."""
        self._response.watch(lambda: self.interrupt(Ending.CLIENT_GONE))
        if self._body.unread:
            sent = None if self._exchange is None else self._exchange.sent
            self._watcher = asyncio.create_task(self._body.relay(connection, sent))

    # The response

    async def _relay_response(self, connection: EngineConnection) -> None:
        assert self._attempt is not None
        probe = self._attempt.probe
        failed = await self._wait_for_head(connection)
        status = connection.status
        if self._kept is not None and self._may_retry(failed, status, probe=probe):
            engines = self._candidates(but=self._attempt.engine)[:1]
            if engines:
                again = await self._retry(engines, self._kept)
                if again is None:
                    return
                connection, failed = again, await self._wait_for_head(again)
        self._forget_body()
        if failed is not None:
            await self._end_with(*failed)
            return
        await self._send_engine_head(connection)
        await self._relay_body(connection)

    async def _wait_for_head(self, connection: EngineConnection) -> _Failed | None:
        """Wait for the head of the response; returns why there is none."""
        assert self._attempt is not None
        attempt, limit_s = self._attempt, self._context.limits.answer_s
        name = attempt.engine.name
        try:
            await connection.wait_for_head(limit_s)
        except TimeoutError:
            attempt.failed(EjectionReason.TIMEOUT)
            return Ending.TIMEOUT, timed_out(name, "start its response", limit_s or 0.0)
        except ConnectionError as error:
            if not self._reused:
                # Otherwise the engine had closed the idle connection.
                attempt.failed(EjectionReason.RESET)
            return Ending.UNREACHABLE, unreachable(name, str(error))
        status = connection.status or 0
        retry_after_s = None
        if status in THROTTLING:
            retry_after_s = retry_after(connection.headers, self._context.clocks.now())
        attempt.answered(status, retry_after_s)
        if self._denies_its_model(status):
            attempt.failed(EjectionReason.ERROR, str(status))
        return None

    def _may_retry(self, failed: _Failed | None, status: int | None, *, probe: bool) -> bool:
        """Whether another engine may get the request.

        If a new connection was lost, the request itself may have ended the engine. But an engine
        that fails on a probe had failed before the request came.
        """
        if failed is not None:
            return (self._reused or probe) and failed[0] is Ending.UNREACHABLE
        if status == _NOT_TAKEN or self._denies_its_model(status):
            return True
        return probe and status in FAILED

    def _denies_its_model(self, status: int | None) -> bool:
        """Whether the response is a 404 for a model that the engine lists.

        Then the engine lacks the route, as after a wrong deployment; other 404s blame the request.
        """
        assert self._attempt is not None
        if status != _NOT_FOUND or self._exchange is None or self._scope["path"] == _RESPONSES:
            return False
        return self._context.balancer.lists(self._attempt.engine, self._exchange.model)

    async def _retry(
        self, engines: Sequence[ProxiedEngine], body: bytes
    ) -> EngineConnection | None:
        """Send the request to another engine; None after an error response to the client."""
        assert self._attempt is not None
        self._context.balancer.retried[self._attempt.engine.name] += 1
        self._release()
        connection = await self._connect(engines)
        if connection is not None:
            self._send_request(connection, body)
        return connection

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
        assert self._attempt is not None
        attempt = self._attempt
        try:
            last = await self._relay_pieces(connection)
        except TimeoutError:
            rest = self._end(Ending.TIMEOUT)
            attempt.failed(EjectionReason.TIMEOUT)
        except ConnectionError:
            rest = self._end(Ending.ENGINE_GONE)
            attempt.failed(EjectionReason.RESET)
        else:
            last += self._end(Ending.COMPLETE, connection.read_at_s)
            error_status = None if self._exchange is None else self._exchange.error_status
            if error_status is not None:
                attempt.answered(error_status, None, "in the response")
            attempt.completed(error_status or connection.status or 0)
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
