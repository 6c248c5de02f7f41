"""Conditions that last: each is reported once."""

from collections.abc import Callable

import pytest

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.records.event import Event
from tests.analysis.failures.polled_engine import Facts, PolledEngine, kinds, verdicts

FactsAt = Callable[[float], Facts]


def preempted(total: float) -> Facts:
    """Facts after so many preemptions."""
    return {fact.PREEMPTIONS: total, fact.KV_CACHE_USAGE: 0.99, fact.REQUESTS_WAITING: 12}


def refused(total: float) -> Facts:
    """Facts after so many refusals."""
    return {(fact.ADMISSION_REJECTIONS, "max_num_queued_reqs"): total, fact.REQUESTS_WAITING: 12}


def test_preemptions_are_pressure_on_the_cache() -> None:
    engine = PolledEngine()
    engine.works()
    waiting: Facts = {(fact.REQUESTS_WAITING_BY_REASON, "capacity"): 9}
    (event,) = engine.works({**preempted(3), **waiting})
    assert verdicts([event]) == [("KV_PRESSURE", "certain")]
    assert event.evidence == {
        "preemptions": 3,
        "kv_cache_usage": 0.99,
        "requests_waiting": 12,
        "requests_waiting_for_capacity": 9,
    }


def test_refusals_are_an_admission_limit() -> None:
    engine = PolledEngine()
    engine.works()
    (event,) = engine.works(refused(7))
    assert verdicts([event]) == [("ADMISSION_LIMIT", "certain")]
    assert event.evidence == {"refused_max_num_queued_reqs": 7, "requests_waiting": 12}


@pytest.mark.parametrize("facts_at", [preempted, refused])
def test_a_pressure_that_lasts_is_reported_once(facts_at: FactsAt) -> None:
    engine = PolledEngine()
    engine.works()
    events = [event for total in range(1, 200) for event in engine.works(facts_at(total))]
    assert len(events) == 1


@pytest.mark.parametrize("facts_at", [preempted, refused])
def test_counts_before_the_first_sample_are_not_reported(facts_at: FactsAt) -> None:
    engine = PolledEngine()
    assert (*engine.works(facts_at(500)), *engine.works(facts_at(500))) == ()


def test_a_pressure_that_ended_a_minute_ago_is_reported_again() -> None:
    engine = PolledEngine()
    engine.works(preempted(0))
    first = engine.works(preempted(1), after_s=61)
    calm = engine.works(preempted(1))
    assert kinds((*first, *calm, *engine.works(preempted(2)))) == ["KV_PRESSURE", "KV_PRESSURE"]


def test_a_pressure_does_not_end_before_the_configured_quiet_time() -> None:
    engine = PolledEngine(DetectionLimits(quiet_s=20))
    engine.works(preempted(0))
    events = list(engine.works(preempted(1), after_s=19))
    events += engine.works(preempted(2), after_s=19)
    assert kinds([*events, *engine.works(preempted(3))]) == ["KV_PRESSURE"]


def test_a_restart_counts_preemptions_from_zero() -> None:
    engine = PolledEngine()
    engine.works(preempted(100))
    engine.works(preempted(100))
    engine.now += 100
    engine.hide_start_time()
    events = engine.works(preempted(4))
    assert kinds(events) == ["KV_PRESSURE", "RESTART"]
    assert events[0].evidence["preemptions"] == 4


def test_all_counts_after_a_restart_are_new() -> None:
    engine = PolledEngine()
    engine.works(preempted(2))
    events = engine.restarts(preempted(5))
    assert (events[0].kind.value, events[0].evidence["preemptions"]) == ("KV_PRESSURE", 5)


def test_a_clock_set_back_by_a_year_does_not_silence_a_pressure_for_a_year() -> None:
    engine = PolledEngine()
    engine.works(preempted(0))
    events: list[Event] = [*engine.works(preempted(1))]
    engine.now -= 365 * 86400
    events += [event for _ in range(20) for event in engine.works(preempted(1))]
    events += engine.works(preempted(2))
    assert kinds(events) == ["KV_PRESSURE", "KV_PRESSURE"]


def test_sleep_is_reported_once_and_again_after_waking() -> None:
    engine = PolledEngine()
    asleep: Facts = {fact.AWAKE: 0}
    polls = [{}, asleep, asleep, {}, asleep]
    events = [event for facts in polls for event in engine.works(facts)]
    assert verdicts(events) == [("SLEEP", "certain")] * 2


def test_an_engine_that_reports_no_sleep_state_is_awake() -> None:
    engine = PolledEngine()
    unknown: Facts = {fact.AWAKE: None}
    assert (*engine.works(unknown), *engine.works(unknown)) == ()
