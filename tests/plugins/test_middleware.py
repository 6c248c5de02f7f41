"""The middleware of vLLM's front, called as uvicorn calls it: what it reports of each request."""

import asyncio
import json
import multiprocessing
import socket
import time
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
from goodput_agent_vllm import deferred, held_figures, watched_request
from goodput_agent_vllm import front as fronts
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Message, Receive, Scope, Send
from goodput_agent_vllm.watched_request import ShortWaits, kernel_wait_s

from agent.records.request import Status, Vantage
from tests.plugins.asgi_calls import (
    CHAT,
    STREAM,
    STREAM_BODY,
    WHOLE_ANSWER,
    WHOLE_BODY,
    WITHIN_S,
    Agent,
    Call,
    Engine,
    event,
    named,
    play,
    respond,
    view,
    whole_body,
)
from tests.real_parts.waiting import eventually

JSON: dict[str, Any] = {"body": (WHOLE_ANSWER,), "kind": "application/json"}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a time waits for a short one."""
    for module in (fronts, held_figures):
        monkeypatch.setattr(module, "WAIT_S", 0.02)
    monkeypatch.setattr(held_figures, "HELD_S", 0.02)
    monkeypatch.setattr(fronts, "_COUNTS_EVERY_S", 0.02)


def test_a_stream_is_one_record_with_both_views(tmp_path: Path) -> None:
    async def stream(agent: Agent, engine: Engine, app: App) -> None:
        call = Call(headers=[("x-request-id", "mine"), ("x-api-key", "sk-1")])
        await call.through(app)
        served = await agent.only_served()
        record = served.record
        assert (record.status, record.http_status, record.finish_reason) == (Status.OK, 200, "stop")
        assert (record.vantage, record.request_id, record.route) == (Vantage.PROXY, "mine", CHAT)
        assert record.tenant is not None
        assert record.tenant.startswith("key-")
        assert view(served).response_id == "chatcmpl-x"
        assert view(served).input_bytes == len(STREAM_BODY)
        assert view(served).output_bytes == len(b"".join(STREAM))
        assert view(served).gaps is not None
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert 0 < record.ttft_s <= record.e2e_s
        assert [each.request_id for each in served.choices] == ["chatcmpl-x"]
        assert not served.proxied

    play(tmp_path, stream)


def test_a_long_stream_is_read_while_it_passes_and_each_token_counts(tmp_path: Path) -> None:
    kept: list[int] = []

    async def long(agent: Agent, engine: Engine, app: App) -> None:
        front = fronts.shared_front()
        call = Call()

        async def send(message: Message) -> None:
            (request,) = front._open
            kept.append(len(request._pieces))

        await app(call.scope, call.receive, send)
        served = await agent.only_served()
        assert sum((view(served).gaps or {}).values()) == 99
        assert view(served).output_bytes == len(b"".join(body))

    body = (
        *(event(f" w{number}") for number in range(100)),
        event("", "stop"),
        b"data: [DONE]\n\n",
    )
    play(tmp_path, long, body=body)
    assert 0 < max(kept) < 2 * watched_request._READ_TOGETHER


def test_client_and_application_get_the_very_messages(tmp_path: Path) -> None:
    async def messages(agent: Agent, engine: Engine, app: App) -> None:
        call = Call([STREAM_BODY[:9], STREAM_BODY[9:]])
        received: list[Message] = []
        given: list[Message] = []

        async def receive() -> Message:
            received.append(await call.receive())
            return received[-1]

        async def echo(scope: Scope, receive: Receive, send: Send) -> None:
            for number in range(2):
                assert await receive() is received[number]
            given.append({"type": "http.response.start", "status": 200, "headers": []})
            given.append({"type": "http.response.body", "body": b"a", "more_body": True})
            given.append({"type": "http.response.body"})
            for message in given:
                await send(message)

        await GoodputMiddleware(echo)(call.scope, receive, call.send)
        assert [id(message) for message in call.sent] == [id(message) for message in given]
        served = await agent.only_served()
        assert (served.record.status, view(served).output_bytes) == (Status.OK, 1)

    play(tmp_path, messages)


@pytest.mark.parametrize("sent", [None, "broken", f"00-{'1' * 32}-{'2' * 16}-00"])
def test_the_application_gets_the_clients_headers_and_a_trace_alone(
    tmp_path: Path, sent: str | None
) -> None:
    own = [("x-a", "1"), ("authorization", "Bearer k"), ("x-a", "2")]
    own += [("traceparent", sent)] if sent else []

    async def headers(agent: Agent, engine: Engine, app: App) -> None:
        call = Call(headers=own)
        before = dict(call.scope)
        await call.through(app)
        assert call.scope == before
        (seen,) = engine.seen
        served = await agent.only_served()
        more = list(seen.pop("headers"))[len(own) :]
        for own_key in (watched_request.WATCHED, watched_request.ENGINE_REQUEST):
            del seen[own_key]
        assert seen == {name: value for name, value in before.items() if name != "headers"}
        record = served.record
        value = f"00-{record.trace_id}-{record.span_id}-01".encode()
        assert more == ([] if sent else [(b"traceparent", value)])
        if sent and sent != "broken":
            assert (record.trace_id, record.parent_span_id) == ("1" * 32, "2" * 16)

    play(tmp_path, headers)


def test_a_request_of_the_agents_proxy_says_so(tmp_path: Path) -> None:
    async def proxied(agent: Agent, engine: Engine, app: App) -> None:
        await Call(headers=[("tracestate", "a=b,goodput=proxied")]).through(app)
        assert (await agent.only_served()).proxied

    play(tmp_path, proxied)


def test_a_body_may_come_in_many_pieces(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "n": 2, "messages": [], "user": "u" * 999}).encode()

    async def pieces(agent: Agent, engine: Engine, app: App) -> None:
        await Call([body[at : at + 1] for at in range(len(body))]).through(app)
        assert engine.bodies == [body]
        served = await agent.only_served()
        assert (view(served).choices, view(served).input_bytes) == (2, len(body))

    play(tmp_path, pieces, **JSON)


def test_a_body_beyond_the_limit_is_not_kept_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_request, "MAX_BODY_BYTES", 100)

    async def large(agent: Agent, engine: Engine, app: App) -> None:
        await Call([b"x" * 60] * 5).through(app)
        assert engine.bodies == [b"x" * 300]
        served = await agent.only_served()
        # The response has the model, too.
        assert (served.record.model, served.record.status) == ("m", Status.OK)
        assert (view(served).choices, view(served).input_bytes) == (None, 300)
        await agent.until(lambda: agent.counts)
        assert agent.counts == {("body_not_read", 0): 1}

    play(tmp_path, large)


def test_a_prefix_is_no_part_of_the_route(tmp_path: Path) -> None:
    async def prefixed(agent: Agent, engine: Engine, app: App) -> None:
        await Call(path=f"/llm{CHAT}", root_path="/llm").through(app)
        assert (await agent.only_served()).record.route == CHAT

    play(tmp_path, prefixed)


def test_http_1_0_is_measured(tmp_path: Path) -> None:
    async def old(agent: Agent, engine: Engine, app: App) -> None:
        await Call(http_version="1.0").through(app)
        assert (await agent.only_served()).record.status is Status.OK

    play(tmp_path, old)


# Clients that leave

HEAD = [(b"content-type", b"text/event-stream")]
START: Message = {"type": "http.response.start", "status": 200, "headers": HEAD}
FIRST: Message = {"type": "http.response.body", "body": event("a"), "more_body": True}


def leaving(call: Call, before: int) -> App:
    """An application whose client leaves before the message of this number."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, "chatcmpl-x")
        messages = [START]
        messages += [{"type": "http.response.body", "body": e, "more_body": True} for e in STREAM]
        messages.append({"type": "http.response.body", "body": b"", "more_body": False})
        for number, message in enumerate(messages):
            if number == before:
                call.gone.set()
                assert (await receive())["type"] == "http.disconnect"
            await send(message)

    return app


@pytest.mark.parametrize(
    ("before", "status", "http_status", "error", "tokens"),
    [
        # Before the head, before the first token, in the stream.
        (0, Status.CANCELLED, None, "client_gone", False),
        (1, Status.CANCELLED, 200, "client_gone", False),
        (2, Status.CANCELLED, 200, "client_gone", True),
        # After the reason, as with the proxy; after [DONE]; after the end.
        (4, Status.CANCELLED, 200, "client_gone", True),
        (5, Status.OK, 200, None, True),
        (6, Status.OK, 200, None, True),
    ],
)
def test_a_client_may_leave_at_any_stage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: int,
    status: Status,
    http_status: int,
    error: str | None,
    tokens: bool,
) -> None:
    # The figures come, sooner or later.
    monkeypatch.setattr(held_figures, "WAIT_S", WITHIN_S)

    async def left(agent: Agent, engine: Engine, app: App) -> None:
        call, began_at = Call(), time.time()
        await call.through(GoodputMiddleware(leaving(call, before)))
        engine.end("chatcmpl-x", began_at, finish_reason="abort")
        served = await agent.only_served()
        record = served.record
        assert (record.status, record.http_status) == (status, http_status)
        assert view(served).error == error
        assert (record.ttft_s is not None) == tokens
        assert [each.finish_reason for each in served.choices] == ["abort"]

    play(tmp_path, left)


def test_a_client_may_leave_before_the_end_of_its_body(tmp_path: Path) -> None:
    async def left(agent: Agent, engine: Engine, app: App) -> None:
        async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
            assert (await receive())["more_body"]
            assert (await receive())["type"] == "http.disconnect"
            await respond(send, [b"{}"], status=400)

        call = Call([b"{", b"never"])
        call.gone.set()

        async def receive() -> Message:
            message = await Call.receive(call)
            return {"type": "http.disconnect"} if message.get("body") == b"never" else message

        await GoodputMiddleware(refusing)(call.scope, receive, call.send)
        served = await agent.only_served()
        assert (served.record.status, served.record.http_status) == (Status.CANCELLED, None)
        assert view(served).error == "client_gone"

    play(tmp_path, left)


def test_a_client_may_leave_an_application_that_does_not_ask(tmp_path: Path) -> None:
    """uvicorn knows, and takes what is sent without an error."""

    async def left(agent: Agent, engine: Engine, app: App) -> None:
        call = Call()
        call.disconnected = True  # type: ignore[attr-defined]
        await call.through(app)
        record = (await agent.only_served()).record
        assert (record.status, record.http_status) == (Status.CANCELLED, None)

    play(tmp_path, left)


# Applications that fail


@pytest.mark.parametrize(
    ("raised", "sends", "status", "http_status", "error"),
    [
        # The server outside of all middlewares answers an error, and not a task that is cancelled.
        (RuntimeError("no"), (), Status.ERROR, 500, "http_500"),
        (asyncio.CancelledError(), (), Status.ERROR, None, "engine_gone"),
        *(
            (raised, sends, Status.ERROR, 200, "engine_gone")
            for raised in (RuntimeError("no"), asyncio.CancelledError())
            for sends in ((START,), (START, FIRST))
        ),
    ],
)
def test_an_application_may_raise_at_any_stage(
    tmp_path: Path,
    sends: tuple[Message, ...],
    status: Status,
    http_status: int,
    error: str,
    raised: BaseException,
) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        for message in sends:
            await send(message)
        raise raised

    async def failed(agent: Agent, engine: Engine, app: App) -> None:
        call = Call()
        with pytest.raises(type(raised)) as found:
            await call.through(GoodputMiddleware(failing))
        assert found.value is raised
        assert call.sent == list(sends)
        served = await agent.only_served()
        assert (served.record.status, served.record.http_status) == (status, http_status)
        assert view(served).error == error

    play(tmp_path, failed)


def test_an_application_that_goes_on_after_its_response_delays_no_row(tmp_path: Path) -> None:
    async def going_on(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        await respond(send, STREAM)
        await asyncio.Event().wait()

    async def reported(agent: Agent, engine: Engine, app: App) -> None:
        serving = asyncio.create_task(Call().through(GoodputMiddleware(going_on)))
        assert (await agent.only_served()).record.status is Status.OK
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        agent.read()
        assert len(agent.served) == 1

    play(tmp_path, reported)


def test_an_application_that_returns_early_was_not_whole(tmp_path: Path) -> None:
    async def early(agent: Agent, engine: Engine, app: App) -> None:
        async def stopping(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            await send(START)

        await Call().through(GoodputMiddleware(stopping))
        assert view(await agent.only_served()).error == "engine_gone"

    play(tmp_path, early)


@pytest.mark.parametrize(
    ("http_status", "status"),
    [
        (400, Status.INVALID),
        (401, Status.INVALID),
        (429, Status.THROTTLED),
        (503, Status.THROTTLED),
    ],
)
def test_a_request_may_be_refused_before_its_body_is_read(
    tmp_path: Path, http_status: int, status: Status
) -> None:
    async def refused(agent: Agent, engine: Engine, app: App) -> None:
        async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, [b"{}"], status=http_status, kind="application/json")

        await Call([WHOLE_BODY]).through(GoodputMiddleware(refusing))
        served = await agent.only_served()
        assert (served.record.status, served.record.http_status) == (status, http_status)

    play(tmp_path, refused)


# What is not measured


def test_other_methods_and_paths_are_counted(tmp_path: Path) -> None:
    async def counted(agent: Agent, engine: Engine, app: App) -> None:
        for method, path in (
            ("HEAD", CHAT),
            ("GET", CHAT),
            ("POST", f"{CHAT}/"),
            ("POST", "/scan"),
            ("GET", "/metrics"),
        ):
            await Call([b""], path=path, method=method).through(app)
        routed = SimpleRoute("/tokenize")
        await Call([b""], path="/tokenize", route=routed).through(app)
        await agent.until(lambda: sum(agent.counts.values()) >= 6)
        assert agent.counts == {("other", 2): 4, ("/metrics", 2): 1, ("/tokenize", 2): 1}
        assert agent.served == []

    play(tmp_path, counted, **JSON)


class SimpleRoute:
    """A route as Starlette notes it in the scope."""

    def __init__(self, path: str) -> None:
        self.path = path


def test_a_websocket_passes(tmp_path: Path) -> None:
    async def passes(agent: Agent, engine: Engine, app: App) -> None:
        seen: list[tuple[Scope, Receive, Send]] = []

        async def noting(scope: Scope, receive: Receive, send: Send) -> None:
            seen.append((scope, receive, send))

        call = Call(type="websocket", path=CHAT)
        receive, send = call.receive, call.send
        await GoodputMiddleware(noting)(call.scope, receive, send)
        ((scope, *others),) = seen
        assert scope is call.scope
        assert others == [receive, send]

    play(tmp_path, passes)


def test_two_instances_count_once(tmp_path: Path) -> None:
    async def twice(agent: Agent, engine: Engine, app: App) -> None:
        await Call().through(GoodputMiddleware(app))
        await Call([b""], path="/metrics", method="GET").through(GoodputMiddleware(app))
        await agent.until(lambda: agent.counts)
        assert len(agent.served) == 1
        assert agent.counts == {("/metrics", 2): 1}
        (added,) = [name for name, _ in engine.seen[0]["headers"]]
        assert added == b"traceparent"

    play(tmp_path, twice)


def test_the_end_of_the_front_sends_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fronts, held_figures):
        monkeypatch.setattr(module, "WAIT_S", 999.0)
    monkeypatch.setattr(held_figures, "HELD_S", 999.0)
    monkeypatch.setattr(fronts, "_COUNTS_EVERY_S", 999.0)

    async def ended(agent: Agent, engine: Engine, app: App) -> None:
        engine.reporter._sender._pause_s = 999.0
        engine.end("another", time.time())
        # Its figures never come.
        await Call([WHOLE_BODY]).through(GoodputMiddleware(unfinished))
        await Call([b""], path="/metrics", method="GET").through(app)
        agent.read()
        assert not agent.records
        await Call(type="lifespan").through(GoodputMiddleware(lifespan))
        agent.read()
        assert [served.record.http_status for served in agent.served] == [200]
        assert agent.figures == ["another"]
        assert agent.counts == {("/metrics", 2): 1}
        assert not list(tmp_path.glob("*.open"))

    async def unfinished(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, "chatcmpl-x")
        await respond(send, **JSON)

    async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})

    play(tmp_path, ended)


def test_a_request_begins_when_its_bytes_came_not_when_the_front_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_request, "kernel_wait_s", lambda _: 2.0)

    async def waited(agent: Agent, engine: Engine, app: App) -> None:
        read_at = time.time()
        await Call().through(app)
        record = (await agent.only_served()).record
        assert record.started_at <= time.time() - 2.0
        assert record.ended_at >= read_at
        assert record.ttft_s is not None
        assert record.e2e_s is not None
        assert 2.0 <= record.ttft_s <= record.e2e_s < 2.0 + time.time() - read_at

    play(tmp_path, waited)


def test_the_kernel_tells_how_long_bytes_wait_to_be_read() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
        listening.accept()[0] as connection,
    ):
        client.sendall(b"POST / HTTP/1.1")
        cycle = SimpleNamespace(transport=SimpleNamespace(get_extra_info=lambda _: connection))
        receive = MethodType(Call.receive, cycle)
        sent_s = time.monotonic()
        # As time passes, without a read.
        waited_s = eventually(
            lambda: (wait := kernel_wait_s(receive)) > 0.02 and wait,
            within_s=10.0,
            what="a wait",
        )
        # The step of the kernel's clock is 4 ms.
        assert waited_s <= time.monotonic() - sent_s + 0.005


def test_waits_within_a_tick_of_the_kernels_clock_count_with_their_mean(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_request, "_TICK_S", 0.004)
    waits = ShortWaits()
    # A quarter of a millisecond holds a tick once in sixteen times.
    for number in range(4000):
        waits.likely_s(0.004 if number % 16 == 0 else 0.0)
    assert waits.likely_s(0.0) == pytest.approx(0.00025, rel=0.1)
    assert waits.likely_s(0.004) == pytest.approx(0.00025, rel=0.1)
    assert waits.likely_s(0.02) == 0.02
    assert waits.likely_s(0.0) == pytest.approx(0.00025, rel=0.1)


def test_waits_of_a_busy_front_count_as_they_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watched_request, "_TICK_S", 0.004)
    waits = ShortWaits()
    for number in range(2000):
        waits.likely_s(0.004 if number % 2 else 0.0)
    assert (waits.likely_s(0.0), waits.likely_s(0.004)) == (0.0, 0.004)


def test_a_shutdown_reports_responses_that_just_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred, "WITHIN_S", 3600.0)

    async def lifespan(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.shutdown.complete"})

    async def stopped(agent: Agent, engine: Engine, app: App) -> None:
        call = Call()
        await app(call.scope, call.receive, call.send)
        agent.read()
        assert agent.served == []
        await Call(type="lifespan").through(GoodputMiddleware(lifespan))
        agent.read()
        assert len(agent.served) == 1

    play(tmp_path, stopped)


def test_requests_of_a_forked_front_have_ids_of_their_own() -> None:
    watched_request._prepare_ids()
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(
        target=lambda: theirs.send(watched_request.Trace(()).trace_id)
    )
    child.start()
    assert ours.poll(WITHIN_S)
    assert ours.recv() != watched_request.Trace(()).trace_id
    child.join()


def test_each_request_has_a_trace_of_its_own() -> None:
    traces = []
    for _ in range(4):
        watched_request._prepare_ids()
        traces += [watched_request.Trace(()) for _ in range(2)]
    assert len({each.trace_id for each in traces}) == len({each.span_id for each in traces}) == 8
