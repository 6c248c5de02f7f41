"""The gauges for autoscalers in the exposition of a meter, by a clock of the test."""

from dataclasses import replace

import pytest

from agent.catalog import metrics as m
from tests.analysis.cost.engine_days import engine_sample
from tests.outputs.prometheus.served_engine import ServedEngine
from tests.records.making import NOON

SHOWN = (
    m.ARRIVAL_RATE,
    m.SLO_P90_TO_LIMIT,
    m.SLO_HELD_RATE,
    m.SLO_HELD_RATE_AGE,
    m.SLO_HELD_RATE_CONFIDENCE,
    m.SLO_REPLICAS_NEEDED,
)


def test_a_new_engine_has_no_series_and_no_zeros() -> None:
    engine = ServedEngine()
    assert {metric.name: engine.shown(metric) for metric in SHOWN} == {
        metric.name: {} for metric in SHOWN
    }


def test_five_seconds_after_a_cold_start_what_is_needed_is_known() -> None:
    engine = ServedEngine()
    engine.serve(2.0, 0.1, seconds=5.0)
    assert engine.shown(m.ARRIVAL_RATE) == {("chat-0", "llama"): 2.0}
    needed = engine.shown(m.SLO_REPLICAS_NEEDED)
    assert needed == {("chat", "chat-0", "llama"): pytest.approx(0.5, rel=0.006)}
    ratios = engine.shown(m.SLO_P90_TO_LIMIT)
    assert {labels[-1] for labels in ratios} == {"1m", "5m"}
    assert engine.shown(m.SLO_HELD_RATE) == {}


def test_after_a_minute_too_many_the_rate_below_it_is_what_a_replica_holds() -> None:
    engine = ServedEngine()
    engine.serve(4.0, 0.1, seconds=600.0)
    engine.serve(8.0, 0.5, seconds=120.0)
    engine.serve(2.0, 0.1, seconds=420.0)
    held = engine.shown(m.SLO_HELD_RATE)
    assert held == {("chat", "chat-0", "llama", m.LIMIT_FOUND): pytest.approx(4.0, rel=0.006)}
    needed = engine.shown(m.SLO_REPLICAS_NEEDED)
    assert needed == {("chat", "chat-0", "llama"): pytest.approx(0.5, rel=0.006)}
    # 600 s ended 540 s ago.
    assert engine.shown(m.SLO_HELD_RATE_AGE) == {("chat", "chat-0", "llama"): pytest.approx(540.0)}
    (confidence,) = engine.shown(m.SLO_HELD_RATE_CONFIDENCE).values()
    assert 0.5 < confidence < 1.0


def test_while_no_minute_has_missed_the_limit_is_open() -> None:
    engine = ServedEngine()
    engine.serve(4.0, 0.1, seconds=480.0)
    assert [labels[-1] for labels in engine.shown(m.SLO_HELD_RATE)] == [m.LIMIT_OPEN]


def test_an_engine_without_requests_does_not_get_those_of_another() -> None:
    engine = ServedEngine("chat-0", "chat-1")
    engine.serve(2.0, 0.1, seconds=5.0)
    assert {labels[1] for labels in engine.shown(m.SLO_P90_TO_LIMIT)} == {"chat-0"}


def test_a_model_beyond_the_limit_of_labels_is_other_here_too() -> None:
    engine = ServedEngine()
    sample = engine_sample(NOON + 5.0, finished=9.0, running=1.0, waiting=0.0)
    engine.meter.sample(replace(sample, model="other"))
    engine.now_s = 5.0
    assert engine.shown(m.ARRIVAL_RATE) == {("chat-0", "other"): pytest.approx(1.8)}


def after_a_restart(before: ServedEngine, *, seconds: float) -> ServedEngine:
    """The engine at an agent that starts some seconds later with what the one before learnt."""
    later = ServedEngine(begins_at=before.now() + seconds)
    later.meter.remember(before.meter.held_rates())
    return later


def test_what_one_run_has_learnt_the_next_one_shows_with_its_age() -> None:
    before = ServedEngine()
    before.serve(4.0, 0.1, seconds=600.0)
    before.serve(8.0, 0.5, seconds=120.0)
    before.serve(2.0, 0.1, seconds=420.0)
    later = after_a_restart(before, seconds=30.0)
    assert later.shown(m.SLO_HELD_RATE) == before.shown(m.SLO_HELD_RATE)
    assert later.shown(m.SLO_HELD_RATE_AGE) == {("chat", "chat-0", "llama"): pytest.approx(570.0)}
    later.serve(6.0, 0.1, seconds=10.0)
    needed = later.shown(m.SLO_REPLICAS_NEEDED)
    assert needed == {("chat", "chat-0", "llama"): pytest.approx(1.5, rel=0.006)}


def test_before_the_first_sample_what_was_learnt_has_no_model_and_no_series() -> None:
    before = ServedEngine()
    before.serve(4.0, 0.1, seconds=480.0)
    later = ServedEngine("chat-0", polled=False)
    later.meter.remember(before.meter.held_rates())
    assert later.shown(m.SLO_HELD_RATE) == {}
    later.poll()
    assert later.shown(m.SLO_HELD_RATE).keys() == {("chat", "chat-0", "llama", m.LIMIT_OPEN)}


def test_what_a_run_has_learnt_itself_is_not_replaced() -> None:
    """The database may come late."""
    before, later = ServedEngine(), ServedEngine(begins_at=NOON + 7200.0)
    before.serve(4.0, 0.1, seconds=480.0)
    later.serve(2.0, 0.1, seconds=480.0)
    own = later.shown(m.SLO_HELD_RATE)
    later.meter.remember(before.meter.held_rates())
    assert later.shown(m.SLO_HELD_RATE) == own


def test_engines_and_objectives_that_are_gone_are_not_remembered() -> None:
    before, other = ServedEngine(), ServedEngine("chat-1")
    before.serve(4.0, 0.1, seconds=480.0)
    learnt = before.meter.held_rates()
    other.meter.remember(learnt)
    other.meter.remember({"batch": learnt["chat"]})
    assert other.meter.held_rates() == {}
