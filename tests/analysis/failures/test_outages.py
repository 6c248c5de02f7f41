"""Outages and their ends, and restarts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from agent.catalog import engine_facts as fact
from agent.records.engine import EngineProcess, ProcessRole
from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    CORE,
    CORE_LOST_LINE,
    FATAL_LINE,
    FRONT,
    FRONT_ENDED_LINE,
    NEXT,
    OOM_LINE,
    SILENCE,
    STOP_LINE,
    Facts,
    PolledEngine,
    engine_in_use,
    host,
    kinds,
    logged,
    process,
    verdicts,
)

REFUSED = (fact.ADMISSION_REJECTIONS, "max_num_queued_reqs")


def test_a_restart_has_the_length_of_the_outage() -> None:
    engine = engine_in_use()
    engine.fails(after_s=40)
    engine.fails(after_s=2)
    (event,) = engine.restarts()
    assert verdicts((event,)) == [("RESTART", "certain")]
    assert event.evidence["gone_s"] == 42
    assert event.evidence["output_tokens"] == 800


def test_a_restart_between_two_polls_lasted_at_most_their_interval() -> None:
    engine = engine_in_use()
    (event,) = engine.restarts()
    assert (event.kind.value, event.evidence["gone_s"]) == ("RESTART", 5)


@pytest.mark.parametrize(
    "after",
    [NEXT, [replace(each, started_after_boot_s=99.0) for each in ALL]],
    ids=["new pids", "reused pids"],
)
def test_new_processes_make_a_restart_certain_without_a_start_time(
    after: Sequence[EngineProcess],
) -> None:
    engine = PolledEngine()
    engine.hide_start_time()
    engine.works(host=host(ALL))
    assert verdicts(engine.works(host=host(after))) == [("RESTART", "certain")]


def test_a_death_between_two_polls_is_reported_with_the_restart() -> None:
    engine = engine_in_use()
    sample = host(NEXT, kills=0, log=logged(CORE_LOST_LINE, FRONT_ENDED_LINE))
    assert kinds(engine.restarts(host=sample)) == ["ENGINE_DEAD", "RESTART"]


def test_a_restart_after_a_stop_has_its_stop_line() -> None:
    engine = engine_in_use()
    engine.fails(host=host([], kills=0, log=logged(STOP_LINE)))
    (event,) = engine.restarts(host=host(NEXT, kills=0))
    assert event.evidence["stop_line"] == STOP_LINE


def test_an_outage_without_a_restart_can_be_followed_by_another() -> None:
    engine = PolledEngine()
    engine.works()
    events = (*engine.fails("timeout"), *engine.works(), *engine.fails("timeout"))
    assert kinds(events) == ["UNREACHABLE", "UNREACHABLE"]


def test_an_exposition_that_cannot_be_parsed_is_not_unreachable() -> None:
    engine = engine_in_use()
    assert engine.fails("not_text") == ()


def test_an_engine_that_was_never_reached_has_no_outage() -> None:
    assert PolledEngine().fails() == ()


def test_a_line_before_a_restart_does_not_explain_a_later_death() -> None:
    engine = engine_in_use()
    assert "CUDA_OOM" in kinds(engine.fails(host=host([], log=logged(OOM_LINE, FATAL_LINE))))
    engine.restarts(host=host(NEXT, log=CHATTER))
    events = (
        *engine.fails(host=host([], log=logged(CORE_LOST_LINE))),
        *engine.fails(host=host([], log=SILENCE)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_outage_ends_with_a_sample_when_there_is_no_health_check() -> None:
    engine = PolledEngine()
    engine.works(health=None)
    engine.fails()
    engine.works(stalled=True, health=None, after_s=100)
    (event,) = engine.restarts()
    assert event.evidence["gone_s"] == 100


def test_a_death_is_reported_when_the_engine_is_back_before_the_second_poll() -> None:
    engine = engine_in_use()
    engine.fails(host=host([], kills=0, log=logged(CORE_LOST_LINE)), after_s=7)
    events = engine.restarts(host=host(NEXT, kills=0))
    assert kinds(events) == ["ENGINE_DEAD", "RESTART"]
    assert events[1].evidence["gone_s"] == 7


def test_a_new_engine_whose_health_check_does_not_pass_yet_is_starting() -> None:
    engine = PolledEngine(dialect="sglang")
    engine.works()
    engine.fails()
    events = [event for _ in range(4) for event in engine.fails("http_status", health=503)]
    events += engine.restarts(health=503)
    events += [event for _ in range(4) for event in engine.works(health=503)]
    assert kinds(events) == ["RESTART"]


@pytest.mark.parametrize("failure", ["html", "json", "http_status"])
def test_an_engine_that_says_it_is_healthy_is_reachable_whatever_its_metrics_are(
    failure: str,
) -> None:
    """For example behind a gateway that answers /metrics with a page of its own."""
    engine = engine_in_use()
    assert [event for _ in range(30) for event in engine.fails(failure, health=200)] == []
    assert kinds(engine.fails("connection")) == ["UNREACHABLE"]


def test_an_engine_that_restarted_between_two_polls_may_still_be_starting() -> None:
    engine = PolledEngine(dialect="sglang")
    engine.works()
    events = [*engine.restarts(health=503)]
    events += [event for _ in range(4) for event in engine.works(health=503)]
    assert kinds(events) == ["RESTART"]


def test_an_engine_that_came_back_from_a_stop_can_die() -> None:
    engine = engine_in_use()
    engine.fails(host=host(log=logged(STOP_LINE)))
    assert engine.works(host=host(log=CHATTER)) == ()
    events = (*engine.fails(host=host(log=logged(CORE_LOST_LINE))), *engine.fails(host=host()))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_wrapper_first_taken_for_the_front_is_no_restart() -> None:
    engine = PolledEngine()
    wrapper = process(ProcessRole.FRONT, 9)
    engine.works(host=host([wrapper, CORE]))
    found = host([replace(wrapper, role=ProcessRole.OTHER), *ALL])
    assert [event for _ in range(3) for event in engine.works(host=found)] == []


@pytest.mark.parametrize(
    ("dialect", "facts"),
    [
        ("vllm", {}),
        ("vllm", {fact.REQUESTS_RUNNING: 0}),
        ("trtllm", {fact.STEPS: None}),
    ],
    ids=["working", "idle", "without step counts"],
)
def test_a_missing_core_with_constant_facts_is_a_death_despite_the_health_check(
    dialect: str, facts: Facts
) -> None:
    engine = PolledEngine(dialect=dialect)
    for _ in range(2):
        engine.works(facts, host=host(ALL, kills=0, log=CHATTER))
    sample = host([FRONT], kills=0, log=CHATTER)
    events = [e for _ in range(200) for e in engine.works(facts, stalled=True, host=sample)]
    assert verdicts(events) == [("ENGINE_DEAD", "probable")]


def test_an_engine_that_responds_503_while_it_changes_its_ranks_is_not_dead() -> None:
    engine = engine_in_use()
    sample = host(ALL, kills=0, log=CHATTER)
    events = [e for _ in range(30) for e in engine.fails("http_status", health=503, host=sample)]
    events += [e for _ in range(3) for e in engine.works(host=sample)]
    assert kinds(events) == ["UNREACHABLE"]


def test_an_engine_that_responds_503_for_minutes_is_suspected_to_be_dead() -> None:
    engine = engine_in_use()
    sample = host(ALL, kills=0, log=CHATTER)
    events = [e for _ in range(300) for e in engine.fails("http_status", health=503, host=sample)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "suspected")]
    assert events[1].at - events[0].at > 600


@pytest.mark.parametrize("left", [[FRONT], [CORE]])
def test_503_from_an_engine_that_lost_a_process_is_a_death(left: list[EngineProcess]) -> None:
    engine = engine_in_use()
    sample = host(left, kills=0, log=CHATTER)
    events = [e for _ in range(5) for e in engine.fails("http_status", health=503, host=sample)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "certain")]


def test_an_engine_that_works_long_after_a_stop_line_can_die() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE)))
    for poll in range(130):
        running: Facts = {fact.REQUESTS_RUNNING: 4 + poll % 2}
        assert engine.works(running, host=host(ALL, kills=0, log=CHATTER)) == ()
    log = logged(CORE_LOST_LINE)
    events = [*engine.works(stalled=True, health=503, host=host([FRONT], kills=0, log=log))]
    events += engine.works(stalled=True, health=503, host=host([FRONT], kills=0, log=CHATTER))
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]


@pytest.mark.parametrize("polls", [100, 200])
def test_an_engine_that_drains_for_minutes_before_it_stops_does_not_die(
    polls: int,
) -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE)))
    # A preempted request waits again.
    polls_while_draining: list[Facts] = [
        {fact.REQUESTS_RUNNING: 4 - n % 2, fact.REQUESTS_WAITING: n % 2} for n in range(polls)
    ]
    events = [
        e
        for facts in polls_while_draining
        for e in engine.works(facts, host=host(ALL, kills=0, log=CHATTER))
    ]
    gone = host([FRONT], kills=0, log=SILENCE)
    events += [e for _ in range(5) for e in engine.works(stalled=True, host=gone)]
    events += [e for _ in range(3) for e in engine.fails(host=gone)]
    assert kinds(events) == ["UNREACHABLE"]


def test_counters_that_fall_with_a_removed_rank_are_no_restart() -> None:
    engine = PolledEngine()
    two_ranks: Facts = {fact.DATA_PARALLEL_RANKS: 2, fact.OUTPUT_TOKENS: 900, REFUSED: 9}
    engine.works(two_ranks)
    one_rank: Facts = {fact.DATA_PARALLEL_RANKS: 1, fact.OUTPUT_TOKENS: 500, REFUSED: 4}
    assert [e for _ in range(3) for e in engine.works(one_rank)] == []


def test_a_dead_engine_that_is_healthy_again_restarted_without_a_start_time() -> None:
    engine = PolledEngine()
    engine.hide_start_time()
    engine.works()
    for _ in range(2):
        engine.works(stalled=True, health=503)
    engine.fails()
    (event,) = engine.works()
    assert verdicts((event,)) == [("RESTART", "probable")]
    assert (event.evidence["cause"], event.evidence["gone_s"]) == ("ENGINE_DEAD", 15)
    assert engine.works() == ()


def test_an_engine_with_the_same_processes_did_not_restart() -> None:
    engine = PolledEngine()
    engine.hide_start_time()
    engine.works(host=host(ALL))
    for _ in range(2):
        engine.works(stalled=True, health=503, host=host(ALL))
    assert engine.works(host=host(ALL)) == ()


@pytest.mark.parametrize(("hidden", "expected"), [(True, [("RESTART", "probable")]), (False, [])])
def test_a_dead_engine_that_is_healthy_again_restarted_unless_its_start_is_the_same(
    hidden: bool, expected: list[tuple[str, str]]
) -> None:
    engine = PolledEngine()
    if hidden:
        engine.hide_start_time()
    engine.works(host=host(log=CHATTER))
    engine.fails(host=host(log=logged(CORE_LOST_LINE)))
    died = engine.fails(host=host(log=logged(CORE_LOST_LINE)))
    assert verdicts(died) == [("ENGINE_DEAD", "certain")]
    assert verdicts(engine.works(host=host(log=CHATTER))) == expected


def test_a_stop_line_one_poll_after_a_death_belongs_to_the_death() -> None:
    engine = engine_in_use()
    events = [*engine.fails(host=host([], kills=0, log=logged(CORE_LOST_LINE)))]
    events += engine.fails(host=host([], kills=0, log=logged(STOP_LINE, FRONT_ENDED_LINE)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_engine_that_takes_requests_soon_after_a_stop_line_still_stops() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE)))
    engine.works({fact.REQUESTS_RUNNING: 5}, host=host(ALL, kills=0, log=CHATTER))
    gone = host([FRONT], kills=0, log=SILENCE)
    events = [e for _ in range(3) for e in engine.works(stalled=True, health=503, host=gone)]
    (event,) = [*events, *engine.fails(host=host([], kills=0, log=SILENCE))]
    assert (event.kind.value, event.evidence["stop_line"]) == ("UNREACHABLE", STOP_LINE)


def test_a_death_is_not_certain_when_only_its_second_poll_gave_firm_evidence() -> None:
    engine = PolledEngine()
    engine.works(health=None, host=host(ALL))
    assert engine.works(stalled=True, health=None, host=host([FRONT])) == ()
    events = engine.works(stalled=True, health=503, host=host([FRONT]))
    assert verdicts(events) == [("ENGINE_DEAD", "probable")]


def test_a_suspected_death_that_ended_does_not_lengthen_a_later_outage() -> None:
    engine = PolledEngine()
    engine.works(health=None, host=host(ALL))
    for processes in ([FRONT], ALL, ALL, ALL):
        assert engine.works(stalled=True, health=None, host=host(processes)) == ()
    (event,) = engine.restarts(host=host(NEXT))
    assert event.evidence["gone_s"] == 5


def test_a_death_lasts_through_polls_with_less_evidence() -> None:
    engine = PolledEngine()
    engine.works(health=None, host=host(ALL))
    samples = [host([FRONT], log=logged(CORE_LOST_LINE)), host([FRONT]), None, *[host([FRONT])] * 3]
    events = [e for sample in samples for e in engine.works(stalled=True, health=None, host=sample)]
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]


def test_an_engine_with_constant_facts_while_it_starts_is_not_dead() -> None:
    engine = PolledEngine(dialect="sglang")
    assert [e for _ in range(5) for e in engine.works(stalled=True, health=503)] == []
