"""Efficiency and cost on the metrics page."""

from math import inf
from typing import Any

import pytest

from agent.outputs.prometheus.efficiency_board import EfficiencyBoard
from agent.records.minute import MinuteRow
from tests.records.minutes import UNKNOWN, minute

Told = dict[tuple[str, ...], float]


def board(*windows: MinuteRow) -> EfficiencyBoard:
    made = EfficiencyBoard()
    for each in windows:
        made.booked(each, None)
    return made


def series(of: EfficiencyBoard) -> Told:
    """Each value by its name and its labels after engine and model."""
    return {
        (shown.name, *list(shown.labels.values())[2:]): shown.value
        for family in of.families()
        for shown in family.samples
        if not shown.name.endswith("_created")
    }


def test_prefill_and_decode_stand_apart_with_who_tells_them() -> None:
    told = series(board(minute()))
    assert told["llm_mfu_ratio", "prefill", "requests"] == pytest.approx(0.5)
    assert told["llm_mbu_ratio", "decode", "requests"] == pytest.approx(0.5)
    assert told["llm_mfu_ratio", "all", "requests"] == pytest.approx(650 / 5500), (
        "without 5 s unread"
    )
    assert told["llm_mfu_ratio", "all", "hardware"] == pytest.approx(0.12)
    assert ("llm_mfu_ratio", "all", "engine") not in told


def test_the_roofline_names_what_bounds_each_phase() -> None:
    told = series(board(minute()))
    assert told["llm_roofline_ridge_flops_per_byte",] == 10
    assert told["llm_roofline_flops_per_byte", "prefill"] == 50
    assert told["llm_roofline_bound", "prefill", "compute-bound"] == 1
    assert told["llm_roofline_bound", "decode", "bandwidth-bound"] == 1
    full = series(board(minute(cache_full_s=40.0)))
    assert full["llm_roofline_bound", "decode", "memory-capacity-bound"] == 1
    assert full["llm_roofline_bound", "prefill", "compute-bound"] == 1


def disagreement(times: float | None, **given: str) -> dict[str, Any]:
    told = {"figure": "mfu", "higher": "requests", "lower": "hardware", "causes": ["a sentence"]}
    return {**told, "times": times, **given}


def test_a_disagreement_is_told_with_a_word_for_its_likely_cause() -> None:
    found = (disagreement(2.5, cause="slow_clock"), disagreement(3.0, figure="mbu"))
    told = series(board(minute(disagreements=found)))
    of = ("requests", "hardware")
    name = "llm_efficiency_disagreement_ratio"
    assert told[name, "mfu", *of, "slow_clock"] == 2.5
    assert told[name, "mbu", *of, "unknown"] == 3.0, "as earlier versions kept them"


def test_a_source_that_tells_0_is_told_as_infinitely_less() -> None:
    found = disagreement(None, cause="counters_stand_still")
    told = series(board(minute(disagreements=(found,))))
    told_of = ("mfu", "requests", "hardware", "counters_stand_still")
    assert told["llm_efficiency_disagreement_ratio", *told_of] == inf


def test_all_shares_together_are_the_bill() -> None:
    told = series(board(minute(0), minute(1)))
    shares = {name[1]: usd for name, usd in told.items() if name[0] == "llm_cost_usd_total"}
    assert sum(shares.values()) == pytest.approx(2.0)
    assert shares["prefill"] == pytest.approx(2 * 0.26)
    assert shares["decode"] == pytest.approx(2 * 0.34)
    assert shares["aborted"] == pytest.approx(2 * 0.1)
    assert told["llm_energy_joules_total",] == 12000


def test_prices_of_tokens_are_those_of_the_newest_minute() -> None:
    told = series(board(minute(0), minute(1, good_tokens=50.0)))
    assert told["llm_cost_usd_per_million_tokens", "input"] == pytest.approx(300)
    assert told["llm_cost_usd_per_million_tokens", "computed_input"] == pytest.approx(0.2e6 / 900)
    assert told["llm_cost_usd_per_million_tokens", "cached_input"] == pytest.approx(1000)
    assert told["llm_cost_usd_per_million_tokens", "output"] == pytest.approx(2000)
    assert told["llm_cost_usd_per_million_tokens", "within_objective"] == pytest.approx(20000)
    assert told["llm_cost_usd_per_million_good_tokens", "chat"] == pytest.approx(10000)
    assert told["llm_cost_usd_per_million_good_tokens", "long"] == pytest.approx(20000)
    assert told["llm_cost_usd_per_request",] == pytest.approx(0.1)
    assert told["llm_cost_usd_per_hour",] == pytest.approx(60)
    assert told["llm_energy_joules_per_output_token",] == 30


def test_what_is_not_known_is_absent() -> None:
    told = series(board(minute(**UNKNOWN)))
    assert {name for name, *_ in told} == {"llm_engine_time_seconds_total"}


def test_a_counter_never_falls_and_is_right_in_the_end() -> None:
    """What was unseen becomes a request's when its row comes, and all are the bill meanwhile."""
    shown = board(minute(0))
    again = minute(0, unseen_usd=0.02, decode_usd=0.43)
    shown.booked(again, minute(0))
    told = series(shown)
    assert told["llm_cost_usd_total", "unseen"] == pytest.approx(0.05)
    assert told["llm_cost_usd_total", "decode"] == pytest.approx(0.34)
    assert whole_bill(told) == pytest.approx(1.0)
    shown.booked(minute(1), None)
    told = series(shown)
    assert told["llm_cost_usd_total", "unseen"] == pytest.approx(0.07)
    assert told["llm_cost_usd_total", "decode"] == pytest.approx(0.71)
    assert whole_bill(told) == pytest.approx(2.0)


def whole_bill(told: Told) -> float:
    return sum(usd for name, usd in told.items() if name[0] == "llm_cost_usd_total")


def test_all_shares_are_the_bill_also_while_one_of_them_told_too_much() -> None:
    """Nothing more is aborted, so that share stays above what it should be."""
    shown = board(minute(0))
    none = {"aborted_usd": 0.0, "aborted_prefill_usd": 0.0}
    shown.booked(minute(0, **none), minute(0))
    shown.booked(minute(1, **none), None)
    told = series(shown)
    assert told["llm_cost_usd_total", "aborted"] == pytest.approx(0.1)
    assert whole_bill(told) == pytest.approx(2.0)


def test_minutes_of_before_a_restart_that_are_counted_again_add_nothing() -> None:
    shown = board()
    shown.booked(minute(0, unseen_usd=0.02, decode_usd=0.43), minute(0))
    assert whole_bill(series(shown)) == 0
    shown.booked(minute(1), None)
    assert whole_bill(series(shown)) == pytest.approx(1.0)


def test_an_old_minute_that_is_counted_again_does_not_replace_the_newest() -> None:
    shown = board(minute(0), minute(1, prefill_flops=1000.0))
    shown.booked(minute(0), minute(0))
    assert series(shown)["llm_mfu_ratio", "prefill", "requests"] == pytest.approx(1.0)
