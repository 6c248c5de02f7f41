"""Outages, how they end, and restarts."""

from dataclasses import replace

import pytest

from agent.catalog import engine_facts as fact
from agent.records.host import EngineProcess, ProcessRole
from tests.analysis.failure_polls import (
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
    process,
    said,
    verdicts,
)

REFUSED = (fact.ADMISSION_REJECTIONS, "max_num_queued_reqs")


def test_a_restart_shows_how_long_the_engine_was_gone() -> None:
    engine = engine_in_use()
    engine.fails(after_s=40)
    engine.fails(after_s=2)
    (event,) = engine.restarts()
    assert verdicts((event,)) == [("RESTART", "certain")]
    assert event.evidence["gone_s"] == 42
    assert event.evidence["output_tokens"] == 800


def test_a_restart_between_two_polls_took_no_longer_than_lies_between_them() -> None:
    engine = engine_in_use()
    (event,) = engine.restarts()
    assert (event.kind.value, event.evidence["gone_s"]) == ("RESTART", 5)


def test_other_processes_make_a_restart_certain_where_the_page_cannot() -> None:
    engine = PolledEngine()
    engine.hides_its_start()
    engine.works(seen=host(ALL))
    assert verdicts(engine.works(seen=host(NEXT))) == [("RESTART", "certain")]


def test_a_pid_that_was_given_out_again_is_another_process() -> None:
    engine = PolledEngine()
    engine.hides_its_start()
    engine.works(seen=host(ALL))
    reused = [replace(process, started_after_boot_s=99.0) for process in ALL]
    assert verdicts(engine.works(seen=host(reused))) == [("RESTART", "certain")]


def test_a_death_that_the_restart_outran_is_reported_with_it() -> None:
    engine = engine_in_use()
    seen = host(NEXT, kills=0, log=said(CORE_LOST_LINE, FRONT_ENDED_LINE))
    assert kinds(engine.restarts(seen=seen)) == ["ENGINE_DEAD", "RESTART"]


def test_a_restart_after_a_stop_has_its_stop_line() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=0, log=said(STOP_LINE)))
    (event,) = engine.restarts(seen=host(NEXT, kills=0))
    assert event.evidence["stop_line"] == STOP_LINE


def test_an_engine_that_comes_back_without_a_restart_can_be_lost_again() -> None:
    engine = PolledEngine()
    engine.works()
    events = (*engine.fails("timeout"), *engine.works(), *engine.fails("timeout"))
    assert kinds(events) == ["UNREACHABLE", "UNREACHABLE"]


def test_a_page_that_cannot_be_read_is_not_unreachable() -> None:
    engine = engine_in_use()
    assert engine.fails("not_text") == ()


def test_an_engine_that_was_never_seen_is_not_lost() -> None:
    assert PolledEngine().fails() == ()


def test_a_line_of_an_earlier_life_explains_no_later_death() -> None:
    engine = engine_in_use()
    assert "CUDA_OOM" in kinds(engine.fails(seen=host([], log=said(OOM_LINE, FATAL_LINE))))
    engine.restarts(seen=host(NEXT, log=CHATTER))
    events = (
        *engine.fails(seen=host([], log=said(CORE_LOST_LINE))),
        *engine.fails(seen=host([], log=SILENCE)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_outage_ends_when_the_page_is_back_without_a_health_check() -> None:
    engine = PolledEngine()
    engine.works(health=None)
    engine.fails()
    engine.works(stands=True, health=None, after_s=100)
    (event,) = engine.restarts()
    assert event.evidence["gone_s"] == 100


def test_a_death_is_reported_when_the_engine_is_back_before_the_second_poll() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=0, log=said(CORE_LOST_LINE)), after_s=7)
    events = engine.restarts(seen=host(NEXT, kills=0))
    assert kinds(events) == ["ENGINE_DEAD", "RESTART"]
    assert events[1].evidence["gone_s"] == 7


def test_a_new_engine_whose_health_check_does_not_hold_yet_is_starting() -> None:
    engine = PolledEngine(dialect="sglang")
    engine.works()
    engine.fails()
    events = [event for _ in range(4) for event in engine.fails("http_status", health=503)]
    events += engine.restarts(health=503)
    events += [event for _ in range(4) for event in engine.works(health=503)]
    assert kinds(events) == ["RESTART"]


def test_an_engine_that_restarted_between_two_polls_may_still_be_starting() -> None:
    engine = PolledEngine(dialect="sglang")
    engine.works()
    events = [*engine.restarts(health=503)]
    events += [event for _ in range(4) for event in engine.works(health=503)]
    assert kinds(events) == ["RESTART"]


def test_an_engine_that_came_back_from_a_stop_unnoticed_can_die() -> None:
    engine = engine_in_use()
    engine.fails(seen=host(log=said(STOP_LINE)))
    assert engine.works(seen=host(log=CHATTER)) == ()
    events = (*engine.fails(seen=host(log=said(CORE_LOST_LINE))), *engine.fails(seen=host()))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_wrapper_that_was_taken_for_the_front_at_first_makes_no_restart() -> None:
    engine = PolledEngine()
    wrapper = process(ProcessRole.FRONT, 9)
    engine.works(seen=host([wrapper, CORE]))
    found = host([replace(wrapper, role=ProcessRole.OTHER), *ALL])
    assert [event for _ in range(3) for event in engine.works(seen=found)] == []


def test_a_core_that_is_gone_under_a_page_that_stands_is_a_death_whatever_the_health_check() -> (
    None
):
    engine = engine_in_use()
    seen = host([FRONT], kills=0, log=CHATTER)
    events = [e for _ in range(200) for e in engine.works(stands=True, seen=seen)]
    assert verdicts(events) == [("ENGINE_DEAD", "probable")]


def test_a_core_that_is_gone_from_an_idle_engine_is_a_death_whatever_the_health_check() -> None:
    engine = engine_in_use()
    idle: Facts = {fact.REQUESTS_RUNNING: 0}
    engine.works(idle, seen=host(ALL, kills=0, log=CHATTER))
    seen = host([FRONT], kills=0, log=CHATTER)
    events = [e for _ in range(50) for e in engine.works(idle, stands=True, seen=seen)]
    assert verdicts(events) == [("ENGINE_DEAD", "probable")]


def test_a_core_that_is_gone_under_a_page_that_stands_is_one_where_no_steps_are_counted() -> None:
    engine = PolledEngine(dialect="trtllm")
    no_steps: Facts = {fact.STEPS: None}
    engine.works(no_steps, seen=host(ALL))
    events = [e for _ in range(50) for e in engine.works(no_steps, stands=True, seen=host([FRONT]))]
    assert verdicts(events) == [("ENGINE_DEAD", "probable")]


def test_an_engine_that_answers_everything_with_503_while_it_changes_its_ranks_is_not_dead() -> (
    None
):
    engine = engine_in_use()
    seen = host(ALL, kills=0, log=CHATTER)
    events = [e for _ in range(30) for e in engine.fails("http_status", health=503, seen=seen)]
    events += [e for _ in range(3) for e in engine.works(seen=seen)]
    assert kinds(events) == ["UNREACHABLE"]


def test_an_engine_that_answers_everything_with_503_for_minutes_is_suspected_to_be_dead() -> None:
    engine = engine_in_use()
    seen = host(ALL, kills=0, log=CHATTER)
    events = [e for _ in range(300) for e in engine.fails("http_status", health=503, seen=seen)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "suspected")]
    assert events[1].at - events[0].at > 600


@pytest.mark.parametrize("left", [[FRONT], [CORE]])
def test_503_from_an_engine_that_lost_a_process_is_a_death(left: list[EngineProcess]) -> None:
    engine = engine_in_use()
    seen = host(left, kills=0, log=CHATTER)
    events = [e for _ in range(5) for e in engine.fails("http_status", health=503, seen=seen)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "certain")]


def test_an_engine_that_works_on_for_long_after_it_was_ordered_to_stop_can_die() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE)))
    for poll in range(130):
        running: Facts = {fact.REQUESTS_RUNNING: 4 + poll % 2}
        assert engine.works(running, seen=host(ALL, kills=0, log=CHATTER)) == ()
    log = said(CORE_LOST_LINE)
    events = [*engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=log))]
    events += engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=CHATTER))
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]


@pytest.mark.parametrize("polls", [100, 200])
def test_an_engine_that_finishes_its_requests_for_minutes_before_it_stops_does_not_die(
    polls: int,
) -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE)))
    # One that is thrown back waits again.
    pages: list[Facts] = [
        {fact.REQUESTS_RUNNING: 4 - n % 2, fact.REQUESTS_WAITING: n % 2} for n in range(polls)
    ]
    events = [e for page in pages for e in engine.works(page, seen=host(ALL, kills=0, log=CHATTER))]
    gone = host([FRONT], kills=0, log=SILENCE)
    events += [e for _ in range(5) for e in engine.works(stands=True, seen=gone)]
    events += [e for _ in range(3) for e in engine.fails(seen=gone)]
    assert kinds(events) == ["UNREACHABLE"]


def test_a_rank_that_left_and_took_its_counts_along_is_no_restart() -> None:
    engine = PolledEngine()
    wide: Facts = {fact.DATA_PARALLEL_RANKS: 2, fact.OUTPUT_TOKENS: 900, REFUSED: 9}
    engine.works(wide)
    narrow: Facts = {fact.DATA_PARALLEL_RANKS: 1, fact.OUTPUT_TOKENS: 500, REFUSED: 4}
    assert [e for _ in range(3) for e in engine.works(narrow)] == []


def test_an_engine_that_died_and_is_well_again_restarted_though_its_page_does_not_show_it() -> None:
    engine = PolledEngine()
    engine.hides_its_start()
    engine.works()
    for _ in range(2):
        engine.works(stands=True, health=503)
    engine.fails()
    (event,) = engine.works()
    assert verdicts((event,)) == [("RESTART", "probable")]
    assert (event.evidence["cause"], event.evidence["gone_s"]) == ("ENGINE_DEAD", 15)
    assert engine.works() == ()


def test_an_engine_whose_processes_live_on_did_not_restart() -> None:
    engine = PolledEngine()
    engine.hides_its_start()
    engine.works(seen=host(ALL))
    for _ in range(2):
        engine.works(stands=True, health=503, seen=host(ALL))
    assert engine.works(seen=host(ALL)) == ()


@pytest.mark.parametrize(("hidden", "expected"), [(True, [("RESTART", "probable")]), (False, [])])
def test_a_dead_engine_that_is_well_again_restarted_unless_its_start_time_is_the_same(
    hidden: bool, expected: list[tuple[str, str]]
) -> None:
    engine = PolledEngine()
    if hidden:
        engine.hides_its_start()
    engine.works(seen=host(log=CHATTER))
    engine.fails(seen=host(log=said(CORE_LOST_LINE)))
    died = engine.fails(seen=host(log=said(CORE_LOST_LINE)))
    assert verdicts(died) == [("ENGINE_DEAD", "certain")]
    assert verdicts(engine.works(seen=host(log=CHATTER))) == expected


def test_a_stop_line_a_poll_after_a_death_is_part_of_the_death() -> None:
    engine = engine_in_use()
    events = [*engine.fails(seen=host([], kills=0, log=said(CORE_LOST_LINE)))]
    events += engine.fails(seen=host([], kills=0, log=said(STOP_LINE, FRONT_ENDED_LINE)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_engine_that_takes_requests_soon_after_a_stop_line_still_stops() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE)))
    engine.works({fact.REQUESTS_RUNNING: 5}, seen=host(ALL, kills=0, log=CHATTER))
    gone = host([FRONT], kills=0, log=SILENCE)
    events = [e for _ in range(3) for e in engine.works(stands=True, health=503, seen=gone)]
    (event,) = [*events, *engine.fails(seen=host([], kills=0, log=SILENCE))]
    assert (event.kind.value, event.evidence["stop_line"]) == ("UNREACHABLE", STOP_LINE)


def test_a_death_is_not_certain_when_only_its_second_poll_gave_firm_evidence() -> None:
    engine = PolledEngine()
    engine.works(health=None, seen=host(ALL))
    assert engine.works(stands=True, health=None, seen=host([FRONT])) == ()
    events = engine.works(stands=True, health=503, seen=host([FRONT]))
    assert verdicts(events) == [("ENGINE_DEAD", "probable")]


def test_a_suspected_death_that_passed_lengthens_no_later_outage() -> None:
    engine = PolledEngine()
    engine.works(health=None, seen=host(ALL))
    for processes in ([FRONT], ALL, ALL, ALL):
        assert engine.works(stands=True, health=None, seen=host(processes)) == ()
    (event,) = engine.restarts(seen=host(NEXT))
    assert event.evidence["gone_s"] == 5


def test_a_death_lasts_through_polls_that_give_less_evidence_of_it() -> None:
    engine = PolledEngine()
    engine.works(health=None, seen=host(ALL))
    samples = [host([FRONT], log=said(CORE_LOST_LINE)), host([FRONT]), None, *[host([FRONT])] * 3]
    events = [e for seen in samples for e in engine.works(stands=True, health=None, seen=seen)]
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]


def test_an_engine_whose_facts_stand_while_it_starts_is_not_dead() -> None:
    engine = PolledEngine(dialect="sglang")
    assert [e for _ in range(5) for e in engine.works(stands=True, health=503)] == []
