"""Efficiency and cost in the summary."""

from typing import Any

import pytest

from tests.outputs.api.serving import Api
from tests.records.minutes import UNKNOWN, minute


def store_at_end(api: Api, *rows: Any) -> None:
    """Store these minutes and set the clock to the end of the third minute."""
    api.store_minutes(*rows)
    api.agent.now = rows[0].starts_at + 180.0


def summary(api: Api, **parameters: str) -> dict[str, Any]:
    response: dict[str, Any] = api.query("summary", window="10m", **parameters)
    return response


def test_minutes_add_up_to_the_efficiency_of_the_window(api: Api) -> None:
    store_at_end(api, minute(0), minute(1))
    response = summary(api)
    assert response["mfu"] == pytest.approx(650 / 5500), "without the 5 s of each that are unknown"
    assert response["mbu"] == pytest.approx(160 / 550)
    efficiency = response["efficiency"]
    assert efficiency["prefill"]["mfu"] == pytest.approx(0.5)
    assert efficiency["prefill"]["bound"] == "compute-bound"
    assert efficiency["prefill"]["actions"][0].startswith("quantise weights and activations")
    assert efficiency["decode"]["mbu"] == pytest.approx(0.5)
    assert efficiency["decode"]["flops_per_byte"] == pytest.approx(1.0)
    assert efficiency["decode"]["actions"][0].startswith("run more requests at once")
    assert efficiency["sources"]["hardware"]["mfu"] == pytest.approx(0.12)
    assert efficiency["sources"]["hardware"]["mbu"] is None
    assert efficiency["steps"] == ["counted"]
    assert efficiency["prefill"]["achieved_flops_per_s"] == pytest.approx(50)
    assert efficiency["decode"]["achieved_bytes_per_s"] == pytest.approx(5)
    assert (efficiency["rejected_draft_share"], efficiency["preemptions"]) == (None, None)
    unknown = ("prefix_cache", "speculation", "batch_fill")
    assert {efficiency[name] for name in unknown} == {None}


def test_rejected_drafts_and_preemptions_are_shown_when_the_engine_counts_them(api: Api) -> None:
    drafts = {"draft_tokens": 150.0, "accepted_draft_tokens": 100.0, "preemptions": 3.0}
    store_at_end(api, minute(0, **drafts), minute(1))
    efficiency = summary(api)["efficiency"]
    assert efficiency["rejected_draft_share"] == pytest.approx(50 / 250)
    assert efficiency["preemptions"] == 3


def test_caches_and_drafts_are_shown_when_the_engine_counts_them(api: Api) -> None:
    drafts = {"drafts": 50.0, "draft_tokens": 150.0, "accepted_draft_tokens": 100.0}
    cache = {"prefix_query_tokens": 1000.0, "prefix_hit_tokens": 250.0}
    store_at_end(api, minute(0, **drafts, **cache), minute(1))
    efficiency = summary(api)["efficiency"]
    assert efficiency["prefix_cache"] == {
        "query_tokens": 1000.0,
        "hit_tokens": 250.0,
        "hit_ratio": 0.25,
    }
    speculation = efficiency["speculation"]
    assert speculation["acceptance_rate"] == pytest.approx(100 / 150)
    assert speculation["mean_accepted_length"] == 3.0


def test_the_fill_of_batches_is_shown_where_limits_are_known(api: Api) -> None:
    store_at_end(api, minute(0, running_request_s=90.0, place_s=360.0), minute(1))
    assert summary(api)["efficiency"]["batch_fill"] == {"requests": 0.25, "tokens": None}


def test_costs_are_split_and_add_up_to_the_bill(api: Api) -> None:
    store_at_end(api, minute(0), minute(1))
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


def test_cost_per_token_is_given_for_each_objective(api: Api) -> None:
    store_at_end(
        api,
        minute(0, good_tokens_by_objective={"chat": 100.0, "long": 0.0}),
        minute(1, good_tokens_by_objective={"chat": 300.0, "batch": 50.0}),
        minute(1, engine="chat-1", good_tokens_by_objective=None),
        minute(1, engine="chat-2", **UNKNOWN),
    )
    cost_per_token = summary(api)["cost"]["usd_per_million_tokens_by_objective"]
    assert cost_per_token == {"chat": pytest.approx(5000), "batch": pytest.approx(40000)}


def test_a_disagreement_is_shown_with_its_causes(api: Api) -> None:
    pair = {"figure": "mfu", "higher": "requests", "lower": "hardware"}
    found = {**pair, "times": None, "cause": "slow_clock", "causes": ["the clock was low"]}
    store_at_end(api, minute(0, disagreements=(found,)))
    assert summary(api)["efficiency"]["disagreements"] == [found]


def test_cost_per_hour_adds_the_rates_of_the_engines(api: Api) -> None:
    store_at_end(api, minute(0), minute(1), minute(1, engine="chat-1", gpus_usd=3.9))
    assert summary(api)["cost"]["usd_per_hour"] == pytest.approx(60 * 1 + 60 * 4)


def test_minutes_without_a_price_are_left_out_and_counted(api: Api) -> None:
    store_at_end(api, minute(0), minute(1, **UNKNOWN))
    response = summary(api)
    cost = response["cost"]
    assert (cost["priced_s"], cost["unpriced_s"]) == (60, 60)
    assert cost["bill_usd"] == 1.0
    assert cost["electricity_usd"] == pytest.approx(0.1)
    assert cost["usd_per_hour"] == pytest.approx(60)
    assert cost["usd_per_request"] == pytest.approx(0.07)
    assert cost["usd_per_million_tokens_within_objective"] == pytest.approx(10000)
    assert cost["joules_per_output_token"] == pytest.approx(30)
    assert (cost["joules"], cost["gpu_hours"]) == (None, None)
    assert response["mfu"] == pytest.approx(650 / 5500), "of the minutes whose model is known"


def test_unknown_efficiency_and_cost_are_null(api: Api) -> None:
    store_at_end(api, minute(0, **UNKNOWN))
    response = summary(api)
    assert (response["mfu"], response["mbu"], response["cost"]) == (None, None, None)
    assert response["efficiency"]["prefill"] is None


def test_a_tenant_an_objective_and_an_unknown_engine_have_no_efficiency(api: Api) -> None:
    store_at_end(api, minute(0))
    for parameters in ({"tenant": "a"}, {"objective": "chat"}, {"engine": "other"}):
        response = summary(api, **parameters)
        assert (response["mfu"], response["cost"], response["efficiency"]) == (None, None, None)
    assert summary(api, engine="chat-0", model="llama")["cost"]["bill_usd"] == 1.0
