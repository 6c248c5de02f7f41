"""Scenario files, and the traffic that they plan."""

from collections import Counter
from dataclasses import astuple
from itertools import islice, pairwise, takewhile
from pathlib import Path
from random import Random
from statistics import median

import pytest

from agent.errors import SettingsInvalid
from agent.simulator.batching import EngineRequest
from agent.simulator.scenario import Scenario, TokenLengths, TrafficPhase, load_scenario
from tests.simulator.kit import numbered_requests


def _scenario_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _problems(tmp_path: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(SettingsInvalid) as raised:
        load_scenario(_scenario_file(tmp_path, text))
    return raised.value.problems


def test_the_packaged_file_has_the_defaults_and_a_missing_one_is_reported(tmp_path: Path) -> None:
    assert load_scenario() == Scenario()
    with pytest.raises(SettingsInvalid, match=r"absent.yaml: cannot be read: No such file"):
        load_scenario(tmp_path / "absent.yaml")


def test_every_problem_of_a_file_is_reported_with_its_value(tmp_path: Path) -> None:
    problems = _problems(tmp_path, "sede: 1\nmax_num_seqs: 0\ndecode: {base_s: fast}\n")
    assert len(problems) == 3
    for place, value in (("sede", "1"), ("max_num_seqs", "0"), ("decode.base_s", "'fast'")):
        assert any(
            f": {place}: " in problem and f"(got {value})" in problem for problem in problems
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_model_len: 7000", "input_tokens.max + output_tokens.max is 7024"),
        ("kv_cache: {blocks: 10}", "does not fit into kv_cache of 10 x 16 tokens"),
        ("max_num_batched_tokens: 32", "must be at least max_num_seqs 64"),
        ("arrival_rate: 0", "greater than 0"),
        ("arrival_rate: [{duration_s: 5, rate_per_s: 0}]", "above 0"),
        ("arrival_rate: []", "above 0"),
        ("input_tokens: {median: 9, sigma: 1, min: 10, max: 20}", "median 9 must lie between"),
        ("abort_ratio: 1.1", "less than or equal to 1"),
        ("time_scale: .nan", "finite number"),
        ("model: llama-3-8b", "must contain 'simulated', so that it does not pass as a real"),
        ("[seed, 1]", "valid dictionary"),
        ("{", "is not YAML"),
    ],
)
def test_a_scenario_that_cannot_run_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert any(message in problem for problem in _problems(tmp_path, text))


def test_lengths_are_lognormal_and_cut_off_at_both_ends() -> None:
    lengths = TokenLengths(median=100, sigma=0.5, min=60, max=300)
    drawn = sorted(lengths.draw(random) for random in [Random(1)] for _ in range(4000))
    assert (drawn[0], drawn[-1]) == (60, 300)
    assert median(drawn) == pytest.approx(100, rel=0.03)
    # Of a lognormal with sigma 0.5, 84.1 % lie below median x e^0.5.
    assert drawn[int(0.841 * len(drawn))] == pytest.approx(100 * 2.718281828**0.5, rel=0.05)


def test_the_time_scale_applies_to_every_rate_and_duration() -> None:
    fast = Scenario(time_scale=10).in_real_time()
    slow = Scenario()
    assert fast.phases == (
        TrafficPhase(duration_s=24.0, rate_per_s=30.0),
        TrafficPhase(duration_s=6.0, rate_per_s=70.0),
    )
    assert fast.prefill.duration_s(5000) == pytest.approx(slow.prefill.duration_s(5000) / 10)
    assert fast.prefill.duration_s(1) == pytest.approx(slow.prefill.duration_s(1) / 10)
    assert fast.decode.duration_s(7) == pytest.approx(slow.decode.duration_s(7) / 10)
    assert fast.in_real_time() == fast


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


def test_a_response_of_max_length_ends_by_length_and_a_shorter_one_by_stop() -> None:
    for request in _first(Scenario()):
        at_the_limit = request.output_tokens == Scenario().output_tokens.max
        assert request.finish_reason == ("length" if at_the_limit else "stop")
    assert {request.finish_reason for request in _first(Scenario(), 3000)} == {"length", "stop"}
