"""Efficiency and cost in the summary."""

from typing import Any

import pytest

from tests.outputs.api.serving import Api
from tests.records.minutes import UNKNOWN, minute


def keep(api: Api, *windows: Any) -> None:
    """Keep these minutes, and let it be the end of the third minute."""
    api.keep_minutes(*windows)
    api.around.now = windows[0].starts_at + 180.0


def summary(api: Api, **asked: str) -> dict[str, Any]:
    told: dict[str, Any] = api.ask("summary", window="10m", **asked)
    return told


def test_minutes_add_up_to_the_figures_of_the_window(api: Api) -> None:
    keep(api, minute(0), minute(1))
    told = summary(api)
    assert told["mfu"] == pytest.approx(650 / 5500), "without the 5 s of each that are unknown"
    assert told["mbu"] == pytest.approx(160 / 550)
    found = told["efficiency"]
    assert found["prefill"]["mfu"] == pytest.approx(0.5)
    assert found["prefill"]["bound"] == "compute-bound"
    assert found["prefill"]["actions"][0].startswith("quantise weights and activations")
    assert found["decode"]["mbu"] == pytest.approx(0.5)
    assert found["decode"]["flops_per_byte"] == pytest.approx(1.0)
    assert found["decode"]["actions"][0].startswith("run more requests at once")
    assert found["sources"]["hardware"]["mfu"] == pytest.approx(0.12)
    assert found["sources"]["hardware"]["mbu"] is None
    assert found["steps"] == ["counted"]
    assert found["prefill"]["achieved_flops_per_s"] == pytest.approx(50)
    assert found["decode"]["achieved_bytes_per_s"] == pytest.approx(5)
    assert (found["rejected_draft_share"], found["preemptions"]) == (None, None)


def test_what_the_engine_did_in_vain_is_told_where_it_counts_it(api: Api) -> None:
    drafts = {"draft_tokens": 150.0, "accepted_draft_tokens": 100.0, "preemptions": 3.0}
    keep(api, minute(0, **drafts), minute(1))
    found = summary(api)["efficiency"]
    assert found["rejected_draft_share"] == pytest.approx(50 / 250)
    assert found["preemptions"] == 3


def test_costs_are_split_and_add_up_to_the_bill(api: Api) -> None:
    keep(api, minute(0), minute(1))
    cost = summary(api)["cost"]
    parts = ("prefill_usd", "decode_usd", "idle_usd", "unknown_usd", "unseen_usd")
    assert sum(cost[part] for part in parts) == pytest.approx(cost["bill_usd"]) == 2.0
    assert cost["busy_usd"] == pytest.approx(1.5)
    assert cost["wasted_usd"] == pytest.approx(0.3)
    assert cost["usd_per_million_input_tokens"] == pytest.approx(300)
    assert cost["usd_per_million_computed_input_tokens"] == pytest.approx(0.2e6 / 900)
    assert cost["usd_per_million_cached_input_tokens"] == pytest.approx(1000)
    assert cost["usd_per_million_output_tokens"] == pytest.approx(2000)
    assert cost["usd_per_million_tokens_within_objective"] == pytest.approx(10000)
    assert cost["usd_per_request"] == pytest.approx(0.07)
    assert cost["allocated_usd_per_request"] == pytest.approx(0.1)
    assert cost["joules_per_output_token"] == pytest.approx(30)
    assert cost["gpu_hours"] == pytest.approx(2 / 60)


def test_the_bill_is_told_by_the_tokens_that_met_each_objective(api: Api) -> None:
    keep(
        api,
        minute(0, good_tokens_by_objective={"chat": 100.0, "long": 0.0}),
        minute(1, good_tokens_by_objective={"chat": 300.0, "batch": 50.0}),
        minute(1, engine="chat-1", good_tokens_by_objective=None),
        minute(1, engine="chat-2", **UNKNOWN),
    )
    told = summary(api)["cost"]["usd_per_million_tokens_by_objective"]
    assert told == {"chat": pytest.approx(5000), "batch": pytest.approx(40000)}


def test_a_disagreement_is_told_with_its_causes(api: Api) -> None:
    pair = {"figure": "mfu", "higher": "requests", "lower": "hardware"}
    found = {**pair, "times": None, "cause": "slow_clock", "causes": ["the clock was low"]}
    keep(api, minute(0, disagreements=(found,)))
    assert summary(api)["efficiency"]["disagreements"] == [found]


def test_an_hour_costs_what_each_engine_would_at_the_rate_of_its_own_minutes(api: Api) -> None:
    keep(api, minute(0), minute(1), minute(1, engine="chat-1", gpus_usd=3.9))
    assert summary(api)["cost"]["usd_per_hour"] == pytest.approx(60 * 1 + 60 * 4)


def test_minutes_without_a_price_are_left_out_and_told(api: Api) -> None:
    keep(api, minute(0), minute(1, **UNKNOWN))
    told = summary(api)
    cost = told["cost"]
    assert (cost["priced_s"], cost["unpriced_s"]) == (60, 60)
    assert cost["bill_usd"] == 1.0
    assert cost["electricity_usd"] == pytest.approx(0.1)
    assert cost["usd_per_hour"] == pytest.approx(60)
    assert cost["usd_per_request"] == pytest.approx(0.07)
    assert cost["usd_per_million_tokens_within_objective"] == pytest.approx(10000)
    assert cost["joules_per_output_token"] == pytest.approx(30)
    assert (cost["joules"], cost["gpu_hours"]) == (None, None)
    assert told["mfu"] == pytest.approx(650 / 5500), "of the minutes whose model is known"


def test_what_is_not_known_is_null(api: Api) -> None:
    keep(api, minute(0, **UNKNOWN))
    told = summary(api)
    assert (told["mfu"], told["mbu"], told["cost"]) == (None, None, None)
    assert told["efficiency"]["prefill"] is None


def test_of_a_tenant_or_another_engine_nothing_is_told(api: Api) -> None:
    keep(api, minute(0))
    for asked in ({"tenant": "a"}, {"objective": "chat"}, {"engine": "other"}):
        told = summary(api, **asked)
        assert (told["mfu"], told["cost"], told["efficiency"]) == (None, None, None)
    assert summary(api, engine="chat-0", model="llama")["cost"]["bill_usd"] == 1.0
