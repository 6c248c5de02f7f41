"""Queries over a month, whose requests are partly expired."""

from typing import Any

import pytest

from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import NOON, objective, record

DAY_S = 86400
MONTH = {"window": "30d"}
CHAT = objective("chat", ttft_s=0.2)

# One request every nine hours; each third one is slow.
AGES_S = [600.0 + number * 9 * 3600 for number in range(90)]


def at_age(number: int, age_s: float, now: float) -> RequestRecord:
    ended_at = now - age_s
    return record(
        number,
        started_at=ended_at - 0.5,
        ended_at=ended_at,
        received_at=ended_at + 0.1,
        ttft_s=0.5 if number % 3 == 0 else 0.1,
        tenant=("acme", "umbrella")[number % 2],
    )


@pytest.fixture
def month(api: Api) -> Api:
    """An API with a month of traffic, whose older requests are expired."""
    api.agent.now = NOON + 333.75
    now = api.agent.now
    records = [at_age(number, age_s, now) for number, age_s in enumerate(AGES_S)]
    api.store(records, [CHAT])
    api.set_objectives([CHAT])
    api.fold_and_expire()
    return api


def within(response: dict[str, Any], month: Api) -> list[int]:
    """Return the numbers of the requests in the window that a response states."""
    length_s = response["window_s"]
    assert length_s == pytest.approx(30 * DAY_S, abs=DAY_S / 2)
    return [number for number, age_s in enumerate(AGES_S) if age_s <= length_s]


def test_a_summary_of_a_month_counts_every_request_up_to_now(month: Api) -> None:
    summary = month.query("summary", **MONTH)
    numbers = within(summary, month)
    assert summary["requests"] == len(numbers)
    assert summary["missed"] == sum(number % 3 == 0 for number in numbers)
    assert summary["ttft_ms"]["p50"] == pytest.approx(100, rel=0.01)
    assert summary["ttft_ms"]["p99"] == pytest.approx(500, rel=0.01)


def test_a_breakdown_of_a_month_counts_each_group(month: Api) -> None:
    breakdown = month.query("breakdown", by="tenant", **MONTH)
    numbers = within(breakdown, month)
    counted = {group["group"]: group["requests"] for group in breakdown["groups"]}
    odd = sum(number % 2 for number in numbers)
    assert counted == {"acme": len(numbers) - odd, "umbrella": odd}


def test_an_objective_of_a_month_is_judged_over_the_month(month: Api) -> None:
    (item,) = month.query("objectives", **MONTH)["items"]
    numbers = within(item, month)
    missed = sum(number % 3 == 0 for number in numbers)
    assert item["attainment"] == pytest.approx(1 - missed / len(numbers))


def test_each_day_of_a_month_counts_its_own_requests(month: Api) -> None:
    items = month.query("timeseries", step="1d", **MONTH)["items"]
    assert len(items) in (30, 31)
    now = month.agent.now
    for item in items:
        start = unix(item["at"])
        ended = [now - age_s for age_s in AGES_S if start <= now - age_s < start + DAY_S]
        assert item["requests"] == len(ended)
