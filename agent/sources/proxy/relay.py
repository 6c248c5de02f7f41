"""The relaying of one request to an engine, and of its answer to the client."""

import asyncio
from collections.abc import Sequence

from agent.sources.proxy.answers import NO_WEBSOCKET, STOPPING, OwnAnswer, too_slow, unreachable
from agent.sources.proxy.choosing import ProxiedEngine
from agent.sources.proxy.connection import EngineConnection
from agent.sources.proxy.exchange import Arrival, Ending, RawHeaders, Reads
from agent.sources.proxy.guard import GuardedExchange
from agent.sources.proxy.headers import RequestHead, at_proxy, for_client
from agent.sources.proxy.parts import ProxyParts, Receive, Scope, Send
from agent.sources.proxy.pool import EnginePool
from agent.sources.proxy.request import RequestBody, engine_head

# Of a stream, the one with the role and that with the first token.
_FIRST_PIECES = 2
# Engines that are tried for one request, while nothing was sent to any.
_TRIES = 2
# RFC 9110 10.2.2: statuses whose Location leads to what was asked for or made.
_LOCATED = frozenset((201, *range(300, 400)))


class Relay:
    """One exchange. `run` is its whole life; `interrupt` ends it from outside."""

    __slots__ = (
        "_body",
        "_connection",
        "_ending",
        "_engine",
        "_exchange",
        "_first_pieces",
        "_head",
        "_head_sent",
        "_parts",
        "_scope",
        "_send",
        "_task",
        "_watcher",
    )

    def __init__(self, parts: ProxyParts, scope: Scope, receive: Receive, send: Send) -> None:
        self._parts = parts
        self._scope = scope
        self._send = send
        self._head = RequestHead(scope["headers"])
        self._body = RequestBody(receive, self._head.declared_bytes)
        self._task: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._exchange: GuardedExchange | None = None
        self._engine: ProxiedEngine | None = None
        self._connection: EngineConnection | None = None
        self._ending: Ending | None = None
        self._head_sent = False
        self._first_pieces = _FIRST_PIECES

    async def run(self) -> None:
        """Relay to the end. Where the client was told too much already, it is cut off."""
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
            await self.answer(STOPPING)

    def interrupt(self, ending: Ending) -> None:
        """End the exchange now, wherever it stands; nothing once it is over."""
        if self._ending is None and self._task is not None:
            self._end(ending)
            self._task.cancel()

    async def answer(self, own: OwnAnswer) -> None:
        """Answer in the engine's place; nothing where an answer has begun."""
        if self._head_sent:
            return
        body = own.body
        await self._send_head(own.status, own.headers(len(body)))
        await self._send_body(body, more=False)

    def _leave(self) -> None:
        self._end(Ending.REFUSED)
        self._release()
        # With the whole answer sent the watcher ends by itself.
        if self._watcher is not None and self._ending is not Ending.COMPLETE:
            self._watcher.cancel()

    def _end(self, ending: Ending, at_s: float | None = None) -> bytes:
        """The exchange has ended, if it had not; returns the last bytes for the client."""
        if self._ending is not None:
            return b""
        self._ending = ending
        if self._exchange is None:
            return b""
        return self._exchange.ended(
            ending, self._parts.clocks.monotonic() if at_s is None else at_s
        )

    def _release(self) -> None:
        """Give the connection back, or close it at once where it cannot carry another request."""
        if self._engine is None:
            return
        if self._connection is not None:
            if self._body.left:
                self._connection.abort()
            self._parts.pools[self._engine.name].give_back(self._connection)
            self._connection = None
        self._parts.choice.outstanding[self._engine.name] -= 1
        self._engine = None

    # The request

    async def _relay(self) -> None:
        if b"websocket" in self._head.upgrades:
            await self._answer_for(Ending.REFUSED, NO_WEBSOCKET)
            return
        body = await self._take_request()
        if body is None:
            self._end(Ending.CLIENT_GONE)
            return
        connection = await self._reach()
        if connection is not None:
            self._send_request(connection, body)
            self._watcher = asyncio.create_task(self._watch(connection))
            if self._exchange is not None:
                self._exchange.catch_up()
            await self._relay_answer(connection)

    async def _take_request(self) -> bytes | None:
        """The body, or its beginning, with the measurement begun; None where the client left."""
        scope, clocks, measuring = self._scope, self._parts.clocks, self._parts.measuring
        if measuring is None or not measuring.wants(scope["method"], scope["path"]):
            return await self._body.take(0)
        at, at_s = clocks.now(), clocks.monotonic()
        limit_bytes = self._parts.limits.measured_body_bytes
        fits = (self._body.declared_bytes or 0) <= limit_bytes
        body = await self._body.take(limit_bytes if fits else 0)
        if body is not None:
            self._exchange = measuring.begin(
                Arrival(
                    method=scope["method"],
                    path=scope["path"],
                    headers=scope["headers"],
                    body=None if self._body.left else body,
                    at=at,
                    at_s=at_s,
                )
            )
        return body

    async def _reach(self) -> EngineConnection | None:
        """A connection to the best engine that can be had; None where the client was told why."""
        told: OwnAnswer | None = None
        for engine in self._candidates()[:_TRIES]:
            self._engine = engine
            self._parts.choice.outstanding[engine.name] += 1
            pool = self._parts.pools[engine.name]
            try:
                self._connection = pool.take() or await pool.connect()
            except TimeoutError:
                told = too_slow(engine.name, "take a connection", self._parts.limits.connect_s)
            except OSError as error:
                told = unreachable(engine.name, error.strerror or str(error))
            else:
                if self._exchange is not None:
                    self._exchange.routed(engine.name)
                return self._connection
            self._release()
        assert told is not None
        await self._answer_for(Ending.UNREACHABLE, told)
        return None

    @property
    def _pool(self) -> EnginePool:
        assert self._engine is not None, "an engine was chosen"
        return self._parts.pools[self._engine.name]

    def _candidates(self) -> Sequence[ProxiedEngine]:
        choice = self._parts.choice
        try:
            return choice.ranked(None if self._exchange is None else self._exchange.model)
        except Exception:
            self._parts.on_failure("choose")
            return choice.unranked()

    def _send_request(self, connection: EngineConnection, body: bytes) -> None:
        put: Sequence[tuple[bytes, bytes]] = ()
        if self._exchange is not None:
            put = self._exchange.headers
            if self._body.left:
                self._exchange.sent(len(body))
            elif self._exchange.body is not None:
                body = self._exchange.body
        head = engine_head(self._scope, self._head, self._pool, put, self._body.frame(len(body)))
        bodyless = self._scope["method"] == "HEAD"
        connection.send_request(head + self._body.framed(body), bodyless=bodyless)

    async def _watch(self, connection: EngineConnection) -> None:
        """Relay what is left of the body, and end the exchange when the client leaves."""
        sent = None if self._exchange is None else self._exchange.sent
        await self._body.relay(connection, sent)
        self.interrupt(Ending.CLIENT_GONE)

    # The answer

    async def _relay_answer(self, connection: EngineConnection) -> None:
        assert self._engine is not None
        name, limit_s = self._engine.name, self._parts.limits.answer_s
        try:
            await connection.answer(limit_s)
        except TimeoutError:
            answer = too_slow(name, "begin to answer", limit_s or 0.0)
            await self._answer_for(Ending.TIMEOUT, answer)
        except ConnectionError as error:
            await self._answer_for(Ending.UNREACHABLE, unreachable(name, str(error)))
        else:
            await self._send_engine_head(connection)
            await self._relay_body(connection)

    async def _answer_for(self, ending: Ending, own: OwnAnswer) -> None:
        """End without an answer of the engine, and tell the client."""
        self._end(ending)
        self._release()
        await self.answer(own)

    async def _send_engine_head(self, connection: EngineConnection) -> None:
        status = connection.status or 0
        headers: RawHeaders = connection.headers
        if self._exchange is not None:
            headers = self._exchange.answered(status, headers, connection.head_at_s)
        lines = for_client(status, headers)
        if status in _LOCATED and self._head.host is not None:
            proxy = self._scope["scheme"].encode() + b"://" + self._head.host
            lines = at_proxy(lines, self._pool.origin, proxy)
        if self._head.upgrades:
            # The server's parser has stopped at the client's wish for another protocol.
            lines.append((b"connection", b"close"))
        await self._send_head(status, lines)

    async def _relay_body(self, connection: EngineConnection) -> None:
        """Relay the pieces as they come; without an end of the answer there is none for the client.

        Returning without it makes the server close the connection of the client, who so sees that
        the answer is not whole.
        """
        gap_s, exchange = self._parts.limits.gap_s, self._exchange
        try:
            while True:
                reads = await connection.read(gap_s)
                data = _joined(reads) if exchange is None else exchange.chunks(reads)
                if connection.complete:
                    break
                await self._send_on(data)
        except TimeoutError:
            rest = self._end(Ending.TIMEOUT)
        except ConnectionError:
            rest = self._end(Ending.ENGINE_GONE)
        else:
            data += self._end(Ending.COMPLETE, connection.read_at_s)
            self._release()
            await self._send_body(data, more=False)
            return
        self._release()
        if rest:
            await self._send_body(rest, more=True)

    async def _send_on(self, data: bytes) -> None:
        if data:
            await self._send_body(data, more=True)
        if self._exchange is not None and self._first_pieces:
            self._first_pieces -= 1
            self._exchange.catch_up()

    # To the client

    async def _send_head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self._head_sent = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def _send_body(self, data: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


def _joined(reads: Reads) -> bytes:
    return reads[0][0] if len(reads) == 1 else b"".join([data for data, _ in reads])
