"""What the middleware does later: not before a first token, and within a time."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from goodput_agent_vllm import deferred
from goodput_agent_vllm import front as fronts
from goodput_agent_vllm.deferred import DeferredWork
from goodput_agent_vllm.front import Front
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Message, Receive, Scope, Send
from goodput_agent_vllm.watched_request import WatchedRequest

from tests.plugins.asgi_calls import (
    STREAM,
    WHOLE_ANSWER,
    Agent,
    Call,
    Engine,
    event,
    named,
    play,
    respond,
    whole_body,
)

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}
FIRST: Message = {"type": "http.response.body", "body": event("a"), "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


def run(test: Callable[[DeferredWork], Any]) -> None:
    async def ran() -> None:
        await test(DeferredWork())

    asyncio.run(ran())


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deferred work is not done by time."""
    monkeypatch.setattr(deferred, "WITHIN_S", 3600.0)


@pytest.mark.usefixtures("never")
def test_work_is_done_when_the_last_of_the_waiting_requests_has_its_first_token() -> None:
    done: list[int] = []

    async def waiting(work: DeferredWork) -> None:
        for number in range(2):
            work.hold()
            work.add(partial(done.append, number))
        work.release(now=True)
        await asyncio.sleep(0)
        assert done == []
        work.release(now=True)
        # The token is sent first.
        assert done == []
        await asyncio.sleep(0)
        assert done == [0, 1]

    run(waiting)


@pytest.mark.usefixtures("never")
def test_the_end_of_a_request_starts_no_work_because_the_next_one_may_come_at_once() -> None:
    done: list[int] = []

    async def ended(work: DeferredWork) -> None:
        work.hold()
        work.add(lambda: done.append(1))
        work.release(now=False)
        await asyncio.sleep(0)
        assert done == []
        work.hold()
        work.release(now=True)
        await asyncio.sleep(0)
        assert done == [1]

    run(ended)


def test_work_waits_no_longer_for_a_first_token_than_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deferred, "WITHIN_S", 0.001)

    async def late(work: DeferredWork) -> None:
        work.hold()
        for _ in range(2):
            done = asyncio.Event()
            work.add(done.set)
            await asyncio.wait_for(done.wait(), 20.0)

    run(late)


def test_work_does_not_take_the_time_of_earlier_work_that_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def newer(work: DeferredWork) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(deferred, "WITHIN_S", 0.02)
        work.hold()
        work.add(lambda: None)
        work.finish()
        timer = asyncio.Event()
        loop.call_later(deferred.WITHIN_S, timer.set)
        monkeypatch.setattr(deferred, "WITHIN_S", 3600.0)
        done: list[int] = []
        work.add(lambda: done.append(1))
        await timer.wait()
        # Whoever's timer comes first.
        await asyncio.sleep(0)
        assert done == []
        assert work._planned
        # But if no request waits for its first token, it is done.
        work.release(now=False)
        work._do_planned()
        assert done == [1]

    run(newer)


@pytest.mark.usefixtures("never")
def test_the_event_loop_does_other_work_between_slices() -> None:
    order: list[str] = []

    def slow(name: str) -> None:
        order.append(name)
        until_s = time.monotonic() + deferred._SLICE_S
        while time.monotonic() < until_s:
            pass

    async def slices(work: DeferredWork) -> None:
        work.hold()
        work.add(lambda: slow("first"))
        work.add(lambda: slow("second"))
        work.release(now=True)
        asyncio.get_running_loop().call_soon(order.append, "other")
        for _ in range(3):
            await asyncio.sleep(0)
        assert order == ["first", "other", "second"]

    run(slices)


@pytest.mark.usefixtures("never")
def test_of_too_much_work_the_oldest_is_done_at_once() -> None:
    done: list[int] = []

    async def much(work: DeferredWork) -> None:
        work.hold()
        for number in range(deferred._MAX_WAITING + 2):
            work.add(partial(done.append, number))
        assert done == [0, 1]
        work.finish()
        assert done == [*range(deferred._MAX_WAITING + 2)]

    run(much)


@pytest.mark.usefixtures("never")
def test_nothing_of_a_request_is_read_before_its_first_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    begin = Front.begin

    def noting(*arguments: Any) -> Any:
        begun.append("begun")
        return begin(*arguments)

    monkeypatch.setattr(Front, "begin", noting)

    async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        for message in (START, FIRST, FIRST):
            await asyncio.sleep(0)
            assert begun == []
            await send(message)
        await asyncio.sleep(0)
        assert begun == ["begun"]
        await send(LAST)

    async def streamed(agent: Agent, engine: Engine, app: App) -> None:
        await Call().through(GoodputMiddleware(streaming))
        assert (await agent.only_served()).record.http_status == 200

    play(tmp_path, streamed)


@pytest.mark.usefixtures("never")
def test_a_report_waits_for_the_first_token_of_the_clients_next_request(tmp_path: Path) -> None:
    async def next_request(agent: Agent, engine: Engine, app: App) -> None:
        sent: list[int] = []

        async def streaming(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            sent.append(len(reports(agent)))
            for message in (START, FIRST, FIRST):
                await send(message)
            await asyncio.sleep(0)
            sent.append(len(reports(agent)))
            await send(LAST)
            await asyncio.sleep(0)

        app = GoodputMiddleware(streaming)
        for _ in range(2):
            call = Call()
            await app(call.scope, call.receive, call.send)
        assert sent == [0, 0, 0, 1]

    play(tmp_path, next_request)


def reports(agent: Agent) -> Any:
    agent.read()
    return agent.served


@pytest.mark.usefixtures("never")
def test_an_ended_request_takes_no_slot_of_the_open_ones(tmp_path: Path) -> None:
    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, "chatcmpl-x")
        await respond(send, (), status=429)

    async def ended(agent: Agent, engine: Engine, app: App) -> None:
        await Call().through(GoodputMiddleware(whole))
        assert (await agent.only_served()).record.http_status == 429
        assert not list(tmp_path.glob("*.open"))

    play(tmp_path, ended, body=(WHOLE_ANSWER,))


@pytest.mark.parametrize("broken", [None, "application", "measuring"])
@pytest.mark.usefixtures("never")
def test_no_request_keeps_others_waiting_after_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str | None
) -> None:
    async def responding(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        if broken == "application":
            raise RuntimeError("no")
        await respond(send, STREAM)

    async def ended(agent: Agent, engine: Engine, app: App) -> None:
        call = Call()
        with contextlib.suppress(RuntimeError):
            await GoodputMiddleware(responding)(call.scope, call.receive, call.send)
        assert fronts.shared_front().deferred._requests == 0

    if broken == "measuring":
        monkeypatch.delattr(WatchedRequest, "_sent")
    play(tmp_path, ended)
