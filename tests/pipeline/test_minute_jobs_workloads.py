"""GPU time of each request, and tokens within each objective."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.catalog import engine_facts as fact
from agent.catalog.definitions import Verdict
from agent.store.observations import ObservationStore
from tests.analysis.cost.engine_days import engine_sample
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.sources.model_config.published import published
from tests.store.making import NOON, judgement
from tests.store.migrated import migrated_in

MET, MISSED = Verdict.MET, Verdict.MISSED
LAYERS, KV_VALUES = 32, 2 * 8 * 128


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A new SQLite database."""
    with migrated_in(tmp_path) as engine:
        yield engine


def busy_minute(minutes: Minutes) -> None:
    """A request of 30 s, then one of 15 s, then 15 s idle."""
    minutes.take(
        timed_request(1, 0.0, 30.0, judged=judgement(MET, chat=MET, long=MET)),
        timed_request(2, 30.0, 15.0, judged=judgement(MISSED, chat=MISSED, long=MET)),
    )
    for at in (5.0 * step for step in range(13)):
        done = min(at, 45.0) / 45.0
        minutes.read_one(at, running=float(at < 45.0), input=200.0 * done, output=52.0 * done)


def test_gpu_hours_need_no_price(database: Engine) -> None:
    minutes = Minutes(database)
    busy_minute(minutes)
    (window,) = minutes.booked(91.0)
    rows = minutes.rows()
    assert [row["cost_usd"] for row in rows] == [None, None]
    hours = [row["gpu_hours"] for row in rows]
    assert sum(hours) == pytest.approx(window.work.busy_s / 3600) == 45 / 3600
    assert all(hours)


def test_gpu_hours_are_split_like_the_bill(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    busy_minute(minutes)
    minutes.book(91.0)
    for row in minutes.rows():
        assert row["cost_usd"] == pytest.approx(3.6 * row["gpu_hours"])


def test_tokens_are_counted_by_each_objective_that_was_met(database: Engine) -> None:
    minutes = Minutes(database)
    busy_minute(minutes)
    (window,) = minutes.booked(91.0)
    assert window.good_tokens == 26
    assert window.good_tokens_by_objective == {"chat": 26, "long": 52}


@pytest.mark.parametrize(
    ("reported", "configured", "width"), [(None, False, 2), (1.0, False, 1), (1.0, True, 2)]
)
def test_kv_bytes_use_the_width_that_the_engine_reports(
    database: Engine, reported: float | None, configured: bool, width: int
) -> None:
    """A configured width overrides it."""
    minutes = Minutes(database, model=published("llama-3.1-8b"), cache_configured=configured)
    busy_minute(minutes)
    if reported is not None:
        sample = engine_sample(NOON + 57.0, running=0.0, input=200.0, output=52.0)
        facts = {**sample.facts, (fact.KV_VALUE_BYTES.name, ()): reported}
        ObservationStore(database, "agent-0").write_engine_sample(replace(sample, facts=facts))
    minutes.book(91.0)
    row = minutes.rows()[0]
    # Written for each token of the prompt, and read once in a prefill of one chunk.
    tokens = 100 + 100
    assert row["prefill_kv_bytes"] == pytest.approx(tokens * LAYERS * KV_VALUES * width)
