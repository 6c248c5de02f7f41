"""When an engine hangs, and what only resembles a hang."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.records.event import Event
from agent.records.host import ProcessRole
from tests.analysis.failure_polls import (
    ALL,
    CORE,
    CORE_LOST_LINE,
    FATAL_LINE,
    FRONT,
    HANG_LINE,
    PAUSE_LINE,
    RESUME_LINE,
    Facts,
    PolledEngine,
    host,
    kinds,
    process,
    said,
    verdicts,
)

IDLE: Facts = {fact.REQUESTS_RUNNING: 0}
ASLEEP: Facts = {fact.AWAKE: 0}


def stands(engine: PolledEngine, polls: int, facts: Facts | None = None) -> list[Event]:
    """So many polls at which nothing was computed."""
    return [event for _ in range(polls) for event in engine.works(facts, stands=True)]


def at_work(limits: DetectionLimits | None = None) -> PolledEngine:
    engine = PolledEngine(limits)
    for _ in range(3):
        assert engine.works(seen=host(ALL)) == ()
    return engine


def test_an_engine_with_work_whose_heartbeat_stands_for_half_a_minute_hangs() -> None:
    engine = at_work()
    assert stands(engine, 6) == []
    (event,) = stands(engine, 1)
    assert verdicts([event]) == [("HANG", "probable")]
    assert event.evidence["stalled_s"] == 35
    assert event.evidence["requests_running"] == 4


def test_a_hang_is_reported_once() -> None:
    assert kinds(stands(at_work(), 200)) == ["HANG"]


def test_a_hang_that_ended_can_come_again() -> None:
    engine = at_work()
    events = stands(engine, 10)
    engine.works()
    assert kinds([*events, *stands(engine, 10)]) == ["HANG", "HANG"]


def test_the_patience_can_be_set() -> None:
    engine = at_work(DetectionLimits(hang_s=8.0))
    assert kinds(stands(engine, 3)) == ["HANG"]


@pytest.mark.parametrize("facts", [IDLE, ASLEEP])
def test_an_engine_that_is_idle_or_asleep_does_not_hang(facts: Facts) -> None:
    engine = at_work()
    assert "HANG" not in kinds(stands(engine, 100, facts))


def test_work_that_comes_after_a_long_rest_is_given_its_time() -> None:
    engine = at_work()
    stands(engine, 100, IDLE)
    assert stands(engine, 6) == []


def test_a_long_rest_makes_no_long_step() -> None:
    engine = at_work()
    stands(engine, 100, IDLE)
    engine.works()
    assert kinds(stands(engine, 8)) == ["HANG"]


def test_time_asleep_does_not_count_after_waking() -> None:
    engine = at_work()
    stands(engine, 100, ASLEEP)
    assert stands(engine, 6) == []


def test_a_long_prefill_that_fills_the_cache_is_no_hang() -> None:
    engine = at_work()
    filling: list[Facts] = [{fact.KV_CACHE_USAGE: 0.3 + step / 100} for step in range(50)]
    assert [event for facts in filling for event in engine.works(facts, stands=True)] == []


def test_an_engine_of_long_steps_is_given_ten_of_them() -> None:
    engine = PolledEngine()
    tokens = 0.0
    for poll in range(12):
        tokens += poll % 4 == 0
        engine.works({fact.STEPS: tokens, fact.OUTPUT_TOKENS: tokens}, stands=True)
    late: Facts = {fact.STEPS: tokens, fact.OUTPUT_TOKENS: tokens}
    # Steps of 20 s, and the last one three polls ago.
    assert stands(engine, 35, late) == []
    assert kinds(stands(engine, 5, late)) == ["HANG"]


def test_an_engine_that_counts_tokens_only_when_a_request_ends_is_not_judged_by_them() -> None:
    """As SGLang, TGI and TensorRT-LLM do, which count no steps."""
    no_steps: Facts = {fact.STEPS: None}
    engine = PolledEngine()
    engine.works(no_steps)
    assert stands(engine, 100, no_steps) == []


def test_the_agent_s_own_absence_is_no_hang() -> None:
    engine = at_work()
    engine.works(stands=True, after_s=3600)
    assert engine.works(stands=True) == ()


@pytest.mark.parametrize("back_s", [10.0, 3600.0, 1e9])
def test_a_clock_that_goes_back_hides_no_hang_and_makes_none(back_s: float) -> None:
    engine = at_work()
    stands(engine, 3)
    engine.now -= back_s
    assert stands(engine, 3) == []
    assert kinds(stands(engine, 4)) == ["HANG"]


def test_a_front_that_does_not_answer_while_it_lives_hangs_with_the_work_it_had() -> None:
    engine = at_work()
    events = [event for _ in range(8) for event in engine.fails("timeout", seen=host(ALL))]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("HANG", "probable")]


def test_a_front_too_busy_to_answer_while_its_core_computes_is_only_unreachable() -> None:
    engine = at_work()
    samples = [host([FRONT, replace(CORE, cpu_s=4.0 * poll)]) for poll in range(1, 21)]
    assert kinds([e for seen in samples for e in engine.fails("timeout", seen=seen)]) == [
        "UNREACHABLE"
    ]


def test_a_front_that_does_not_answer_for_minutes_is_suspected_to_hang_whatever_its_core_does() -> (
    None
):
    engine = at_work()
    samples = [host([FRONT, replace(CORE, cpu_s=5.0 * poll)]) for poll in range(1, 700)]
    events = [e for seen in samples for e in engine.fails("timeout", seen=seen)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("HANG", "suspected")]
    assert events[1].at - events[0].at > 120


def test_a_core_that_only_waits_does_not_excuse_its_front() -> None:
    engine = at_work()
    samples = [host([FRONT, replace(CORE, cpu_s=1.0 + 0.02 * poll)]) for poll in range(8)]
    events = [e for seen in samples for e in engine.fails("timeout", seen=seen)]
    assert kinds(events) == ["UNREACHABLE", "HANG"]


def test_a_front_that_cannot_be_seen_and_does_not_answer_is_only_unreachable() -> None:
    engine = PolledEngine()
    engine.works()
    assert kinds([e for _ in range(20) for e in engine.fails("timeout")]) == ["UNREACHABLE"]


@pytest.mark.parametrize("facts", [{}, IDLE])
def test_a_process_that_a_signal_stopped_is_a_hang_at_the_second_poll(facts: Facts) -> None:
    engine = at_work()
    stopped = host([FRONT, replace(CORE, state="T")])
    assert engine.works(facts, stands=True, seen=stopped) == ()
    (event,) = engine.works(facts, stands=True, seen=stopped)
    assert verdicts([event]) == [("HANG", "certain")]
    assert event.evidence["processes_stopped"] == "VLLM::core (11)"
    assert event.evidence["process_states"] == "ST"
    assert engine.works(facts, stands=True, seen=stopped) == ()


def test_a_process_that_was_stopped_and_let_go_on_can_be_stopped_again() -> None:
    engine = at_work()
    stopped = host([FRONT, replace(CORE, state="T")])
    samples = [stopped, stopped, host(ALL), stopped, stopped]
    assert kinds([e for seen in samples for e in engine.works(IDLE, seen=seen)]) == ["HANG", "HANG"]


def test_a_process_that_was_stopped_in_its_sleep_is_no_hang() -> None:
    engine = at_work()
    engine.works(ASLEEP)
    stopped = host([FRONT, replace(CORE, state="T")])
    assert [e for _ in range(5) for e in engine.works(ASLEEP, stands=True, seen=stopped)] == []


def test_a_helper_that_was_stopped_is_no_hang() -> None:
    engine = at_work()
    helper = process(ProcessRole.OTHER, 13, state="T")
    assert [e for _ in range(5) for e in engine.works(seen=host([*ALL, helper]))] == []


def test_a_stop_for_a_moment_is_no_hang() -> None:
    engine = at_work()
    stopped = host([FRONT, replace(CORE, state="T")])
    samples = [stopped, host(ALL), stopped, host(ALL)]
    assert [e for seen in samples for e in engine.works(seen=seen)] == []


def test_a_hang_that_the_engine_gave_up_on_is_certain_and_its_death_another_event() -> None:
    engine = at_work()
    log = said(HANG_LINE, CORE_LOST_LINE)
    events = (*engine.fails(seen=host([], log=log)), *engine.fails(seen=host([], log=log)))
    assert verdicts(events) == [
        ("HANG", "certain"),
        ("UNREACHABLE", "certain"),
        ("ENGINE_DEAD", "certain"),
    ]


def test_a_dead_engine_whose_front_stays_does_not_hang_as_well() -> None:
    engine = at_work()
    dead = [e for _ in range(30) for e in engine.works(stands=True, health=503, seen=host([FRONT]))]
    assert kinds(dead) == ["ENGINE_DEAD"]


def test_no_line_makes_a_hang_of_an_engine_that_computes() -> None:
    engine = at_work()
    assert engine.works(seen=host(ALL, log=said(HANG_LINE))) == ()


@pytest.mark.parametrize("facts", [{}, IDLE])
def test_a_hang_that_the_engine_gave_up_on_is_reported_while_its_page_stands(facts: Facts) -> None:
    engine = at_work()
    engine.works(facts)
    events = engine.works(facts, stands=True, seen=host(ALL, log=said(HANG_LINE)))
    assert verdicts(events) == [("HANG", "certain")]


def test_a_hang_that_the_engine_gave_up_on_is_reported_once_without_any_sample() -> None:
    engine = PolledEngine()
    seen = host(ALL, log=said(HANG_LINE))
    events = [e for _ in range(4) for e in engine.fails("timeout", seen=seen)]
    events += stands(engine, 20)
    assert verdicts(events) == [("HANG", "certain")]
    engine.works()
    assert kinds(engine.works(stands=True, seen=seen)) == ["HANG"]


def test_a_line_that_speaks_of_a_death_at_every_poll_hides_no_hang() -> None:
    engine = at_work()
    seen = host(ALL, log=said(FATAL_LINE))
    events = [e for _ in range(100) for e in engine.works(stands=True, seen=seen)]
    assert verdicts(events) == [("HANG", "probable")]


def ranks_at(*steps: float, running: float = 4.0) -> dict[str, Facts]:
    """Ranks that have made so many steps each."""
    return {
        str(rank): {fact.STEPS: made, fact.REQUESTS_RUNNING: running, fact.AWAKE: 1}
        for rank, made in enumerate(steps)
    }


def test_a_rank_that_stands_while_another_goes_on_is_a_hang_of_the_engine() -> None:
    engine = PolledEngine()
    events = [e for step in range(120) for e in engine.works(ranks=ranks_at(100 + step, 7))]
    (event,) = events
    # Its core cannot be seen: it may have been given up.
    assert verdicts([event]) == [("HANG", "suspected")]
    assert (event.evidence["ranks_standing"], event.evidence["stalled_s"]) == ("1", 35)


CORES = [replace(process(ProcessRole.CORE, 30 + n), name=f"VLLM::EngineCore_DP{n}") for n in (0, 1)]


def test_a_rank_whose_core_lives_hangs_probably() -> None:
    engine = PolledEngine()
    seen = host([FRONT, *CORES])
    events = [
        e for step in range(120) for e in engine.works(ranks=ranks_at(100 + step, 7), seen=seen)
    ]
    assert verdicts(events) == [("HANG", "probable")]


def test_a_rank_that_was_given_up_does_not_hang_though_its_figures_stay() -> None:
    engine = PolledEngine()
    for step in range(5):
        engine.works(ranks=ranks_at(step, step), seen=host([FRONT, *CORES]))
    smaller = host([FRONT, CORES[0]])
    events = [e for step in range(120) for e in engine.works(ranks=ranks_at(step, 4), seen=smaller)]
    assert events == []


def test_a_rank_that_was_given_up_in_an_earlier_life_can_hang() -> None:
    """One process after the restart, whose title names no rank."""
    engine = at_work()
    for cores in (CORES, CORES[:1]):
        engine.works(ranks=ranks_at(1, 1), seen=host([FRONT, *cores]))
    engine.restarts()
    events = [e for step in range(20) for e in engine.works(ranks=ranks_at(step, 4))]
    assert kinds(events) == ["HANG"]


def test_a_rank_that_was_given_up_and_is_back_can_hang() -> None:
    engine = PolledEngine()
    for cores in (CORES, CORES[:1], CORES):
        engine.works(ranks=ranks_at(1, 1), seen=host([FRONT, *cores]))
    seen = host([FRONT, *CORES])
    events = [e for step in range(20) for e in engine.works(ranks=ranks_at(step, 4), seen=seen)]
    assert kinds(events) == ["HANG"]


def test_a_rank_that_hung_and_went_on_can_hang_again_while_another_is_slow() -> None:
    """One of the two has stood since the last poll at any time."""
    engine = PolledEngine()
    made, events = [0, 0], list[Event]()
    for poll in range(300):
        made[0] += poll % 2
        made[1] += (poll + 1) % 2 if poll < 20 or 100 < poll < 200 else 0
        events += engine.works(ranks=ranks_at(*made))
    assert [event.evidence["ranks_standing"] for event in events] == ["1", "1"]


def test_a_rank_that_hangs_after_another_is_reported_as_well() -> None:
    engine = PolledEngine()
    made = [(min(step, 30), min(step, 5)) for step in range(100)]
    events = [e for each in made for e in engine.works(ranks=ranks_at(*each))]
    assert [event.evidence["ranks_standing"] for event in events] == ["1", "0, 1"]


@pytest.mark.parametrize("cores_seen", [True, False])
def test_ranks_that_stop_one_after_another_within_the_patience_are_one_hang(
    cores_seen: bool,
) -> None:
    """As all do that wait for one of them; none of them was given up."""
    engine = PolledEngine()
    seen = host([FRONT, *CORES]) if cores_seen else None
    made = [(min(step, 20), min(step, 22)) for step in range(60)]
    events = [e for each in made for e in engine.works(ranks=ranks_at(*each), seen=seen)]
    assert verdicts(events) == [("HANG", "probable")]


def test_a_rank_without_work_does_not_hang() -> None:
    engine = PolledEngine()
    for step in range(30):
        ranks = ranks_at(100 + step) | {"1": ranks_at(7, 7, running=0.0)["1"]}
        assert engine.works(ranks=ranks) == ()


def test_a_rank_that_hung_and_went_on_can_hang_again() -> None:
    engine = PolledEngine()
    made = [(step, 7 if step < 20 or step > 22 else step) for step in range(45)]
    events = [e for each in made for e in engine.works(ranks=ranks_at(*each))]
    assert kinds(events) == ["HANG", "HANG"]


def test_an_engine_that_was_paused_with_its_requests_does_not_hang() -> None:
    """Real vLLM 0.32 with `/pause?mode=keep`: only the log shows it."""
    engine = at_work()
    assert engine.works(stands=True, seen=host(ALL, log=said(PAUSE_LINE))) == ()
    assert stands(engine, 100) == []
    thrown_back: Facts = {fact.PREEMPTIONS: 1}
    assert engine.works(stands=True, seen=host(ALL, log=said(RESUME_LINE))) == ()
    assert [e for _ in range(20) for e in engine.works(thrown_back)] == []


def test_a_pause_is_over_once_steps_are_made_though_its_end_was_never_read() -> None:
    engine = at_work()
    engine.works(seen=host(ALL, log=said(PAUSE_LINE)))
    for _ in range(3):
        assert engine.works() == ()
    (event,) = stands(engine, 8)
    assert verdicts([event]) == [("HANG", "probable")]
    assert event.evidence["paused_at"] == 1015.0


def test_steps_that_were_made_before_a_pause_do_not_end_it() -> None:
    """They show on the first page after it."""
    engine = at_work()
    engine.works(seen=host(ALL, log=said(PAUSE_LINE)))
    engine.works()
    assert stands(engine, 100) == []


def test_a_pause_whose_end_was_never_read_hides_no_want_of_room_for_ever() -> None:
    engine = at_work()
    engine.works(seen=host(ALL, log=said(PAUSE_LINE)))
    thrown_back: Facts = {fact.PREEMPTIONS: 1}
    assert [e for _ in range(4) for e in engine.works(thrown_back)] == []
    (event,) = engine.works({fact.PREEMPTIONS: 2})
    assert (event.kind.value, event.evidence["paused_at"]) == ("KV_PRESSURE", 1015.0)


def test_an_engine_that_stands_after_its_pause_hangs() -> None:
    engine = at_work()
    engine.works(stands=True, seen=host(ALL, log=said(PAUSE_LINE)))
    stands(engine, 20)
    engine.works(stands=True, seen=host(ALL, log=said(RESUME_LINE)))
    assert stands(engine, 6) == []
    assert kinds(stands(engine, 2)) == ["HANG"]


def test_a_pause_that_ended_hides_no_want_of_room_later() -> None:
    engine = at_work()
    engine.works(seen=host(ALL, log=said(PAUSE_LINE, RESUME_LINE)))
    engine.works()
    assert kinds(engine.works({fact.PREEMPTIONS: 1})) == ["KV_PRESSURE"]


def test_a_new_life_is_not_paused() -> None:
    engine = at_work()
    engine.works(stands=True, seen=host(ALL, log=said(PAUSE_LINE)))
    engine.restarts()
    assert kinds(stands(engine, 8)) == ["HANG"]


def test_a_restart_ends_a_hang() -> None:
    engine = at_work()
    stands(engine, 5)
    engine.restarts()
    assert stands(engine, 6) == []


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 60)), min_size=1, max_size=60))
def test_an_engine_that_beats_at_every_second_poll_never_hangs(
    polls: list[tuple[bool, float]],
) -> None:
    engine = PolledEngine()
    for number, (busy, after_s) in enumerate(polls):
        facts: Facts = {fact.REQUESTS_RUNNING: float(busy)}
        assert engine.works(facts, stands=number % 2 == 0, after_s=after_s) == ()
