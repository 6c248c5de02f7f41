"""Relays one request to an engine and the response to the client."""

import asyncio
from collections.abc import Callable, Sequence

from agent.catalog.reasons import EjectionReason, ProxyFailure
from agent.sources.proxy.client_response import (
    NO_WEBSOCKET,
    PROXY_FAILED,
    STOPPING,
    ClientResponse,
    ErrorResponse,
    RelayClient,
    timed_out,
    unreachable,
)
from agent.sources.proxy.engine_connection import ConnectionPool, EngineConnection
from agent.sources.proxy.engine_request import BodyBuffer, BodyFraming, ClientRequest, engine_head
from agent.sources.proxy.exchange import Arrival, Ending, GuardedExchange, RawHeaders
from agent.sources.proxy.headers import (
    RequestHead,
    for_client,
    redirect_to_proxy,
    retry_after,
    with_added,
)
from agent.sources.proxy.load_balancer import FAILED, THROTTLING, Attempt, ProxiedEngine
from agent.sources.proxy.relay_context import RelayContext

# Engines that are tried for one request, as long as no engine got any of it.
_ENGINES_TRIED = 2
# The engine did not take the request (RFC 9110 15.6.4), so another one may.
_NOT_TAKEN = 503
_NOT_FOUND = 404
# A 404 of this path may mean an earlier response that the request names.
_RESPONSES = "/v1/responses"
# RFC 9110 10.2.2: statuses with a meaning for `location`.
_LOCATED = frozenset((201, *range(300, 400)))
# The first of so many events need not wait until all of them are looked at.
_MANY_EVENTS_BYTES = 4096
_EVENT_END = b"\n\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Relay:
    """One exchange. Its client and its engine's connection call it when something came.

    It tells the context when the exchange is over. `ending` is None until then. `response` is None
    until the client gets one.
    """

    __slots__ = (
        "_arrived",
        "_attempt",
        "_body",
        "_buffer",
        "_buffered",
        "_client",
        "_connecting",
        "_connection",
        "_context",
        "_exchange",
        "_first_passed",
        "_framing",
        "_head",
        "_kept",
        "_last",
        "_pool",
        "_recorded",
        "_resumed_s",
        "_retried",
        "_reused",
        "_started",
        "_status",
        "_timer",
        "_unsent",
        "ending",
        "request",
        "response",
    )

    def __init__(self, context: RelayContext, client: RelayClient, request: ClientRequest) -> None:
        self._context = context
        self._client = client
        self.request = request
        self.response: ClientResponse | None = None
        self._head = RequestHead(request.headers)
        self._buffer: BodyBuffer | None = None
        self._framing: BodyFraming | None = None
        # When the request came, if it is measured.
        self._arrived: tuple[float, float] | None = None
        self._started = False
        # Whether all of the body was there before the request was sent, and whether the engine
        # has yet to get a part of it.
        self._buffered = False
        self._unsent = True
        self._body = b""
        # The body, while the request may have to be sent again.
        self._kept: bytes | None = None
        self._exchange: GuardedExchange | None = None
        self._attempt: Attempt | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._pool: ConnectionPool | None = None
        self._connection: EngineConnection | None = None
        self._reused = self._retried = self._first_passed = self._recorded = False
        self._status = 0
        self._resumed_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        # The last piece and its time, if it was not measured before it was sent.
        self._last: tuple[bytes, float] = (b"", 0.0)
        self.ending: Ending | None = None

    # From the client

    def begin(self) -> None:
        """Take the head of the request, and what came of its body."""
        context, request = self._context, self.request
        if b"websocket" in self._head.upgrades:
            self._refuse(Ending.REFUSED, NO_WEBSOCKET)
            return
        if self._head.awaits_continue:
            self._client.transport.write(_CONTINUE)
        measuring = context.measuring
        if measuring is not None and measuring.wants(request.method, request.path):
            self._arrived = context.clocks.now(), context.clocks.monotonic()
        self.take_body()

    def take_body(self) -> None:
        """Take more of the body, or its end."""
        request = self.request
        if self.ending is not None:
            return
        if self._started:
            self._send_more()
        elif request.whole or not self._waits_for_body():
            self._start()

    def leave(self) -> None:
        """End the exchange of a client that left."""
        if self.ending is not None:
            return
        if not self._started and self._arrived is not None:
            self._measure(client_left=True)
            if self._exchange is not None:
                self._exchange.sent(len(self._body))
        self.interrupt(Ending.CLIENT_GONE)

    def client_takes(self, *, more: bool) -> None:
        """Read from the engine as fast as the client takes the response."""
        if self._connection is not None:
            self._resumed_s = self._context.clocks.monotonic()
            self._connection.pause_reading(not more)

    def interrupt(self, ending: Ending) -> None:
        """End the exchange now; does nothing if it is over."""
        if self.ending is not None:
            return
        self._end(ending)
        if ending is Ending.REFUSED:
            self._refuse(ending, STOPPING)

    def refuse(self, error: ErrorResponse) -> None:
        """Respond without an engine."""
        self._refuse(Ending.REFUSED, error)

    def fault(self) -> None:
        """End the exchange after an exception, which is being handled."""
        self._context.on_failure(ProxyFailure.RELAY)
        self._refuse(Ending.REFUSED, PROXY_FAILED)

    # The end

    def _end(self, ending: Ending, at_s: float | None = None) -> bytes:
        """End the exchange unless it has ended; return the last bytes for the client."""
        if self.ending is not None:
            return b""
        rest = self._end_measuring(ending, at_s)
        self._leave(ending)
        return rest

    def _end_measuring(self, ending: Ending, at_s: float | None) -> bytes:
        if self._exchange is None or self._recorded:
            return b""
        self._recorded = True
        now_s = self._context.clocks.monotonic() if at_s is None else at_s
        return self._exchange.ended(ending, now_s)

    def _leave(self, ending: Ending) -> None:
        """Free everything that the exchange has."""
        self.ending = ending
        self._cancel_timer()
        if self._connecting is not None:
            self._connecting.cancel()
        self._release()
        self._free_buffer()
        self._forget_body()
        self.request.drop_body()
        self._client.hold(False)
        self._context.ended(self)

    def _free_buffer(self) -> None:
        """Give the memory of the body back: it went to the engine, or nowhere."""
        if self._buffer is not None:
            self._buffer.free()

    def _release(self) -> None:
        """Give the connection back to the pool, or close it if it cannot be reused."""
        connection, self._connection = self._connection, None
        if connection is not None and self._pool is not None:
            if self._unsent:
                connection.abort()
            self._pool.give_back(connection)
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.close()

    def _refuse(self, ending: Ending, error: ErrorResponse) -> None:
        """End the exchange; the client gets an error, or sees that its response broke off."""
        self._end(ending)
        if self.response is not None:
            self._cut()
            return
        body = error.body
        self._begin_response(error.status, error.headers(len(body))).end(body)
        self._client.finish(self.request)

    def _begin_response(self, status: int, lines: RawHeaders) -> ClientResponse:
        if self._exchange is not None:
            lines = with_added(lines, self._exchange.added_headers)
        self.response = ClientResponse(self._client.transport, self.request, status, lines)
        return self.response

    def _cut(self, rest: bytes = b"") -> None:
        """Close the client's connection, so that it sees that its response broke off."""
        if self.response is not None:
            self.response.send(rest)
            self.response.flush()
        self._client.transport.close()

    def _set_timer(self, after_s: float, call: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(after_s, self._guarded, call)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            self.fault()

    # The request

    def _waits_for_body(self) -> bool:
        size_bytes = len(self.request.body)
        if self._arrived is None or not size_bytes:
            return not size_bytes
        if self._buffer is None:
            self._buffer = BodyBuffer(self._context.limits, self._context.body_memory)
        if not self._buffer.waits_for_more(size_bytes, self._head.declared_bytes):
            return False
        if self._timer is None:
            # So slow a client must not keep the memory: the rest passes as it arrives.
            self._set_timer(self._context.limits.body_s, self._start)
        return True

    def _start(self) -> None:
        """Send the request to an engine."""
        self._started = True
        self._buffered = self.request.whole
        self._cancel_timer()
        if self._arrived is None:
            self._body = self.request.take_body()
        else:
            self._measure(client_left=False)
        self._connect(self._candidates()[:_ENGINES_TRIED])

    def _measure(self, *, client_left: bool) -> None:
        """Start measuring."""
        request, measuring = self.request, self._context.measuring
        assert measuring is not None
        assert self._arrived is not None
        self._body = request.take_body()
        self._exchange = exchange = measuring.begin(
            Arrival(
                method=request.method,
                path=request.path,
                headers=request.headers,
                body=self._body if self._buffered else None,
                at=self._arrived[0],
                at_s=self._arrived[1],
                client_left=client_left,
            )
        )
        if exchange is not None:
            self._body = exchange.take_body() or self._body

    def _candidates(self, but: ProxiedEngine | None = None) -> Sequence[ProxiedEngine]:
        balancer = self._context.balancer
        if len(balancer.engines) > 1:
            # The choice takes into account how all earlier requests ended.
            self._context.deferred.finish()
        model = None if self._exchange is None else self._exchange.model
        try:
            return balancer.candidates(model, probes=self._counts, but=but)
        except Exception:
            self._context.on_failure(ProxyFailure.CHOOSE)
            return () if but else balancer.engines

    @property
    def _counts(self) -> bool:
        """Whether the response says something of the engine."""
        return self.request.method == "POST"

    def _connect(self, engines: Sequence[ProxiedEngine]) -> None:
        """Send the request to the first engine, over an idle connection if there is one."""
        connection = self._context.pools[engines[0].name].take()
        self._reused = connection is not None
        if connection is not None:
            self._send(engines[0], connection)
            return
        self._client.hold(not self.request.whole)
        self._connecting = asyncio.get_running_loop().create_task(self._open_guarded(engines))

    async def _open_guarded(self, engines: Sequence[ProxiedEngine]) -> None:
        try:
            await self._open(engines)
        except Exception:
            self.fault()

    async def _open(self, engines: Sequence[ProxiedEngine]) -> None:
        """Send the request to the first engine that can be reached, over a new connection."""
        failed, limit_s = None, self._context.limits.connect_s
        for engine in engines:
            pool = self._context.pools[engine.name]
            attempt = self._begin_attempt(engine)
            try:
                # The first engine had no idle connection.
                connection = None if engine is engines[0] else pool.take()
                self._reused = connection is not None
                connection = connection or await pool.connect()
            except TimeoutError:
                failed = Ending.TIMEOUT, timed_out(engine.name, "accept a connection", limit_s)
            except OSError as error:
                gone = unreachable(engine.name, error.strerror or str(error))
                failed = Ending.UNREACHABLE, gone
            else:
                self._connecting = None
                self._send(engine, connection)
                return
            attempt.failed(EjectionReason.UNREACHABLE)
            self._release()
        self._connecting = None
        assert failed is not None
        self._refuse(*failed)

    def _begin_attempt(self, engine: ProxiedEngine) -> Attempt:
        self._attempt = attempt = Attempt(self._context.balancer, engine, counts=self._counts)
        if self._exchange is not None:
            self._exchange.routed(engine.name)
        return attempt

    def _send(self, engine: ProxiedEngine, connection: EngineConnection) -> None:
        """Write the request, then do what the engine need not wait for."""
        request, exchange, body = self.request, self._exchange, self._body
        self._pool, self._connection = self._context.pools[engine.name], connection
        whole = request.whole and not request.body
        self._framing = BodyFraming(len(body), self._head.declared_bytes, whole=whole)
        replacements: RawHeaders = () if exchange is None else exchange.headers
        lines = self._head.for_engine(replacements, self._client.address, self._client.scheme)
        head = engine_head(request, lines, self._pool, self._framing)
        data = b"".join((*head, self._framing.framed(body, last=whole)))
        connection.send_request(self, data, bodyless=request.method == "HEAD")
        self._unsent = not whole
        attempt = self._attempt or self._begin_attempt(engine)
        attempt.sent(connection)
        self._keep(body)
        # A large body must not stay in memory while its response passes.
        self._body = b""
        if self._context.limits.answer_s is not None:
            self._set_timer(self._context.limits.answer_s, self._answers_late)
        if exchange is not None:
            if not self._buffered:
                exchange.sent(len(body))
            exchange.catch_up()
        if not connection.writing_paused:
            self.engine_takes(more=True)
        self._send_more()

    def _keep(self, body: bytes) -> None:
        """Keep the body of a generation request for another engine, if there is memory."""
        several = len(self._context.balancer.engines) > 1
        known = several and self._exchange is not None and self._buffered
        if known and self._kept is None and self._context.kept_memory.take(0, len(body)):
            self._kept = body

    def _forget_body(self) -> None:
        if self._kept is not None:
            self._context.kept_memory.give_back(len(self._kept))
            self._kept = None

    def _send_more(self) -> None:
        """Relay what came of the body after the request was sent."""
        connection, request = self._connection, self.request
        if connection is None or self._framing is None or not self._unsent:
            return
        data, self._unsent = request.take_body(), not request.whole
        connection.write(self._framing.framed(data, last=not self._unsent))
        if self._exchange is not None and data:
            self._exchange.sent(len(data))

    def engine_takes(self, *, more: bool) -> None:
        """Read from the client as fast as the engine takes the request."""
        if more:
            self._free_buffer()
        self._client.hold(not (more or self.request.whole))

    # The head of the response

    def take_head(self, *, alone: bool) -> None:
        """Send the head on, or the request to another engine."""
        attempt, connection = self._attempt, self._connection
        assert attempt is not None
        assert connection is not None
        self._cancel_timer()
        status = self._status = connection.status or 0
        probe = attempt.probe
        if status >= 400:
            retry_after_s = None
            if status in THROTTLING:
                retry_after_s = retry_after(connection.headers, self._context.clocks.now())
            attempt.answered(status, retry_after_s)
            if self._denies_its_model(attempt, status):
                attempt.failed(EjectionReason.ERROR, str(status))
            if self._retries(self._may_go_on(attempt, status, probe=probe)):
                return
        self._forget_body()
        response = self._begin_response(status, self._lines_for_client(connection, status))
        if self._client.writing_paused:
            # It has not taken an earlier response yet.
            connection.pause_reading(True)
        if alone:
            response.flush()
        if self._context.limits.gap_s is not None:
            self._set_timer(self._context.limits.gap_s, self._check_gap)

    def _may_go_on(self, attempt: Attempt, status: int, *, probe: bool) -> bool:
        """Whether another engine may get the request after a response with this status."""
        if status == _NOT_TAKEN or self._denies_its_model(attempt, status):
            return True
        return probe and status in FAILED

    def _denies_its_model(self, attempt: Attempt, status: int) -> bool:
        """Whether the response is a 404 for a model that the engine lists.

        Then the engine lacks the route, as after a wrong deployment; other 404s blame the request.
        """
        if status != _NOT_FOUND or self._exchange is None or self.request.path == _RESPONSES:
            return False
        return self._context.balancer.lists(attempt.engine, self._exchange.model)

    def _retries(self, may: bool) -> bool:
        """Send the request to another engine, if it may be sent again and there is one."""
        if self._kept is None or self._retried or not may or self._attempt is None:
            return False
        engines = self._candidates(but=self._attempt.engine)[:1]
        if not engines:
            return False
        self._context.balancer.retried[self._attempt.engine.name] += 1
        self._release()
        self._retried, self._body = True, self._kept
        self._connect(engines)
        return True

    def _lines_for_client(self, connection: EngineConnection, status: int) -> RawHeaders:
        headers: RawHeaders = connection.headers
        if self._exchange is not None:
            headers = self._exchange.answered(status, headers, connection.head_at_s)
        elif self._attempt is not None:
            engine = self._attempt.engine.name
            self._context.balancer.count_response(engine, self.request.path, status)
        lines = for_client(status, headers)
        if status in _LOCATED and self._head.host is not None and self._pool is not None:
            proxy = self._client.scheme.encode() + b"://" + self._head.host
            lines = redirect_to_proxy(lines, self._pool.origin, proxy)
        return lines

    def _answers_late(self) -> None:
        assert self._attempt is not None
        name, limit_s = self._attempt.engine.name, self._context.limits.answer_s or 0.0
        self._attempt.failed(EjectionReason.TIMEOUT)
        self._refuse(Ending.TIMEOUT, timed_out(name, "start its response", limit_s))

    # The body of the response

    def take_piece(self, data: bytes, at_s: float, *, ended: bool) -> None:
        """Send a piece on. The first one is measured after that."""
        exchange, response = self._exchange, self.response
        assert response is not None
        if exchange is not None and not self._first_passed:
            self._first_passed = True
            if len(data) > _MANY_EVENTS_BYTES or not ended:
                data = self._send_first(response, exchange, data, at_s)
        if ended:
            self._take_last(response, data, at_s)
        elif exchange is None:
            response.send(data)
        elif data:
            response.send(exchange.chunk(data, at_s))

    def _send_first(
        self, response: ClientResponse, exchange: GuardedExchange, data: bytes, at_s: float
    ) -> bytes:
        """Send the first piece on, or its first event if it has many; return the rest."""
        first, many = data, len(data) > _MANY_EVENTS_BYTES
        if many and (end := data.find(_EVENT_END, 0, _MANY_EVENTS_BYTES)) >= 0:
            first = data[: end + len(_EVENT_END)]
        if not exchange.passes(first):
            return data
        response.send(first)
        exchange.chunk(first, at_s)
        return data[len(first) :]

    def _take_last(self, response: ClientResponse, data: bytes, at_s: float) -> None:
        """Send the last piece on, then make the record, which no client waits for."""
        exchange, attempt = self._exchange, self._attempt
        assert attempt is not None
        if exchange is not None:
            self._last = (data, at_s)
            if not exchange.passes(data):
                self._last = (b"", at_s)
                data = exchange.chunk(data, at_s) if data else data
                if not exchange.passes(b""):
                    data += self._end_measuring(Ending.COMPLETE, at_s)
        response.end(data)
        # The result of a probe decides on the next request.
        deferred = exchange is not None and not self._recorded and not attempt.probe
        if not deferred:
            self._finish_record(attempt)
        self._leave(Ending.COMPLETE)
        if deferred:
            self._context.deferred.add(lambda: self._finish_record(attempt))
        self._client.finish(self.request)

    def _finish_record(self, attempt: Attempt) -> None:
        """Measure what the client has already, make the record, and judge the engine."""
        try:
            data, at_s = self._last
            if data and self._exchange is not None and not self._recorded:
                self._exchange.chunk(data, at_s)
            self._end_measuring(Ending.COMPLETE, at_s)
            self._judge(attempt)
        except Exception:
            self._context.on_failure(ProxyFailure.RELAY)

    def _judge(self, attempt: Attempt) -> None:
        """Say of the engine how the complete response was."""
        error_status = None if self._exchange is None else self._exchange.error_status
        if error_status is not None:
            attempt.answered(error_status, None, "in the response")
        attempt.completed(error_status or self._status)

    def _check_gap(self) -> None:
        """End a response that did not go on in time, unless its client is slow."""
        assert self._connection is not None
        assert self._attempt is not None
        gap_s = self._context.limits.gap_s or 0.0
        if self._client.writing_paused:
            self._set_timer(gap_s, self._check_gap)
            return
        since_s = max(self._connection.read_at_s, self._resumed_s)
        left_s = since_s + gap_s - self._context.clocks.monotonic()
        if left_s > 0:
            self._set_timer(left_s, self._check_gap)
            return
        self._attempt.failed(EjectionReason.TIMEOUT)
        self._cut(self._end(Ending.TIMEOUT))

    def lose(self, failure: str) -> None:
        """Take the news that no more of the response comes.

        A request that was sent on a connection which the engine had closed goes to another engine.
        If a new connection was lost, the request itself may have ended the engine. But an engine
        that fails on a probe had failed before the request came.
        """
        attempt = self._attempt
        assert attempt is not None
        if self.response is not None:
            attempt.failed(EjectionReason.RESET)
            self._cut(self._end(Ending.ENGINE_GONE))
            return
        probe = attempt.probe
        if not self._reused:
            attempt.failed(EjectionReason.RESET)
        if not self._retries(self._reused or probe):
            self._refuse(Ending.UNREACHABLE, unreachable(attempt.engine.name, failure))
