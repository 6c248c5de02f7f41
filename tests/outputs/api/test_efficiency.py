"""Efficiency and cost in the summary."""

from typing import Any

import pytest

from tests.outputs.api.serving import Api
from tests.records.windows import UNKNOWN, window


def keep(api: Api, *windows: Any) -> None:
    """Keep these windows, and let it be the end of the third minute."""
    api.keep_windows(*windows)
    api.around.now = windows[0].starts_at + 180.0


def summary(api: Api, **asked: str) -> dict[str, Any]:
    told: dict[str, Any] = api.ask("summary", window="10m", **asked)
    return told


def test_minutes_add_up_to_the_figures_of_the_window(api: Api) -> None:
    keep(api, window(0), window(1))
    told = summary(api)
    assert told["mfu"] == pytest.approx(650 / 6000)
    assert told["mbu"] == pytest.approx(160 / 600)
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


def test_costs_are_split_and_add_up_to_the_bill(api: Api) -> None:
    keep(api, window(0), window(1))
    cost = summary(api)["cost"]
    parts = ("prefill_usd", "decode_usd", "idle_usd", "unknown_usd", "unseen_usd")
    assert sum(cost[part] for part in parts) == pytest.approx(cost["bill_usd"]) == 2.0
    assert cost["busy_usd"] == pytest.approx(1.5)
    assert cost["wasted_usd"] == pytest.approx(0.3)
    assert cost["usd_per_million_input_tokens"] == pytest.approx(300)
    assert cost["usd_per_million_output_tokens"] == pytest.approx(2000)
    assert cost["usd_per_million_tokens_within_objective"] == pytest.approx(10000)
    assert cost["usd_per_request"] == pytest.approx(0.07)
    assert cost["allocated_usd_per_request"] == pytest.approx(0.1)
    assert cost["joules_per_output_token"] == pytest.approx(30)
    assert cost["gpu_hours"] == pytest.approx(2 / 60)


def test_an_hour_costs_what_each_engine_would_at_the_rate_of_its_own_minutes(api: Api) -> None:
    keep(api, window(0), window(1), window(1, engine="chat-1", gpus_usd=3.9))
    assert summary(api)["cost"]["usd_per_hour"] == pytest.approx(60 * 1 + 60 * 4)


def test_without_a_price_for_all_of_it_there_is_no_cost(api: Api) -> None:
    keep(api, window(0), window(1, **UNKNOWN))
    told = summary(api)
    assert told["cost"] is None
    assert told["mfu"] == pytest.approx(650 / 6000), "of the minutes whose model is known"


def test_what_is_not_known_is_null(api: Api) -> None:
    keep(api, window(0, **UNKNOWN))
    told = summary(api)
    assert (told["mfu"], told["mbu"], told["cost"]) == (None, None, None)
    assert told["efficiency"]["prefill"] is None


def test_of_a_tenant_or_another_engine_nothing_is_told(api: Api) -> None:
    keep(api, window(0))
    for asked in ({"tenant": "a"}, {"objective": "chat"}, {"engine": "other"}):
        told = summary(api, **asked)
        assert (told["mfu"], told["cost"], told["efficiency"]) == (None, None, None)
    assert summary(api, engine="chat-0", model="llama")["cost"]["bill_usd"] == 1.0
