"""The API and the metrics page tell the same whole bill of minutes that were really counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.outputs.api.efficiency_response import efficiency_and_cost
from agent.outputs.prometheus.efficiency_board import EfficiencyBoard
from agent.records.minute import MinuteRow
from agent.records.queries import Selection, Window
from agent.records.request import Status
from tests.pipeline.minutes import PRICE, Minutes, asked
from tests.pipeline.test_minute_jobs import every_5_s, opened


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A new SQLite database."""
    yield from opened(f"sqlite:///{tmp_path / 'goodput.db'}")


@pytest.fixture
def minutes(database: Engine) -> Minutes:
    """One request is given up, one has no row yet, and the engine is away for half a minute."""
    counted = Minutes(database, PRICE)
    for at in [*every_5_s(100), *every_5_s(215, after=130.0)]:
        told = min(at, 170.0)
        counted.read_one(at, running=float(at < 170), steps=told, output=3 * told, input=9 * told)
    counted.take(asked(1, 10.0, 20.0, status=Status.CANCELLED), asked(2, 20.0, 60.0))
    return counted


def answered(windows: list[MinuteRow]) -> dict[str, Any]:
    over = Window(from_s=0, until=windows[-1].until)
    cost = efficiency_and_cost(lambda *_: windows, over, Selection())["cost"]
    told: dict[str, Any] = cost.model_dump()
    return told


def page(minutes: Minutes) -> dict[str, float]:
    """Dollars by what they were for."""
    board = EfficiencyBoard()
    for window, before in minutes.shown:
        board.booked(window, before)
    return {
        shown.labels["share"]: shown.value
        for family in board.families()
        for shown in family.samples
        if shown.name == "llm_cost_usd_total"
    }


def test_requests_and_idle_and_wasted_are_the_bill_on_both(minutes: Minutes) -> None:
    windows = minutes.count(211.0)
    cost, shares = answered(windows), page(minutes)
    of_requests = sum(usd or 0.0 for usd in minutes.costs())
    nobodys = ("unseen_usd", "idle_usd", "unknown_usd")
    assert cost["bill_usd"] == pytest.approx(0.18)
    assert of_requests + sum(cost[part] for part in nobodys) == pytest.approx(0.18)
    assert of_requests == pytest.approx(cost["prefill_usd"] + cost["decode_usd"])
    useful = of_requests - cost["aborted_usd"]
    idle = cost["idle_usd"] + cost["unknown_usd"]
    assert useful + idle + cost["wasted_usd"] == pytest.approx(0.18)
    assert min(cost[part] for part in (*nobodys, "aborted_usd")) > 0
    assert sum(shares.values()) == pytest.approx(0.18)
    assert shares["aborted"] == pytest.approx(cost["aborted_usd"])
    assert shares["prefill"] + shares["decode"] == pytest.approx(useful)
    for part in ("unseen", "idle", "unknown"):
        assert shares[part] == pytest.approx(cost[f"{part}_usd"])


def test_a_row_that_comes_late_changes_whose_it_was_and_not_the_bill(minutes: Minutes) -> None:
    """What the page told of the unseen before is taken from what is unseen next."""
    (before,) = minutes.count(91.0)
    minutes.take(asked(3, 5.0, 50.0, output_tokens=200))
    after, *later = minutes.count(211.0)
    given = (before.unseen_usd or 0.0) - (after.unseen_usd or 0.0)
    assert given > 0
    cost, shares = answered([after, *later]), page(minutes)
    assert cost["bill_usd"] == pytest.approx(0.18)
    assert shares["unseen"] == pytest.approx(cost["unseen_usd"], rel=0.02)
    assert sum(shares.values()) == pytest.approx(0.18)
