"""Efficiency and cost by step: each step has the figures of a summary of its minutes alone."""

import pytest

from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.minutes import minute


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


def test_wide_steps_add_their_minutes_up(api: Api) -> None:
    rows = [minute(number) for number in range(10)]
    api.store_minutes(*rows)
    api.agent.now = rows[0].starts_at + 600.0
    items = api.query("efficiency", window="10m", step="5m")["items"]
    bills = {unix(item["at"]): item["cost"]["bill_usd"] for item in items}
    expected = {
        at: sum(row.bill_usd or 0.0 for row in rows if at <= row.starts_at < at + 300)
        for at in bills
    }
    assert bills == pytest.approx(expected)
    assert 1 < len(bills) < len(rows)


def test_each_of_many_minutes_is_a_step_of_its_own(api: Api) -> None:
    rows = [minute(number, gpus_usd=number) for number in range(1, 9)]
    api.store_minutes(*rows)
    api.agent.now = rows[-1].starts_at + 60.0
    items = api.query("efficiency", window="10m", step="1m")["items"]
    bills = {unix(item["at"]): item["cost"]["bill_usd"] for item in items}
    assert bills == pytest.approx({row.starts_at: row.bill_usd for row in rows})


def test_a_part_of_the_requests_has_no_efficiency(api: Api) -> None:
    api.store_minutes(minute(0))
    api.agent.now = minute(0).starts_at + 100.0
    for part in ("tenant", "objective"):
        assert api.query("efficiency", window="10m", **{part: "any"})["items"] == []


def test_a_step_shorter_than_a_minute_is_refused(api: Api) -> None:
    for part in ({}, {"tenant": "any"}):
        status, sentence = api.refusal("efficiency", window="10m", step="10s", **part)
        assert status == 422
        assert "no multiple of 60s" in sentence
