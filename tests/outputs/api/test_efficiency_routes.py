"""Efficiency, cost and the ledger over HTTP, from computed minutes and hours."""

from typing import Any

import pytest

from agent.records.minute import Ledger
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import objective, record
from tests.records.minutes import UNKNOWN, minute


def store_at_end(api: Api, *rows: Any) -> None:
    """Store these minutes and set the clock to the end of the third minute."""
    api.store_minutes(*rows)
    api.agent.now = rows[0].starts_at + 180.0


def summary(api: Api, **parameters: str) -> dict[str, Any]:
    response: dict[str, Any] = api.query("summary", window="10m", **parameters)
    return response


def test_minutes_add_up_to_the_efficiency_of_the_window(api: Api) -> None:
    pair = {"figure": "mfu", "higher": "requests", "lower": "hardware"}
    found = {**pair, "times": None, "cause": "slow_clock", "causes": ["the clock was low"]}
    store_at_end(api, minute(0), minute(1, disagreements=(found,)))
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
    assert efficiency["disagreements"] == [found]


def test_what_an_engine_counts_of_its_cache_drafts_and_batches_is_shown(api: Api) -> None:
    drafts = {"drafts": 50.0, "draft_tokens": 150.0, "accepted_draft_tokens": 100.0}
    cache = {"prefix_query_tokens": 1000.0, "prefix_hit_tokens": 250.0, "preemptions": 3.0}
    batches = {"running_request_s": 90.0, "place_s": 360.0}
    store_at_end(api, minute(0, **drafts, **cache, **batches), minute(1))
    efficiency = summary(api)["efficiency"]
    hits = {"query_tokens": 1000.0, "hit_tokens": 250.0, "hit_ratio": 0.25}
    assert efficiency["prefix_cache"] == hits
    assert efficiency["speculation"]["acceptance_rate"] == pytest.approx(100 / 150)
    assert efficiency["speculation"]["mean_accepted_length"] == 3.0
    assert efficiency["rejected_draft_share"] == pytest.approx(50 / 250)
    assert efficiency["preemptions"] == 3
    assert efficiency["batch_fill"] == {"requests": 0.25, "tokens": None}


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


def test_cost_per_hour_adds_the_rates_of_the_engines(api: Api) -> None:
    store_at_end(api, minute(0), minute(1), minute(1, engine="chat-1", gpus_usd=3.9))
    assert summary(api)["cost"]["usd_per_hour"] == pytest.approx(60 * 1 + 60 * 4)


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
        assert api.query("efficiency", window="10m", **parameters)["items"] == []
    assert summary(api, engine="chat-0", model="llama")["cost"]["bill_usd"] == 1.0


def test_a_step_has_the_figures_of_its_minutes(api: Api) -> None:
    first, second = minute(0), minute(2, output_tokens=2e6, gpus_usd=99)
    api.store_minutes(first, second)
    api.agent.now = first.starts_at + 180.0
    items = api.query("efficiency", window="10m", step="1m")["items"]
    assert [unix(item["at"]) for item in items] == [first.starts_at, second.starts_at]
    alone = api.query("summary", window="1m")
    assert alone["efficiency"] == items[1]["efficiency"]
    assert alone["cost"] == items[1]["cost"]
    assert (alone["mfu"], alone["mbu"]) == (items[1]["mfu"], items[1]["mbu"])


def test_a_step_shorter_than_a_minute_is_refused(api: Api) -> None:
    for part in ({}, {"tenant": "any"}):
        status, sentence = api.refusal("efficiency", window="10m", step="10s", **part)
        assert status == 422
        assert "not a multiple of 60s" in sentence


def closed(number: int, /, **given: Any) -> Any:
    """A closed minute with this ledger: 300 prompt tokens, 50 output tokens, 5 requests."""
    facts = {"input_tokens": 300.0, "output_tokens": 50.0, "requests": 5.0, "finished": 3.0}
    more = {name: given.pop(name) for name in ("engine", "ledger_closed") if name in given}
    priced = given.pop("priced", True)
    known = {"ledger": Ledger(**(facts | given)), "ledger_closed": True} | more
    return minute(number, **known) if priced else minute(number, **UNKNOWN, **known)


def side(input_tokens: float, output_tokens: float, requests: float) -> dict[str, float]:
    return {"input_tokens": input_tokens, "output_tokens": output_tokens, "requests": requests}


def test_closed_minutes_are_summed_and_open_ones_stand_apart(api: Api) -> None:
    rows = {"row_input_tokens": 100.0, "row_output_tokens": 20.0, "row_requests": 3.0}
    store_at_end(
        api,
        closed(0, **rows, row_finished=2.0, died=1.0, rows_without_tokens=2.0),
        # A request at the edge of both minutes.
        closed(1, row_input_tokens=350.0, row_output_tokens=50.0, row_requests=6.0, finished=6.0),
        closed(2, ledger_closed=False, **rows),
    )
    ledger = summary(api)["ledger"]
    assert ledger["counted"] == side(600, 100, 10)
    assert ledger["unaccounted"] == side(150, 30, 1)
    assert ledger["unaccounted_requests"] == {"died": 1, "finished": 7, "aborted": 0}
    assert ledger["open"] == side(200, 30, 2)
    assert (ledger["unaccounted_usd"], ledger["rows_without_tokens"]) == (pytest.approx(0.1), 2)


def test_what_one_engine_counts_too_little_hides_nothing_of_another(api: Api) -> None:
    store_at_end(api, closed(0), closed(0, engine="chat-1", row_input_tokens=900.0, priced=False))
    ledger = summary(api)["ledger"]
    assert ledger["unaccounted"]["input_tokens"] == 300
    assert summary(api, engine="chat-1")["ledger"]["unaccounted_usd"] is None


def test_what_no_engine_counts_is_unknown(api: Api) -> None:
    store_at_end(api, closed(0, requests=None, finished=None, output_tokens=None), minute(1))
    ledger = summary(api)["ledger"]
    assert ledger["unaccounted"] == {"input_tokens": 300, "output_tokens": None, "requests": None}
    assert ledger["unaccounted_requests"] == {}
    assert summary(api, tenant="acme")["ledger"] is None


def test_an_open_minute_has_nothing_that_is_unaccounted(api: Api) -> None:
    store_at_end(api, closed(0, ledger_closed=False))
    ledger = summary(api)["ledger"]
    assert (ledger["counted_from"], ledger["counted"]) == (None, side(0, 0, 0))
    assert (ledger["unaccounted"], ledger["open"]) == (side(0, 0, 0), side(300, 50, 5))


def test_a_month_counts_every_request_also_those_whose_rows_are_expired(api: Api) -> None:
    """One request every nine hours; each third one is slow."""
    chat, now = objective("chat", ttft_s=0.2), api.agent.now
    ages_s = [600.0 + number * 9 * 3600 for number in range(90)]
    api.store(
        [
            record(number, ended_at=now - age_s, ttft_s=0.1 if number % 3 else 0.5)
            for number, age_s in enumerate(ages_s)
        ],
        [chat],
    )
    api.set_objectives([chat])
    api.fold_and_expire()
    month = api.query("summary", window="30d")
    assert month["window_s"] == pytest.approx(30 * 86400, abs=43200)
    count = sum(age_s <= month["window_s"] for age_s in ages_s)
    assert (month["requests"], month["missed"]) == (count, -(-count // 3))
    assert month["ttft_ms"]["p50"] == pytest.approx(100, rel=0.01)
    assert month["ttft_ms"]["p99"] == pytest.approx(500, rel=0.01)
    (item,) = api.query("objectives", window="30d")["items"]
    assert item["attainment"] == pytest.approx(1 - month["missed"] / count)
