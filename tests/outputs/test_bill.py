"""The API and the exposition give the same whole bill for stored minutes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.outputs.api.efficiency_routes import efficiency_and_cost_of
from agent.outputs.prometheus.agent_exposition import EfficiencyBoard
from agent.records.minute import MinuteRow
from agent.records.request import Status
from tests.pipeline.minutes import PRICE, Minutes, every_5_s, timed_request
from tests.records.minutes import cost_of
from tests.store.migrated import migrated_in


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A new SQLite database."""
    with migrated_in(tmp_path) as engine:
        yield engine


@pytest.fixture
def minutes(database: Engine) -> Minutes:
    """One request is cancelled, one has no row yet, and the engine is down for half a minute."""
    minutes = Minutes(database, PRICE)
    for at in [*every_5_s(100), *every_5_s(215, after=130.0)]:
        steps = min(at, 170.0)
        minutes.read_one(
            at, running=float(at < 170), steps=steps, output=3 * steps, input=9 * steps
        )
    minutes.take(
        timed_request(1, 10.0, 20.0, status=Status.CANCELLED), timed_request(2, 20.0, 60.0)
    )
    return minutes


def response_cost(rows: list[MinuteRow]) -> dict[str, Any]:
    cost = efficiency_and_cost_of(rows)["cost"]
    values: dict[str, Any] = cost.model_dump()
    return values


def exposition_shares(minutes: Minutes) -> dict[str, float]:
    """Return the dollars of each share."""
    board = EfficiencyBoard()
    for row, before in minutes.published:
        board.add(row, before)
    return {
        sample.labels["share"]: sample.value
        for family in board.families()
        for sample in family.samples
        if sample.name == "llm_cost_usd_total"
    }


def test_requests_and_idle_and_wasted_add_up_to_the_bill_in_both(minutes: Minutes) -> None:
    rows = minutes.computed(211.0)
    cost, shares = response_cost(rows), exposition_shares(minutes)
    of_requests = sum(usd or 0.0 for usd in minutes.costs())
    not_of_requests = ("unseen_usd", "idle_usd", "unknown_usd")
    assert cost["bill_usd"] == pytest.approx(0.18)
    assert of_requests + sum(cost[part] for part in not_of_requests) == pytest.approx(0.18)
    assert of_requests == pytest.approx(cost["prefill_usd"] + cost["decode_usd"])
    useful = of_requests - cost["aborted_usd"]
    idle = cost["idle_usd"] + cost["unknown_usd"]
    assert useful + idle + cost["wasted_usd"] == pytest.approx(0.18)
    assert min(cost[part] for part in (*not_of_requests, "aborted_usd")) > 0
    assert sum(shares.values()) == pytest.approx(0.18)
    assert shares["aborted"] == pytest.approx(cost["aborted_usd"])
    assert shares["prefill"] + shares["decode"] == pytest.approx(useful)
    for part in ("unseen", "idle", "unknown"):
        assert shares[part] == pytest.approx(cost[f"{part}_usd"])


def test_a_late_row_moves_cost_to_its_request_and_keeps_the_bill(minutes: Minutes) -> None:
    """Unseen cost that was published too high is subtracted from later minutes."""
    (before,) = minutes.computed(91.0)
    minutes.take(timed_request(3, 5.0, 50.0, output_tokens=200))
    after, *later = minutes.computed(211.0)
    moved = cost_of(before).unseen - cost_of(after).unseen
    assert moved > 0
    cost, shares = response_cost([after, *later]), exposition_shares(minutes)
    assert cost["bill_usd"] == pytest.approx(0.18)
    assert shares["unseen"] == pytest.approx(cost["unseen_usd"], rel=0.02)
    assert sum(shares.values()) == pytest.approx(0.18)
