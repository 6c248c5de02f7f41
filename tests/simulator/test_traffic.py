"""The planned traffic of a scenario."""

from collections import Counter
from dataclasses import astuple
from itertools import islice, pairwise, takewhile

import pytest

from agent.simulator.batching import EngineRequest
from agent.simulator.scenario import Scenario, TrafficPhase
from tests.simulator.kit import numbered_requests


def _first(scenario: Scenario, many: int = 500) -> list[EngineRequest]:
    return list(islice(numbered_requests(scenario), many))


def _as_plain_values(requests: list[EngineRequest]) -> list[tuple[object, ...]]:
    return [astuple(request) for request in requests]


def test_the_same_seed_plans_the_same_requests() -> None:
    again = _as_plain_values(_first(Scenario(seed=11)))
    assert _as_plain_values(_first(Scenario(seed=11))) == again
    assert _as_plain_values(_first(Scenario(seed=12))) != again


def test_requests_are_in_the_order_of_arrival_with_exponential_gaps() -> None:
    requests = _first(Scenario(arrival_rate=4.0), 4000)
    gaps_s = [later.arrived_s - earlier.arrived_s for earlier, later in pairwise(requests)]
    assert min(gaps_s) >= 0
    mean_s = sum(gaps_s) / len(gaps_s)
    assert mean_s == pytest.approx(0.25, rel=0.05)
    # The spread of exponential gaps equals their mean; evenly spaced arrivals have none.
    spread_s = (sum((gap - mean_s) ** 2 for gap in gaps_s) / len(gaps_s)) ** 0.5
    assert spread_s == pytest.approx(mean_s, rel=0.05)


def test_the_arrival_rate_follows_phases_that_repeat() -> None:
    phases = (
        TrafficPhase(duration_s=30, rate_per_s=2),
        TrafficPhase(duration_s=10, rate_per_s=0),
        TrafficPhase(duration_s=20, rate_per_s=20),
    )
    requests = takewhile(
        lambda request: request.arrived_s < 60 * 20,
        numbered_requests(Scenario(arrival_rate=phases)),
    )
    seconds = Counter(int(request.arrived_s % 60) for request in requests)
    assert sum(seconds[second] for second in range(30)) == pytest.approx(2 * 30 * 20, rel=0.1)
    assert sum(seconds[second] for second in range(30, 40)) == 0
    assert sum(seconds[second] for second in range(40, 60)) == pytest.approx(20 * 20 * 20, rel=0.05)


def test_a_time_scale_changes_arrival_times_and_not_requests() -> None:
    slow = _first(Scenario().in_real_time())
    fast = _first(Scenario(time_scale=20).in_real_time())
    assert [request.arrived_s * 20 for request in fast] == pytest.approx(
        [request.arrived_s for request in slow]
    )
    assert [(request.prompt_tokens, request.output_tokens) for request in fast] == [
        (request.prompt_tokens, request.output_tokens) for request in slow
    ]


def test_the_abort_ratio_is_the_share_of_clients_that_leave_before_the_last_token() -> None:
    requests = _first(Scenario(abort_ratio=0.25), 4000)
    leaving = [request for request in requests if request.leaves_after_tokens is not None]
    assert len(leaving) / len(requests) == pytest.approx(0.25, rel=0.1)
    assert all(
        1 <= (request.leaves_after_tokens or 0) < request.output_tokens for request in leaving
    )


def test_the_abort_ratio_changes_which_clients_leave_and_not_the_requests() -> None:
    patient, hasty = _first(Scenario(abort_ratio=0)), _first(Scenario(abort_ratio=1))
    assert all(request.leaves_after_tokens is None for request in patient)
    assert [(r.arrived_s, r.prompt_tokens, r.output_tokens) for r in patient] == [
        (r.arrived_s, r.prompt_tokens, r.output_tokens) for r in hasty
    ]


def test_a_response_of_max_length_ends_by_length_and_a_shorter_one_by_stop() -> None:
    for request in _first(Scenario()):
        at_the_limit = request.output_tokens == Scenario().output_tokens.max
        assert request.finish_reason == ("length" if at_the_limit else "stop")
    assert {request.finish_reason for request in _first(Scenario(), 3000)} == {"length", "stop"}
