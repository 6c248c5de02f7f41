"""Faults of a simulated engine, from its scenario and from its API."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from itertools import takewhile

import aiohttp
import pytest

from agent.simulator.batching import Batch, EngineRequest
from agent.simulator.scenario import Decode, Fault, Faults, Scenario, ScriptedFault
from agent.simulator.simulated_metrics import MetricsPage
from agent.simulator.traffic import cached_tokens
from tests.simulator.kit import (
    PLAIN,
    engine_request,
    families,
    finished,
    grpc_receiver,
    numbered_requests,
    running,
    steps,
    totals,
    values,
)

_TTFT = "time_to_first_token"
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def _faults(fault: Fault) -> Faults:
    faults = Faults()
    faults.set(fault)
    return faults


def _scripted(**fault: float | bool) -> Scenario:
    """PLAIN, with a fault from its tenth second to its twentieth."""
    script = ScriptedFault.model_validate({"after_s": 10, "for_s": 10, **fault})
    return PLAIN.model_copy(update={"faults": (script,)})


def test_the_time_scale_applies_to_a_script() -> None:
    scenario = _scripted(defer_s=1.0, every_s=50).model_copy(update={"time_scale": 10.0})
    (fault,) = scenario.in_real_time().faults
    assert (fault.after_s, fault.for_s, fault.defer_s, fault.every_s) == (1.0, 1.0, 0.1, 5.0)


def test_a_fault_that_is_set_replaces_the_script() -> None:
    faults = Faults(_scripted(surge=5).faults)
    assert [faults.at(at_s).surge for at_s in (9.9, 10.0, 19.9, 20.0)] == [1, 5, 5, 1]
    faults.set(Fault(surge=3))
    assert [faults.at(at_s).surge for at_s in (0.0, 15.0)] == [3, 3]


def _arriving(scenario: Scenario) -> tuple[list[EngineRequest], list[EngineRequest]]:
    """The requests before the scripted fault and during it."""
    until = list(takewhile(lambda request: request.arrived_s < 20, numbered_requests(scenario)))
    early = [request for request in until if request.arrived_s < 10]
    return early, until[len(early) :]


def test_a_surge_multiplies_requests_and_does_not_change_earlier_ones() -> None:
    (early, late), (same, surging) = _arriving(PLAIN), _arriving(_scripted(surge=4))
    assert [each.arrived_s for each in same] == [each.arrived_s for each in early]
    assert len(surging) == 4 * len(late)


@pytest.mark.parametrize(
    ("fault", "struck", "share"),
    [
        ({"error_ratio": 1.0}, {"fails": True}, 1),
        ({"error_ratio": 0.5}, {"fails": True}, 0.5),
        ({"defer_ratio": 0.25, "defer_s": 1.0}, {"deferred_s": 1.0}, 0.25),
        ({"long_ratio": 0.25, "long_tokens": 900}, {"prompt_tokens": 900}, 0.25),
        (
            {"long_output_ratio": 0.5, "long_output_tokens": 700},
            {"output_tokens": 700, "finish_reason": "length"},
            0.5,
        ),
        ({"slow_client_ratio": 0.5, "client_pause_s": 20}, {"client_pause_s": 20}, 0.5),
        ({"front_s": 0.5}, {"front_s": 0.5}, 1),
    ],
)
def test_a_fault_strikes_its_share_of_the_requests_of_its_time(
    fault: dict[str, float], struck: dict[str, object], share: float
) -> None:
    early, late = _arriving(_scripted(**fault))

    def affected(request: EngineRequest) -> bool:
        return all(getattr(request, name) == value for name, value in struck.items())

    assert not any(map(affected, early))
    assert sum(map(affected, late)) == pytest.approx(share * len(late), abs=1)


def test_a_fault_comes_again_and_again() -> None:
    faults = Faults(_scripted(surge=5, every_s=100).faults)
    at = {at_s: faults.at(at_s).surge for at_s in (9.9, 10.0, 20.0, 109.9, 110.0, 119.9, 1220.0)}
    assert at == {9.9: 1, 10.0: 5, 20.0: 1, 109.9: 1, 110.0: 5, 119.9: 5, 1220.0: 1}
    changes = [faults.next_change_s(at_s) for at_s in (0.0, 10.0, 20.0, 110.0, 1220.0)]
    assert changes == [10.0, 20.0, 110.0, 120.0, 1310.0]
    (fault,) = _scripted(every_s=100).faults
    assert [fault.begins_from(at_s) for at_s in (0.0, 10.0, 10.5, 1210.0)] == [10, 10, 110, 1210]


def test_the_time_of_a_throttled_gpu_is_that_of_the_fault() -> None:
    faults = Faults(_scripted(gpu_slowdown=2, every_s=100).faults)
    assert faults.throttled_s(0.0, 15.0) == 5.0
    assert faults.throttled_s(15.0, 115.0) == 10.0
    assert Faults(_scripted(step_slowdown=2).faults).throttled_s(0.0, 30.0) == 0.0


@pytest.mark.parametrize(
    ("fault", "prefill", "decode"),
    [
        (Fault(prefill_slowdown=7), 7, 1),
        (Fault(decode_slowdown=3), 1, 3),
        (Fault(step_slowdown=3), 3, 3),
        (Fault(gpu_slowdown=3), 3, 3),
    ],
    ids=["prefill", "decode", "step", "gpu"],
)
def test_what_is_slow_slows_nothing_else(fault: Fault, prefill: float, decode: float) -> None:
    (usual,) = finished(steps(Batch(PLAIN, [engine_request(100, 11)])))
    (slowed,) = finished(steps(Batch(PLAIN, [engine_request(100, 11)], _faults(fault))))
    assert slowed.prefill_s == pytest.approx(prefill * usual.prefill_s)
    assert slowed.decode_s == pytest.approx(decode * usual.decode_s)


def test_a_deferred_request_waits_while_others_run() -> None:
    deferred = replace(engine_request(100, 1), deferred_s=2.0)
    passing = engine_request(100, 1, arrived_s=0.5)
    run = list(steps(Batch(PLAIN, [deferred, passing])))
    assert (run[0].load.waiting, run[0].load.deferred) == (1, 1)
    first, second = finished(run)
    assert (first.request, first.queue_s) == (passing, 0)
    assert second.queue_s == pytest.approx(2.0)
    assert second.ttft_s == pytest.approx(2.1)


def test_failing_requests_are_counted_and_take_no_blocks() -> None:
    batch = Batch(
        PLAIN,
        [
            replace(engine_request(), fails=True),
            engine_request(100, 1),
            replace(engine_request(), fails=True),
        ],
    )
    metrics = MetricsPage(PLAIN)
    run = list(steps(batch))
    for step in run:
        metrics.observe(step)
    assert len(finished(run)) == 1
    counts_by_status = {
        sample.labels["status"]: sample.value
        for family in families(metrics.render().decode())
        for sample in family.samples
        if sample.name == "http_requests_total"
    }
    assert counts_by_status == {"2xx": 1, "5xx": 2}


def test_requests_wait_while_the_cache_is_taken() -> None:
    faults = _faults(Fault(kv_taken=0.95))
    batch = Batch(PLAIN, [engine_request(100, 1)], faults)
    started = [batch.end(batch.begin(batch.next_start_s())) for _ in range(3)]
    assert [step.load.waiting for step in started] == [1, 1, 1]
    assert started[0].load.kv_usage == pytest.approx(0.95)
    # Time passes while they wait.
    assert batch.next_start_s() > 0
    faults.set(Fault())
    (done,) = finished(steps(batch))
    assert done.queue_s > 0


async def _exposition(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        found = families(await response.text())
    return {
        sample.name: sample.value
        for family in found
        for sample in family.samples
        if sample.name in ("vllm:num_requests_running", "vllm:generation_tokens_total")
    }


async def _put_fault(session: aiohttp.ClientSession, url: str, **fault: object) -> int:
    async with session.put(f"{url}/simulator/fault", json=fault) as response:
        return response.status


@pytest.mark.slow
def test_a_hanging_engine_shows_its_requests_and_continues_afterwards() -> None:
    busy = PLAIN.model_copy(update={"arrival_rate": 100.0})

    async def scenario() -> None:
        async with running(busy, traffic=True) as url, aiohttp.ClientSession() as session:
            while (await _exposition(session, url))["vllm:generation_tokens_total"] < 20:
                await asyncio.sleep(0.01)
            assert await _put_fault(session, url, hang=True) == 204
            # A step that was under way still ends.
            before = None
            while (now := await _exposition(session, url)) != before:
                before = now
                await asyncio.sleep(0.2)
            assert now["vllm:num_requests_running"] > 0
            assert await _put_fault(session, url) == 204
            while await _exposition(session, url) == now:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_clients_get_errors_and_an_invalid_fault_is_refused() -> None:
    async def scenario() -> tuple[int, int, str]:
        async with running() as url, aiohttp.ClientSession() as session:
            refused = await _put_fault(session, url, error_ratio=2)
            assert await _put_fault(session, url, error_ratio=1) == 204
            async with session.post(f"{url}/v1/chat/completions", json=CHAT) as response:
                body = await response.json()
                return refused, response.status, body["error"]["type"]

    assert asyncio.run(asyncio.wait_for(scenario(), 30)) == (400, 500, "InternalServerError")


def test_the_prefix_cache_has_nothing_of_a_prompt_beyond_those_of_the_scenario() -> None:
    scenario = PLAIN.model_copy(update={"cached_ratio": 0.5})
    assert cached_tokens(scenario, Fault(), 700) == 350
    assert cached_tokens(scenario, Fault(cache_lost=True), 700) == 0
    assert cached_tokens(scenario, Fault(), 701) == 0


async def _in_time(test: Awaitable[None]) -> None:
    await asyncio.wait_for(test, 30)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_a_dead_engine_breaks_its_connections_and_returns_without_its_requests(
    stream: bool,
) -> None:
    async def scenario() -> None:
        slow = PLAIN.model_copy(update={"decode": Decode(base_s=0.05)})
        body = {**CHAT, "max_tokens": 500, "ignore_eos": True, "stream": stream}
        async with running(slow) as url, aiohttp.ClientSession() as session:
            chat = f"{url}/v1/chat/completions"
            asked = asyncio.create_task(session.post(chat, json=body))
            while (await _exposition(session, url))["vllm:generation_tokens_total"] < 2:
                await asyncio.sleep(0.01)
            assert await _put_fault(session, url, dead=True) == 204
            with pytest.raises(aiohttp.ClientError):
                await (await asked).read()
            for path in ("/metrics", "/health"):
                with pytest.raises(aiohttp.ClientError):
                    await session.get(url + path)
            assert await _put_fault(session, url) == 204
            now = {"vllm:num_requests_running": 0.0, "vllm:generation_tokens_total": 0.0}
            while await _exposition(session, url) != now:
                await asyncio.sleep(0.01)

    asyncio.run(_in_time(scenario()))


def test_faults_of_a_request_in_the_engine_reach_those_of_http_clients() -> None:
    async def scenario() -> None:
        quick = PLAIN.model_copy(update={"cached_ratio": 0.5, "time_scale": 50.0})
        body = {"prompt": [1] * 400, "max_tokens": 1}
        async with grpc_receiver() as received:
            simulator = running(quick, spans=received.target)
            async with simulator as url, aiohttp.ClientSession() as session:
                for fault in ({}, {"front_s": 0.2}, {"defer_ratio": 1, "defer_s": 0.2}):
                    assert await _put_fault(session, url, **fault) == 204
                    await (await session.post(f"{url}/v1/completions", json=body)).read()
                page = await (await session.get(f"{url}/metrics")).text()
            plain, front, deferred = map(values, (each.attributes for each in received.spans()))
            queue, ttft = (f"gen_ai.latency.{name}" for name in ("time_in_queue", _TTFT))
            assert totals(page)["vllm:prefix_cache_hits_total"] == 3 * 200
            assert plain[ttft] < 0.19 < front[ttft]
            assert front[queue] < 0.19 < deferred[queue]

    asyncio.run(_in_time(scenario()))


def test_the_prefix_cache_saves_prefill_until_it_is_lost() -> None:
    scenario = PLAIN.model_copy(update={"cached_ratio": 0.8})
    lost = scenario.model_copy(update={"faults": _scripted(cache_lost=True).faults})
    for each, cached in ((scenario, True), (lost, False)):
        assert any(request.cached_tokens for request in _arriving(each)[1]) is cached
    request = replace(engine_request(100, 2), cached_tokens=80)
    (done,) = finished(steps(Batch(PLAIN, [request])))
    # The floor of a step; 100 tokens take twice as long.
    assert done.prefill_s == pytest.approx(0.05)
