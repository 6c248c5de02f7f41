"""The engine's figures and the HTTP request of them, in whichever order they come."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from goodput_agent_vllm import front as fronts
from goodput_agent_vllm import held_figures
from goodput_agent_vllm.held_figures import HeldFigures, Waiting, key_of
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Receive, Scope, Send
from goodput_agent_vllm.reporting import _finished

from agent.records.engine import ServedRequest
from tests.plugins.asgi_calls import (
    CHAT,
    COMPLETIONS,
    RESPONSES,
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
from tests.plugins.vllm_counts import finished

JSON: dict[str, Any] = {"body": (WHOLE_ANSWER,), "kind": "application/json"}
NEVER_S = 999.0


def waits(monkeypatch: pytest.MonkeyPatch, wait_s: float, held_s: float) -> None:
    for module in (fronts, held_figures):
        monkeypatch.setattr(module, "WAIT_S", wait_s)
    monkeypatch.setattr(held_figures, "HELD_S", held_s)


def body(**values: Any) -> bytes:
    return json.dumps({"model": "m", **values}).encode()


def ids(served: ServedRequest) -> list[str]:
    return [each.request_id for each in served.choices]


def serving(engine_id: str, ended: asyncio.Event | None = None) -> App:
    """An application that responds, in the end only after an event, and reports no figures."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, engine_id)
        if ended is not None:
            await ended.wait()
        await respond(send, **JSON)

    return app


async def watched(app: App, path: str = CHAT, **values: Any) -> None:
    await Call([body(**values)], path=path).through(GoodputMiddleware(app))


@pytest.mark.parametrize(
    ("path", "values", "engine_id", "figures"),
    [
        (CHAT, {}, "chatcmpl-x", ["chatcmpl-x"]),
        (CHAT, {"n": 2}, "chatcmpl-x", ["chatcmpl-x", "chatcmpl-x"]),
        (COMPLETIONS, {"prompt": "a"}, "cmpl-x", ["cmpl-x-0"]),
        # The second prompt ends first.
        (COMPLETIONS, {"prompt": ["a", "b"]}, "cmpl-x", ["cmpl-x-1", "cmpl-x-0"]),
        (
            COMPLETIONS,
            {"prompt": ["a", "b"], "n": 2},
            "cmpl-x",
            ["cmpl-x-1"] * 2 + ["cmpl-x-0"] * 2,
        ),
        (RESPONSES, {"input": "a"}, "resp_x", ["resp_x_0"]),
    ],
)
def test_figures_may_come_before_or_after_the_http_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    values: dict[str, Any],
    engine_id: str,
    figures: list[str],
) -> None:
    waits(monkeypatch, NEVER_S, NEVER_S)

    async def joined(agent: Agent, engine: Engine, app: App) -> None:
        for before in range(len(figures) + 1):
            began_at = time.time()
            for each in figures[:before]:
                engine.end(each, began_at)
            await watched(serving(engine_id), path, **values)
            for each in figures[before:]:
                agent.read()
                assert len(agent.served) == before
                engine.end(each, began_at)
            await agent.until_served(before + 1)
            assert sorted(ids(agent.served[-1])) == sorted(figures)
        assert agent.figures == []

    play(tmp_path, joined)


def test_figures_that_never_come_leave_the_request_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 0.02, NEVER_S)

    async def alone(agent: Agent, engine: Engine, app: App) -> None:
        engine.end("chatcmpl-x", time.time())
        await watched(serving("chatcmpl-x"), n=2)
        # What came is kept.
        assert ids(await agent.only_served()) == ["chatcmpl-x"]

    play(tmp_path, alone)


def test_figures_of_other_routes_are_sent_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 0.02, 0.02)

    async def alone(agent: Agent, engine: Engine, app: App) -> None:
        engine.end("embd-1", time.time())
        await agent.until_alone("embd-1")
        assert (agent.figures, agent.served) == (["embd-1"], [])

    play(tmp_path, alone)


def test_figures_stay_while_their_request_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 0.01, 0.01)

    async def stay(agent: Agent, engine: Engine, app: App) -> None:
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(watched(serving("cmpl-x", ended), COMPLETIONS, prompt=["a", "b"]))
            await asyncio.sleep(0)
            engine.end("cmpl-x-0", time.time())
            # Those of another are sent long after the first could have been.
            for number in range(3):
                engine.end(f"embd-{number}", time.time())
                await agent.until_alone(f"embd-{number}")
            assert "cmpl-x-0" not in agent.figures
            ended.set()
            engine.end("cmpl-x-1", time.time())
        assert ids(await agent.only_served()) == ["cmpl-x-0", "cmpl-x-1"]

    play(tmp_path, stay)


def test_requests_of_one_id_get_their_own_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, NEVER_S, NEVER_S)

    async def repeated(agent: Agent, engine: Engine, app: App) -> None:
        gates = [asyncio.Event() for _ in range(4)]
        began: list[float] = []
        calls: list[asyncio.Task[None]] = []
        for gate in gates:
            calls.append(asyncio.create_task(watched(serving("chatcmpl-x", gate))))
            await asyncio.sleep(0.002)
            began.append(time.time())
        for number in (3, 1, 0, 2):
            engine.end("chatcmpl-x", began[number], num_generation_tokens=number + 1)
        for number in (2, 0, 3, 1):
            gates[number].set()
            await calls[number]
        agent.read()
        in_order = sorted(agent.served, key=lambda served: served.record.started_at)
        assert [[c.output_tokens for c in each.choices] for each in in_order] == [
            [1],
            [2],
            [3],
            [4],
        ]

    play(tmp_path, repeated)


def test_an_id_may_look_like_a_part_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, NEVER_S, NEVER_S)

    async def alike(agent: Agent, engine: Engine, app: App) -> None:
        now = time.time()
        for each in ("cmpl-x-0-0", "cmpl-x-0", "chatcmpl-x-0"):
            engine.end(each, now)
        await watched(serving("cmpl-x-0"), COMPLETIONS, prompt="a")
        await watched(serving("chatcmpl-x"))
        await watched(serving("cmpl-x"), COMPLETIONS, prompt="a")
        await watched(serving("chatcmpl-x-0"))
        engine.end("chatcmpl-x", time.time())
        agent.read()
        assert [ids(each) for each in agent.served] == [
            ["cmpl-x-0-0"],
            ["cmpl-x-0"],
            ["chatcmpl-x-0"],
            ["chatcmpl-x"],
        ]

    play(tmp_path, alike)


def test_a_request_that_the_engine_never_got_takes_no_figures_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, NEVER_S, NEVER_S)

    async def later(agent: Agent, engine: Engine, app: App) -> None:
        await watched(serving("chatcmpl-x"))
        later_at = time.time() + 5
        engine.end("chatcmpl-x", later_at, num_generation_tokens=7)
        agent.read()
        assert agent.served == []

    play(tmp_path, later)


@pytest.mark.parametrize(("status", "joined"), [(400, False), (404, False), (500, True)])
def test_an_error_waits_for_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, joined: bool
) -> None:
    waits(monkeypatch, NEVER_S, NEVER_S)

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, "chatcmpl-x")
        await respond(send, [b"{}"], status=status, kind="application/json")

    async def at_once(agent: Agent, engine: Engine, app: App) -> None:
        engine.end("chatcmpl-x", time.time(), finish_reason="error")
        await watched(failing)
        agent.read()
        (served,) = agent.served
        assert served.record.http_status == status
        assert ids(served) == ["chatcmpl-x"] * joined

    play(tmp_path, at_once)


def test_usage_that_the_client_did_not_ask_for_is_known(tmp_path: Path) -> None:
    async def counting(scope: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        named(scope, "", prompt_tokens=20, completion_tokens=12)
        scope["state"]["request_metadata"].request_id = None
        await respond(send, STREAM)

    async def known(agent: Agent, engine: Engine, app: App) -> None:
        await watched(counting, stream=True)
        record = (await agent.only_served()).record
        assert (record.input_tokens, record.output_tokens) == (20, 12)

    play(tmp_path, known)


def test_held_figures_are_bounded() -> None:
    held = HeldFigures()
    record = _finished(finished(request_id="x"), 100.0)
    most = held_figures.MAX_HELD
    for number in range(most + 5):
        held.hold(f"chatcmpl-{number}", record, 1.0)
    assert held.is_full
    # Also those of open requests, if there are so many.
    everything = {key_of(f"chatcmpl-{number}", CHAT) for number in range(most + 5)}
    assert len(held.overdue(1.0, lambda: everything)) == 5
    assert not held.is_full
    assert len(held.overdue(NEVER_S, set)) == most
    assert not held.waits
    assert not held._held


def test_many_choices_of_a_request_are_looked_up_once() -> None:
    """As many as vLLM allows: 16,384."""
    held = HeldFigures()
    record = _finished(finished(request_id="chatcmpl-x"), 102.0)
    for _ in range(held_figures.MAX_HELD):
        held.hold("chatcmpl-x", record, 1.0)
    asked: list[int] = []

    def open_keys() -> set[tuple[str, str]]:
        asked.append(1)
        return {key_of("chatcmpl-x", CHAT)}

    assert held.overdue(10.0, open_keys) == []
    assert len(asked) == 1
    waiting = Waiting(key_of("chatcmpl-x", CHAT), 10**9, 100.0, 102.0, lambda _: None)
    held.take(waiting)
    assert len(waiting.figures) == held_figures.MAX_HELD
    assert not held._held


def test_an_id_of_any_length_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM makes the id of the client's header, which may have 64 KB."""
    waits(monkeypatch, 0.0, 0.0)

    async def long(agent: Agent, engine: Engine, app: App) -> None:
        for number in range(12):
            await watched(serving("chatcmpl-" + "x" * 70_000))
            await agent.until_served(number + 1)
        assert {each.record.request_id for each in agent.served} == {None}

    assert play(tmp_path, long)._errors == 0


def test_all_turns_of_a_response_are_of_its_request(tmp_path: Path) -> None:
    turns = [f"resp_x_{number}" for number in range(3)]

    async def asked(agent: Agent, engine: Engine, app: App) -> None:
        async def several(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            named(scope, "resp_x")
            for turn in turns:
                engine.end(turn, time.time())
            await respond(send, **JSON)

        await watched(several, RESPONSES)
        assert ids(await agent.only_served()) == turns

    play(tmp_path, asked)


def test_a_response_in_the_background_has_the_engines_figures_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits(monkeypatch, 0.01, 0.01)
    queued = json.dumps({"id": "resp_x", "model": "m", "status": "queued", "output": []})

    async def background(agent: Agent, engine: Engine, app: App) -> None:
        async def queueing(scope: Scope, receive: Receive, send: Send) -> None:
            await whole_body(receive)
            named(scope, "resp_x")
            await respond(send, [queued.encode()], kind="application/json")

        began_at = time.time()
        await watched(queueing, RESPONSES, background=True)
        engine.end("resp_x_0", began_at)
        await agent.until_alone("resp_x_0")
        await agent.until(lambda: agent.counts)
        assert (agent.served, agent.counts) == ([], {(RESPONSES, 2): 1})

    play(tmp_path, background)


@pytest.mark.parametrize(
    ("state", "proxied"),
    [
        ("goodput=proxied,vendor=x", True),
        ("vendor=x , goodput=unsampled", True),
        ("mygoodput=proxied", False),
        ("goodput=other", False),
        ("vendor=goodput=proxied", False),
    ],
)
def test_only_the_proxys_own_mark_says_that_it_has_the_request(
    tmp_path: Path, state: str, proxied: bool
) -> None:
    async def marked(agent: Agent, engine: Engine, app: App) -> None:
        await Call([body()], headers=[("tracestate", state)]).through(app)
        assert (await agent.only_served()).proxied is proxied

    play(tmp_path, marked, **JSON)
