"""Whatever fails in the middleware or the agent, clients get the application's bytes."""

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from goodput_agent_vllm import front as fronts
from goodput_agent_vllm import held_figures, sending, watched_request
from goodput_agent_vllm.core import record_bytes
from goodput_agent_vllm.front import Front
from goodput_agent_vllm.held_figures import HeldFigures
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Receive, Scope, Send
from goodput_agent_vllm.reporting import MAX_ERRORS, Reporter
from goodput_agent_vllm.sending import WAITING_DATAGRAMS, Sender
from goodput_agent_vllm.watched_request import Trace, WatchedRequest

from agent.sources.proxy.measuring.measured_exchange import MeasuredExchange
from tests.plugins.asgi_calls import (
    STREAM,
    WHOLE_ANSWER,
    Agent,
    Call,
    Engine,
    named,
    play,
    respond,
    whole_body,
)

OFF = "requests are measured no more"
FAILED = "could not be measured"
BODY = b"".join(STREAM)
CALLS = MAX_ERRORS + 5


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fronts, held_figures):
        monkeypatch.setattr(module, "WAIT_S", 0.001)
    monkeypatch.setattr(held_figures, "HELD_S", 0.001)
    monkeypatch.setattr(fronts, "_COUNTS_EVERY_S", 0.001)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


HOOKS: list[tuple[Any, str]] = [
    (Front, "serving"),
    (Front, "begin"),
    (Front, "opened"),
    (Front, "ended"),
    (Front, "_send"),
    (Trace, "__init__"),
    (WatchedRequest, "__init__"),
    (WatchedRequest, "_received"),
    (WatchedRequest, "_begin"),
    (WatchedRequest, "_sent"),
    (WatchedRequest, "_end"),
    (WatchedRequest, "_ending"),
    (MeasuredExchange, "__init__"),
    (MeasuredExchange, "answered"),
    (MeasuredExchange, "chunks"),
    (MeasuredExchange, "catch_up"),
    (MeasuredExchange, "finish"),
    (MeasuredExchange, "record"),
    (HeldFigures, "take"),
    (fronts, "record_bytes"),
    (fronts, "served_record"),
    (Reporter, "add"),
    (Sender, "add"),
]


@pytest.mark.parametrize(("owner", "name"), HOOKS, ids=lambda each: getattr(each, "__name__", each))
def test_a_hook_that_raises_costs_no_response_and_measuring_ends_after_ten_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    name: str,
) -> None:
    async def called(agent: Agent, engine: Engine, app: App) -> None:
        monkeypatch.setattr(owner, name, broken)
        for _ in range(CALLS):
            call = Call()
            await call.through(app)
            assert call.body == BODY
            assert call.sent[0]["status"] == 200
        # Its figures are as if there was no middleware.
        if owner not in (Reporter, Sender):
            assert front(app)._reporter.take_figures is None

    play(tmp_path, called)
    messages = [record.message for record in caplog.records]
    assert sum(OFF in message for message in messages) == 1
    assert sum(FAILED in message for message in messages) == MAX_ERRORS


def front(app: App) -> Front:
    """The front of a middleware."""
    assert isinstance(app, GoodputMiddleware)
    found = app._front
    assert isinstance(found, Front)
    return found


SOMETIMES: list[tuple[Any, str]] = [
    (Front, "_count_response"),
    (Front, "_until_shutdown"),
    (Front, "check"),
    (Front, "_take_figures"),
    (Front, "close"),
    (HeldFigures, "hold"),
    (HeldFigures, "due"),
    (HeldFigures, "overdue"),
    (fronts, "count_record"),
    (Reporter, "flush"),
    (Sender, "flush"),
    (Sender, "send"),
    (watched_request, "_last_data_received"),
]


@pytest.mark.parametrize(
    ("owner", "name"), SOMETIMES, ids=lambda each: getattr(each, "__name__", each)
)
def test_other_errors_cost_no_response_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    async def called(agent: Agent, engine: Engine, app: App) -> None:
        monkeypatch.setattr(owner, name, broken)
        for _ in range(CALLS):
            for call in (Call(), Call(path="/metrics", method="GET"), Call(type="lifespan")):
                await call.through(app)
                assert call.body == BODY
            await asyncio.sleep(0.002)

    play(tmp_path, called)


def test_a_request_counts_one_error_however_many_events_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def called(agent: Agent, engine: Engine, app: App) -> None:
        with monkeypatch.context() as context:
            context.setattr(WatchedRequest, "_begin", broken)
            await Call().through(app)
        await Call().through(app)
        await agent.only_served()

    play(tmp_path, called, body=STREAM * 9)
    assert sum(FAILED in record.message for record in caplog.records) == 1


def test_a_request_that_could_not_be_measured_is_open_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedRequest, "_sent", broken)

    async def called(agent: Agent, engine: Engine, app: App) -> None:
        await Call().through(app)
        assert not front(app)._open
        # The file goes only if no request is open.
        front(app).close()
        assert not list(tmp_path.glob("*.open"))

    play(tmp_path, called)


def test_one_request_that_cannot_be_sent_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = record_bytes

    def sometimes(record: Any) -> bytes:
        return broken() if record.request_id == "bad" else sent(record)

    async def without_figures(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, "chatcmpl-x")
        await respond(send, STREAM)

    async def called(agent: Agent, engine: Engine, app: App) -> None:
        app = GoodputMiddleware(without_figures)
        monkeypatch.setattr(fronts, "record_bytes", sometimes)
        for request_id in ("a", "bad", "b"):
            await Call(headers=[("x-request-id", request_id)]).through(app)
        await agent.until_served(2)
        assert [each.record.request_id for each in agent.served] == ["a", "b"]

    play(tmp_path, called)


def test_a_front_that_cannot_be_made_leaves_the_application(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fronts, "shared_front", broken)

    async def called() -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await respond(send, STREAM)

        call = Call()
        await call.through(GoodputMiddleware(app))
        assert call.body == BODY

    asyncio.run(called())
    (record,) = caplog.records
    assert "cannot measure requests" in record.message


def test_a_socket_of_a_client_that_has_left_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed = socket.socket()
    closed.close()

    class Transport:
        def get_extra_info(self, name: str) -> socket.socket:
            return closed

    async def called(agent: Agent, engine: Engine, app: App) -> None:
        call = Call()
        call.transport = Transport()  # type: ignore[attr-defined]
        await call.through(app)
        await agent.only_served()

    play(tmp_path, called)
    assert not caplog.records


# Agents that fail


MANY = (*STREAM[:1] * 8, *STREAM)

Change = Callable[[Agent, int], None]


def kill(agent: Agent, number: int) -> None:
    """The agent is killed in the middle, and its socket is gone."""
    if number == 100:
        agent.stop()


def leave_file(agent: Agent, number: int) -> None:
    """The agent is killed, and the file of its socket stays."""
    if number == 100:
        agent.stop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abandoned:
            abandoned.bind(agent.path)


def restart(agent: Agent, number: int) -> None:
    """The agent comes back."""
    if number == 50:
        agent.stop()
    if number == 150:
        agent.listen()


def never_read(agent: Agent, number: int) -> None:
    """The agent reads nothing, so its socket gets full."""


@pytest.mark.parametrize("change", [kill, leave_file, restart, never_read])
def test_two_hundred_streams_are_whole_whatever_the_agent_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Change
) -> None:
    caplog.set_level(logging.WARNING)

    async def called(agent: Agent, engine: Engine, app: App) -> None:
        calls = [Call(headers=[("x-request-id", "u" * 250)]) for _ in range(200)]
        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(calls):
                change(agent, number)
                group.create_task(call.through(app))
                await asyncio.sleep(0)
        assert all(call.body == b"".join(MANY) for call in calls)
        sender = front(app)._reporter._sender
        assert len(sender._waiting) <= WAITING_DATAGRAMS
        if change is restart:
            call = Call(headers=[("x-request-id", "after")])
            await call.through(app)
            front(app)._reporter.flush()
            await agent.until(
                lambda: any(each.record.request_id == "after" for each in agent.served)
            )

    play(tmp_path, called, body=MANY)
    assert not caplog.records


@pytest.fixture
def missing(tmp_path: Path) -> Iterator[Front]:
    """The front of an engine without an agent, and without the folder of one."""
    with closing(Sender(str(tmp_path / "nowhere" / "vllm.sock"), pause_s=0.0)) as sender:
        fronts._front = Front(Reporter(sender))
        yield fronts._front
        fronts._front = None


def test_without_an_agent_memory_is_bounded(
    missing: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def called() -> None:
        engine = Engine(missing._reporter, body=(WHOLE_ANSWER,), kind="application/json")
        app = GoodputMiddleware(engine)
        monkeypatch.setattr(sending, "WAITING_DATAGRAMS", 32)
        for number in range(3000):
            await Call(headers=[("x-request-id", f"{number}")]).through(app)
        sender = missing._reporter._sender
        assert len(sender._waiting) == 32
        assert sender.dropped > 0
        assert not missing._open
        assert not missing._held.waits or len(missing._held._held_since) < 3000

    asyncio.run(called())
    assert not caplog.records


def test_what_a_client_writes_cannot_end_the_measuring(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    huge = "u" * 200_000
    names = ("x-request-id", "authorization", "traceparent", "tracestate", "x-slo-ttft-ms")
    bodies = [
        b'{"model": "%s"}' % huge.encode(),
        b'{"n": 1e999, "stream": 7, "prompt": [[]]}',
        b'{"n": 99999999999999999999, "model": []}',
        b"[" * 100_000,
        b"\xff\x00",
        b'{"model": "\\ud800", "messages": [{"content": [{"type": 5}]}]}',
        b"",
    ]

    async def called(agent: Agent, engine: Engine, app: App) -> None:
        for number, body in enumerate(bodies):
            call = Call([body], headers=[(name, huge) for name in names])
            await call.through(app)
            assert call.body == BODY
            await agent.until_served(number + 1)

    play(tmp_path, called, body=STREAM)
    assert not caplog.records
