"""The plugin's hooks in SGLang's front, called as SGLang 0.5.23 calls them."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from goodput_agent_vllm import reporting, sglang
from goodput_agent_vllm.middleware import App, Receive, Scope, Send

from agent.records.engine import EndedRequest, ServedRequest
from agent.records.request import Status
from tests.plugins.asgi_calls import (
    COMPLETIONS,
    STREAM,
    WHOLE_ANSWER,
    Agent,
    Call,
    Engine,
    play,
    respond,
    view,
    whole_body,
)

LENGTH = {"type": "length", "length": 5}
# Without metrics SGLang's scheduler sends no times.
NO_TIMES = SimpleNamespace(
    wait_queue_entry_time=0.0, forward_entry_time=0.0, prefill_finished_time=0.0
)
TIMES = SimpleNamespace(
    wait_queue_entry_time=10.001, forward_entry_time=10.003, prefill_finished_time=10.006
)
FRONT_TIMES = SimpleNamespace(created_time=10.0, first_token_time=10.007, finished_time=10.01)


class Manager:
    """What the hooks use of SGLang's TokenizerManager."""

    def __init__(self) -> None:
        self.rid_to_state: dict[str, Any] = {}

    def begin(self, *ids: str, samples: int = 1) -> None:
        """Make the states of choices."""
        for each in ids:
            self.rid_to_state[each] = SimpleNamespace(time_stats=FRONT_TIMES)
        rid = list(ids) if len(ids) > 1 else ids[0]
        requested = SimpleNamespace(rid=rid, parallel_sample_num=samples)
        sglang._note_states(None, self, requested)

    async def output(self, *ids: str, reason: Any = LENGTH, tokens: int = 5, **values: Any) -> None:
        """Handle an output of the engine, with which these choices end."""
        count = len(ids)
        batch = SimpleNamespace(
            rids=list(ids),
            finished_reasons=[reason] * count,
            prompt_tokens=[7] * count,
            completion_tokens=[tokens] * count,
            cached_tokens=[6] * count,
            reasoning_tokens=[0] * count,
            retraction_counts=[1] * count,
            time_stats=[values.get("times", TIMES)] * count,
        )

        async def handle(manager: Manager, handled: Any) -> None:
            for each in handled.rids:
                del manager.rid_to_state[each]

        await sglang._report_ended(handle, self, batch)


Serve = Callable[[Manager, Send], Awaitable[None]]


def served_by(
    folder: Path, monkeypatch: pytest.MonkeyPatch, serve: Serve, call: Callable[[], Call]
) -> ServedRequest:
    """The only report of a call that an application with the hooks serves."""
    found: list[ServedRequest] = []
    manager = Manager()

    async def application(_: Scope, receive: Receive, send: Send) -> None:
        await whole_body(receive)
        await serve(manager, send)

    async def test(agent: Agent, engine: Engine, _: App) -> None:
        monkeypatch.setattr(reporting, "_reporter", engine.reporter)
        monkeypatch.setattr(sglang, "_has_started", True)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(call().through(sglang._watched(application)))
            found.append(await agent.only_served())
            serving.cancel()
        assert agent.figures == []

    play(folder, test)
    return found[0]


def body(**values: Any) -> bytes:
    return json.dumps({"model": "m", "stream": True, **values}).encode()


def the_choice(served: ServedRequest) -> EndedRequest:
    (choice,) = served.choices
    return choice


def test_a_stream_without_usage_has_the_counts_and_times_of_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stream(manager: Manager, send: Send) -> None:
        manager.begin("a1")
        await manager.output("a1")
        await respond(send, STREAM)

    served = served_by(tmp_path, monkeypatch, stream, lambda: Call((body(messages=[]),)))
    record = served.record
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (7, 5, 6)
    assert record.tpot_s is not None
    choice = the_choice(served)
    assert (choice.request_id, choice.finish_reason, choice.preemptions) == ("a1", "length", 1)
    times = (choice.queue_s, choice.prefill_s, choice.ttft_s, choice.decode_s, choice.e2e_s)
    assert times == pytest.approx((0.002, 0.003, 0.007, 0.003, 0.01))


def test_samples_have_one_row_with_their_sums_and_without_the_request_for_their_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def samples(manager: Manager, send: Send) -> None:
        manager.begin("a1", "a2", "a3", "a4", samples=2)
        for prompt in ("b1", "b2"):
            manager.begin(prompt)
            await manager.output(prompt, reason={"type": "length", "length": 0}, tokens=0)
        chosen = ("c1", "c2", "c3", "c4")
        for each in chosen:
            manager.begin(each)
        await manager.output(*chosen[:2])
        await manager.output(*chosen[2:])
        await respond(send, STREAM)

    sent = body(prompt=["a", "b"], n=2)
    served = served_by(tmp_path, monkeypatch, samples, lambda: Call((sent,), path=COMPLETIONS))
    assert sorted(each.request_id for each in served.choices) == ["c1", "c2", "c3", "c4"]
    assert (served.record.input_tokens, served.record.output_tokens) == (14, 20)


def test_without_sglangs_metrics_times_of_its_scheduler_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SimpleNamespace(created_time=10.0, first_token_time=10.01, finished_time=10.01)
    monkeypatch.setattr(f"{__name__}.FRONT_TIMES", whole)

    async def respond_whole(manager: Manager, send: Send) -> None:
        manager.begin("a1")
        await manager.output("a1", times=NO_TIMES)
        await respond(send, (WHOLE_ANSWER,), kind="application/json")

    call = body(messages=[], stream=False)
    choice = the_choice(served_by(tmp_path, monkeypatch, respond_whole, lambda: Call((call,))))
    # All tokens came at once: when the first was there is unknown.
    assert (choice.queue_s, choice.prefill_s, choice.ttft_s, choice.decode_s) == (None,) * 4
    assert choice.e2e_s == pytest.approx(0.01)


def test_a_row_does_not_wait_for_what_sglang_does_after_the_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def go_on(manager: Manager, send: Send) -> None:
        manager.begin("a1")
        await manager.output("a1")
        await respond(send, STREAM)
        await asyncio.Event().wait()

    served = served_by(tmp_path, monkeypatch, go_on, lambda: Call((body(messages=[]),)))
    assert served.record.status is Status.OK


def test_a_client_that_left_before_the_head_is_seen_though_sglang_did_not_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def respond_whole(manager: Manager, send: Send) -> None:
        manager.begin("a1")
        await manager.output("a1")
        await respond(send, (WHOLE_ANSWER,), kind="application/json")

    def left() -> Call:
        call = Call((body(messages=[], stream=False),))
        call.disconnected = True  # type: ignore[attr-defined]
        return call

    served = served_by(tmp_path, monkeypatch, respond_whole, left)
    assert (served.record.status, served.record.http_status) == (Status.CANCELLED, None)
    assert view(served).error == "client_gone"
    assert the_choice(served).request_id == "a1"


def test_a_request_that_the_scheduler_refuses_has_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(manager: Manager, send: Send) -> None:
        manager.begin("a1")
        reason = {"type": "abort", "message": "busy", "status_code": 503}
        await manager.output("a1", reason=reason, tokens=0)
        await respond(send, (b"{}",), status=503, kind="application/json")

    served = served_by(tmp_path, monkeypatch, refuse, lambda: Call((body(messages=[]),)))
    assert (served.record.status, served.choices) == (Status.THROTTLED, ())


def test_requests_of_other_routes_are_not_reported_by_their_figures() -> None:
    manager = Manager()
    manager.begin("a1")
    assert vars(manager.rid_to_state["a1"]).keys() == {"time_stats"}


def test_errors_of_the_hooks_do_not_reach_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[Any] = []

    async def original(_: Any, batch: Any) -> None:
        handled.append(batch)

    async def strange(manager: Manager, send: Send) -> None:
        sglang._note_states(None, manager, object())
        await sglang._report_ended(original, manager, "no batch")
        await respond(send, STREAM)

    served = served_by(tmp_path, monkeypatch, strange, lambda: Call((body(messages=[]),)))
    assert handled == ["no batch"]
    assert served.choices == ()


@pytest.mark.parametrize(("switch", "hooked"), [("on", True), ("off", False)])
def test_without_hooks_requests_are_measured_all_the_same(
    monkeypatch: pytest.MonkeyPatch, switch: str, hooked: bool
) -> None:
    registered: list[str] = []
    registry = SimpleNamespace(register=lambda target, *_: registered.append(target))
    module: Any = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry = registry
    module.HookType = SimpleNamespace(AFTER="after", AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setenv("GOODPUT_AGENT_HOOKS", switch)
    application = SimpleNamespace(build_middleware_stack=lambda: None)
    own = application.build_middleware_stack
    sglang.watch(application)
    assert application.build_middleware_stack is not own
    assert bool(registered) is hooked
