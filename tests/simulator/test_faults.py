"""What can be wrong with a simulated engine, and that it is what its scenario and its users say."""

import asyncio
from dataclasses import replace
from itertools import takewhile

import aiohttp
import pytest

from agent.simulator.batching import Batch
from agent.simulator.faults import Faults
from agent.simulator.scenario import Fault, Scenario, ScriptedFault
from agent.simulator.simulated_metrics import MetricsPage
from tests.simulator.pages import families
from tests.simulator.running import running
from tests.simulator.stepping import PLAIN, asked, finished, numbered_requests, steps

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}


def _told(fault: Fault) -> Faults:
    faults = Faults()
    faults.set(fault)
    return faults


def _scripted(**fault: float | bool) -> Scenario:
    """PLAIN, with a fault from its tenth second to its twentieth."""
    script = ScriptedFault.model_validate({"after_s": 10, "for_s": 10, **fault})
    return PLAIN.model_copy(update={"faults": (script,)})


def test_a_script_holds_for_its_time_and_gives_way_to_what_is_told() -> None:
    faults = Faults(_scripted(surge=5).faults)
    assert [faults.at(at_s).surge for at_s in (9.9, 10.0, 19.9, 20.0)] == [1, 5, 5, 1]
    faults.set(Fault(surge=3))
    assert [faults.at(at_s).surge for at_s in (0.0, 15.0)] == [3, 3]


def test_a_script_is_as_fast_as_everything_else() -> None:
    scenario = _scripted(defer_s=1.0).model_copy(update={"time_scale": 10.0})
    (fault,) = scenario.in_real_time().faults
    assert (fault.after_s, fault.for_s, fault.defer_s) == (1.0, 1.0, 0.1)


def test_a_surge_multiplies_requests_and_leaves_those_before_it_as_they_were() -> None:
    def arrivals(scenario: Scenario) -> list[float]:
        coming = takewhile(lambda request: request.arrived_s < 20, numbered_requests(scenario))
        return [request.arrived_s for request in coming]

    plain, surging = arrivals(PLAIN), arrivals(_scripted(surge=4))
    assert [at_s for at_s in surging if at_s < 10] == [at_s for at_s in plain if at_s < 10]
    assert len([at_s for at_s in surging if at_s >= 10]) == 4 * len(
        [at_s for at_s in plain if at_s >= 10]
    )


def test_a_slow_prefill_takes_longer_and_no_token_does() -> None:
    slow = Batch(PLAIN, [asked(100, 2)], _told(Fault(prefill_slowdown=7)))
    (usual,), (slowed,) = finished(steps(Batch(PLAIN, [asked(100, 2)]))), finished(steps(slow))
    assert slowed.prefill_s == pytest.approx(7 * usual.prefill_s)
    assert slowed.decode_s == pytest.approx(usual.decode_s)


def test_a_deferred_request_waits_and_others_pass_it() -> None:
    deferred = replace(asked(100, 1), deferred_s=2.0)
    passing = asked(100, 1, arrived_s=0.5)
    first, second = finished(steps(Batch(PLAIN, [deferred, passing])))
    assert (first.request, first.queue_s) == (passing, 0)
    assert second.queue_s == pytest.approx(2.0)
    assert second.ttft_s == pytest.approx(2.1)


def test_only_planned_requests_by_the_ratio_are_deferred_or_fail() -> None:
    fault = _scripted(defer_ratio=0.25, defer_s=1.0, error_ratio=0.5)
    coming = list(takewhile(lambda request: request.arrived_s < 20, numbered_requests(fault)))
    for request in coming:
        assert request.arrived_s >= 10 or (request.deferred_s, request.fails) == (0, False)
    stricken = [request for request in coming if request.arrived_s >= 10]
    assert sum(request.fails for request in stricken) == pytest.approx(0.5 * len(stricken), abs=1)
    deferred = sum(request.deferred_s == 1.0 for request in stricken)
    assert deferred == pytest.approx(0.25 * len(stricken), abs=1)


def test_a_ratio_of_one_strikes_every_request() -> None:
    coming = takewhile(
        lambda request: request.arrived_s < 20, numbered_requests(_scripted(error_ratio=1.0))
    )
    stricken = [request for request in coming if request.arrived_s >= 10]
    assert stricken
    assert all(request.fails for request in stricken)


def test_failing_requests_are_counted_on_the_page_and_take_no_room() -> None:
    batch = Batch(
        PLAIN, [replace(asked(), fails=True), asked(100, 1), replace(asked(), fails=True)]
    )
    page = MetricsPage(PLAIN)
    run = list(steps(batch))
    for step in run:
        page.observe(step)
    assert len(finished(run)) == 1
    answers = {
        sample.labels["status"]: sample.value
        for family in families(page.render().decode())
        for sample in family.samples
        if sample.name == "http_requests_total"
    }
    assert answers == {"2xx": 1, "5xx": 2}


def test_a_cache_that_others_hold_is_full_and_lets_requests_wait_until_it_is_free() -> None:
    faults = _told(Fault(kv_taken=0.95))
    batch = Batch(PLAIN, [asked(100, 1)], faults)
    started = [batch.end(batch.begin(batch.next_start_s())) for _ in range(3)]
    assert [step.load.waiting for step in started] == [1, 1, 1]
    assert started[0].load.kv_usage == pytest.approx(0.95)
    # Time passes meanwhile.
    assert batch.next_start_s() > 0
    faults.set(Fault())
    (done,) = finished(steps(batch))
    assert done.queue_s > 0


async def _page(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as answer:
        found = families(await answer.text())
    return {
        sample.name: sample.value
        for family in found
        for sample in family.samples
        if sample.name in ("vllm:num_requests_running", "vllm:generation_tokens_total")
    }


async def _tell(session: aiohttp.ClientSession, url: str, **fault: object) -> int:
    async with session.put(f"{url}/simulator/fault", json=fault) as answer:
        return answer.status


@pytest.mark.slow
def test_an_engine_that_hangs_shows_its_work_and_goes_on_afterwards() -> None:
    busy = PLAIN.model_copy(update={"arrival_rate": 100.0})

    async def play() -> None:
        async with running(busy, traffic=True) as url, aiohttp.ClientSession() as session:
            while (await _page(session, url))["vllm:generation_tokens_total"] < 20:
                await asyncio.sleep(0.01)
            assert await _tell(session, url, hang=True) == 204
            # A step that was under way still ends.
            before = None
            while (now := await _page(session, url)) != before:
                before = now
                await asyncio.sleep(0.5)
            assert now["vllm:num_requests_running"] > 0
            assert await _tell(session, url) == 204
            while await _page(session, url) == now:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(play(), 30))


def test_clients_get_the_errors_too_and_a_fault_that_is_none_is_refused() -> None:
    async def play() -> tuple[int, int, str]:
        async with running() as url, aiohttp.ClientSession() as session:
            refused = await _tell(session, url, error_ratio=2)
            assert await _tell(session, url, error_ratio=1) == 204
            async with session.post(f"{url}/v1/chat/completions", json=CHAT) as answer:
                body = await answer.json()
                return refused, answer.status, body["error"]["type"]

    assert asyncio.run(asyncio.wait_for(play(), 30)) == (400, 500, "InternalServerError")
