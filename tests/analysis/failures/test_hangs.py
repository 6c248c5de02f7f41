"""When an engine hangs, and cases that only look similar."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.records.engine import ProcessRole
from agent.records.event import Event
from tests.analysis.failures.polled_engine import (
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
    logged,
    process,
    verdicts,
)

IDLE: Facts = {fact.REQUESTS_RUNNING: 0}
ASLEEP: Facts = {fact.AWAKE: 0}


def stall(engine: PolledEngine, polls: int, facts: Facts | None = None) -> list[Event]:
    """Events of so many polls in which nothing was computed."""
    return [event for _ in range(polls) for event in engine.works(facts, stalled=True)]


def working_engine(limits: DetectionLimits | None = None) -> PolledEngine:
    engine = PolledEngine(limits)
    for _ in range(3):
        assert engine.works(host=host(ALL)) == ()
    return engine


def test_an_engine_with_work_and_no_heartbeat_for_half_a_minute_hangs() -> None:
    engine = working_engine()
    assert stall(engine, 6) == []
    (event,) = stall(engine, 1)
    assert verdicts([event]) == [("HANG", "probable")]
    assert event.evidence["stalled_s"] == 35
    assert event.evidence["requests_running"] == 4


def test_a_hang_is_reported_once() -> None:
    assert kinds(stall(working_engine(), 200)) == ["HANG"]


def test_a_hang_that_ended_can_come_again() -> None:
    engine = working_engine()
    events = stall(engine, 10)
    engine.works()
    assert kinds([*events, *stall(engine, 10)]) == ["HANG", "HANG"]


def test_the_time_until_a_hang_is_configurable() -> None:
    engine = working_engine(DetectionLimits(hang_s=8.0))
    assert kinds(stall(engine, 3)) == ["HANG"]


@pytest.mark.parametrize("facts", [IDLE, ASLEEP])
def test_an_engine_that_is_idle_or_asleep_does_not_hang(facts: Facts) -> None:
    engine = working_engine()
    assert "HANG" not in kinds(stall(engine, 100, facts))


@pytest.mark.parametrize("facts", [IDLE, ASLEEP])
def test_the_time_until_a_hang_starts_when_idle_time_or_sleep_ends(facts: Facts) -> None:
    engine = working_engine()
    stall(engine, 100, facts)
    assert stall(engine, 6) == []


def test_idle_time_does_not_count_as_a_long_step() -> None:
    engine = working_engine()
    stall(engine, 100, IDLE)
    engine.works()
    assert kinds(stall(engine, 8)) == ["HANG"]


def test_a_long_prefill_that_fills_the_cache_is_no_hang() -> None:
    engine = working_engine()
    filling: list[Facts] = [{fact.KV_CACHE_USAGE: 0.3 + step / 100} for step in range(50)]
    assert [event for facts in filling for event in engine.works(facts, stalled=True)] == []


def test_an_engine_with_long_steps_hangs_after_ten_of_them() -> None:
    engine = PolledEngine()
    tokens = 0.0
    for poll in range(12):
        tokens += poll % 4 == 0
        engine.works({fact.STEPS: tokens, fact.OUTPUT_TOKENS: tokens}, stalled=True)
    late: Facts = {fact.STEPS: tokens, fact.OUTPUT_TOKENS: tokens}
    # Steps take 20 s, and the last one was three polls ago.
    assert stall(engine, 35, late) == []
    assert kinds(stall(engine, 5, late)) == ["HANG"]


def test_tokens_counted_only_at_the_end_of_a_request_are_no_heartbeat() -> None:
    """SGLang, TGI and TensorRT-LLM count no steps."""
    no_steps: Facts = {fact.STEPS: None}
    engine = PolledEngine()
    engine.works(no_steps)
    assert stall(engine, 100, no_steps) == []


def test_time_in_which_the_agent_did_not_poll_is_no_hang() -> None:
    engine = working_engine()
    engine.works(stalled=True, after_s=3600)
    assert engine.works(stalled=True) == ()


@pytest.mark.parametrize("back_s", [10.0, 3600.0, 1e9])
def test_a_clock_set_back_neither_hides_nor_causes_a_hang(back_s: float) -> None:
    engine = working_engine()
    stall(engine, 3)
    engine.now -= back_s
    assert stall(engine, 3) == []
    assert kinds(stall(engine, 4)) == ["HANG"]


def test_a_living_front_that_does_not_respond_hangs() -> None:
    engine = working_engine()
    events = [event for _ in range(8) for event in engine.fails("timeout", host=host(ALL))]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("HANG", "probable")]


def test_a_front_that_does_not_respond_while_its_core_computes_is_only_unreachable() -> None:
    engine = working_engine()
    samples = [host([FRONT, replace(CORE, cpu_s=4.0 * poll)]) for poll in range(1, 21)]
    assert kinds([e for sample in samples for e in engine.fails("timeout", host=sample)]) == [
        "UNREACHABLE"
    ]


def test_a_front_that_does_not_respond_for_minutes_is_suspected_to_hang() -> None:
    engine = working_engine()
    samples = [host([FRONT, replace(CORE, cpu_s=5.0 * poll)]) for poll in range(1, 700)]
    events = [e for sample in samples for e in engine.fails("timeout", host=sample)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("HANG", "suspected")]
    assert events[1].at - events[0].at > 120


def test_a_front_hangs_although_its_waiting_core_uses_little_cpu() -> None:
    engine = working_engine()
    samples = [host([FRONT, replace(CORE, cpu_s=1.0 + 0.02 * poll)]) for poll in range(8)]
    events = [e for sample in samples for e in engine.fails("timeout", host=sample)]
    assert kinds(events) == ["UNREACHABLE", "HANG"]


def test_a_front_that_does_not_respond_without_processes_is_only_unreachable() -> None:
    engine = PolledEngine()
    engine.works()
    assert kinds([e for _ in range(20) for e in engine.fails("timeout")]) == ["UNREACHABLE"]


@pytest.mark.parametrize("facts", [{}, IDLE])
def test_a_process_stopped_by_a_signal_is_a_hang_at_the_second_poll(facts: Facts) -> None:
    engine = working_engine()
    stopped = host([FRONT, replace(CORE, state="T")])
    assert engine.works(facts, stalled=True, host=stopped) == ()
    (event,) = engine.works(facts, stalled=True, host=stopped)
    assert verdicts([event]) == [("HANG", "certain")]
    assert event.evidence["processes_stopped"] == "VLLM::core (11)"
    assert event.evidence["process_states"] == "ST"
    assert engine.works(facts, stalled=True, host=stopped) == ()


@pytest.mark.parametrize(("polls", "hangs"), [("ssrss", 2), ("srsr", 0)])
def test_a_process_hangs_each_time_it_is_stopped_for_two_polls(polls: str, hangs: int) -> None:
    engine = working_engine()
    samples = {"s": host([FRONT, replace(CORE, state="T")]), "r": host(ALL)}
    events = [e for each in polls for e in engine.works(IDLE, host=samples[each])]
    assert kinds(events) == ["HANG"] * hangs


def test_a_stopped_process_of_a_sleeping_engine_is_no_hang() -> None:
    engine = working_engine()
    engine.works(ASLEEP)
    stopped = host([FRONT, replace(CORE, state="T")])
    assert [e for _ in range(5) for e in engine.works(ASLEEP, stalled=True, host=stopped)] == []


def test_a_stopped_helper_process_is_no_hang() -> None:
    engine = working_engine()
    helper = process(ProcessRole.OTHER, 13, state="T")
    assert [e for _ in range(5) for e in engine.works(host=host([*ALL, helper]))] == []


def test_a_hang_logged_by_the_engine_is_certain_and_its_death_another_event() -> None:
    engine = working_engine()
    log = logged(HANG_LINE, CORE_LOST_LINE)
    events = (*engine.fails(host=host([], log=log)), *engine.fails(host=host([], log=log)))
    assert verdicts(events) == [
        ("HANG", "certain"),
        ("UNREACHABLE", "certain"),
        ("ENGINE_DEAD", "certain"),
    ]


def test_a_dead_engine_with_a_living_front_is_not_also_a_hang() -> None:
    engine = working_engine()
    dead = [
        e for _ in range(30) for e in engine.works(stalled=True, health=503, host=host([FRONT]))
    ]
    assert kinds(dead) == ["ENGINE_DEAD"]


def test_a_hang_line_of_an_engine_that_computes_is_no_hang() -> None:
    engine = working_engine()
    assert engine.works(host=host(ALL, log=logged(HANG_LINE))) == ()


@pytest.mark.parametrize("facts", [{}, IDLE])
def test_a_hang_logged_by_the_engine_is_reported_while_its_facts_do_not_change(
    facts: Facts,
) -> None:
    engine = working_engine()
    engine.works(facts)
    events = engine.works(facts, stalled=True, host=host(ALL, log=logged(HANG_LINE)))
    assert verdicts(events) == [("HANG", "certain")]


def test_a_hang_logged_by_the_engine_is_reported_once_without_any_sample() -> None:
    engine = PolledEngine()
    sample = host(ALL, log=logged(HANG_LINE))
    events = [e for _ in range(4) for e in engine.fails("timeout", host=sample)]
    events += stall(engine, 20)
    assert verdicts(events) == [("HANG", "certain")]
    engine.works()
    assert kinds(engine.works(stalled=True, host=sample)) == ["HANG"]


def test_a_death_line_at_every_poll_does_not_hide_a_hang() -> None:
    engine = working_engine()
    sample = host(ALL, log=logged(FATAL_LINE))
    events = [e for _ in range(100) for e in engine.works(stalled=True, host=sample)]
    assert verdicts(events) == [("HANG", "probable")]


CORES = [replace(process(ProcessRole.CORE, 30 + n), name=f"VLLM::EngineCore_DP{n}") for n in (0, 1)]


def ranks_at(*steps: float, running: float = 4.0) -> dict[str, Facts]:
    """The facts of ranks with these step counts."""
    return {
        str(rank): {fact.STEPS: count, fact.REQUESTS_RUNNING: running, fact.AWAKE: 1}
        for rank, count in enumerate(steps)
    }


@pytest.mark.parametrize(("cores_known", "confidence"), [(True, "probable"), (False, "suspected")])
def test_a_stalled_rank_beside_a_working_one_is_a_hang_of_the_engine(
    cores_known: bool, confidence: str
) -> None:
    """If its core is unknown, the rank may have been removed."""
    engine = PolledEngine()
    sample = host([FRONT, *CORES]) if cores_known else None
    events = [
        e for step in range(120) for e in engine.works(ranks=ranks_at(100 + step, 7), host=sample)
    ]
    (event,) = events
    assert verdicts([event]) == [("HANG", confidence)]
    assert (event.evidence["ranks_standing"], event.evidence["stalled_s"]) == ("1", 35)


def test_a_removed_rank_with_constant_facts_does_not_hang() -> None:
    engine = PolledEngine()
    for step in range(5):
        engine.works(ranks=ranks_at(step, step), host=host([FRONT, *CORES]))
    smaller = host([FRONT, CORES[0]])
    events = [e for step in range(120) for e in engine.works(ranks=ranks_at(step, 4), host=smaller)]
    assert events == []


def test_a_rank_removed_before_a_restart_can_hang() -> None:
    """After the restart there is one process, and its title names no rank."""
    engine = working_engine()
    for cores in (CORES, CORES[:1]):
        engine.works(ranks=ranks_at(1, 1), host=host([FRONT, *cores]))
    engine.restarts()
    events = [e for step in range(20) for e in engine.works(ranks=ranks_at(step, 4))]
    assert kinds(events) == ["HANG"]


def test_a_rank_that_was_removed_and_added_again_can_hang() -> None:
    engine = PolledEngine()
    for cores in (CORES, CORES[:1], CORES):
        engine.works(ranks=ranks_at(1, 1), host=host([FRONT, *cores]))
    sample = host([FRONT, *CORES])
    events = [e for step in range(20) for e in engine.works(ranks=ranks_at(step, 4), host=sample)]
    assert kinds(events) == ["HANG"]


def test_a_rank_can_hang_again_while_another_is_slow() -> None:
    """In each interval one of the two ranks makes no step."""
    engine = PolledEngine()
    steps, events = [0, 0], list[Event]()
    for poll in range(300):
        steps[0] += poll % 2
        steps[1] += (poll + 1) % 2 if poll < 20 or 100 < poll < 200 else 0
        events += engine.works(ranks=ranks_at(*steps))
    assert [event.evidence["ranks_standing"] for event in events] == ["1", "1"]


def test_a_second_rank_that_hangs_later_is_reported() -> None:
    engine = PolledEngine()
    steps = [(min(step, 30), min(step, 5)) for step in range(100)]
    events = [e for each in steps for e in engine.works(ranks=ranks_at(*each))]
    assert [event.evidence["ranks_standing"] for event in events] == ["1", "0, 1"]


@pytest.mark.parametrize("cores_known", [True, False])
def test_ranks_that_stall_shortly_after_each_other_are_one_hang(
    cores_known: bool,
) -> None:
    """All ranks wait for one of them. No rank was removed."""
    engine = PolledEngine()
    sample = host([FRONT, *CORES]) if cores_known else None
    steps = [(min(step, 20), min(step, 22)) for step in range(60)]
    events = [e for each in steps for e in engine.works(ranks=ranks_at(*each), host=sample)]
    assert verdicts(events) == [("HANG", "probable")]


def test_a_rank_without_work_does_not_hang() -> None:
    engine = PolledEngine()
    for step in range(30):
        ranks = ranks_at(100 + step) | {"1": ranks_at(7, 7, running=0.0)["1"]}
        assert engine.works(ranks=ranks) == ()


def test_a_rank_can_hang_again() -> None:
    engine = PolledEngine()
    steps = [(step, 7 if step < 20 or step > 22 else step) for step in range(45)]
    events = [e for each in steps for e in engine.works(ranks=ranks_at(*each))]
    assert kinds(events) == ["HANG", "HANG"]


def test_an_engine_paused_with_running_requests_does_not_hang() -> None:
    """Real vLLM 0.32 with `/pause?mode=keep`: only the log shows it."""
    engine = working_engine()
    assert engine.works(stalled=True, host=host(ALL, log=logged(PAUSE_LINE))) == ()
    assert stall(engine, 100) == []
    preempted: Facts = {fact.PREEMPTIONS: 1}
    assert engine.works(stalled=True, host=host(ALL, log=logged(RESUME_LINE))) == ()
    assert [e for _ in range(20) for e in engine.works(preempted)] == []


def test_steps_end_a_pause_although_its_end_was_not_logged() -> None:
    engine = working_engine()
    engine.works(host=host(ALL, log=logged(PAUSE_LINE)))
    for _ in range(3):
        assert engine.works() == ()
    (event,) = stall(engine, 8)
    assert verdicts([event]) == [("HANG", "probable")]
    assert event.evidence["paused_at"] == 1015.0


def test_steps_made_before_a_pause_do_not_end_it() -> None:
    """The first sample after the pause counts them."""
    engine = working_engine()
    engine.works(host=host(ALL, log=logged(PAUSE_LINE)))
    engine.works()
    assert stall(engine, 100) == []


def test_a_pause_without_a_logged_end_does_not_hide_kv_pressure_for_ever() -> None:
    engine = working_engine()
    engine.works(host=host(ALL, log=logged(PAUSE_LINE)))
    preempted: Facts = {fact.PREEMPTIONS: 1}
    assert [e for _ in range(4) for e in engine.works(preempted)] == []
    (event,) = engine.works({fact.PREEMPTIONS: 2})
    assert (event.kind.value, event.evidence["paused_at"]) == ("KV_PRESSURE", 1015.0)


def test_an_engine_that_stalls_after_its_pause_hangs() -> None:
    engine = working_engine()
    engine.works(stalled=True, host=host(ALL, log=logged(PAUSE_LINE)))
    stall(engine, 20)
    engine.works(stalled=True, host=host(ALL, log=logged(RESUME_LINE)))
    assert stall(engine, 6) == []
    assert kinds(stall(engine, 2)) == ["HANG"]


def test_a_pause_that_ended_does_not_hide_kv_pressure() -> None:
    engine = working_engine()
    engine.works(host=host(ALL, log=logged(PAUSE_LINE, RESUME_LINE)))
    engine.works()
    assert kinds(engine.works({fact.PREEMPTIONS: 1})) == ["KV_PRESSURE"]


def test_a_restarted_engine_is_not_paused() -> None:
    engine = working_engine()
    engine.works(stalled=True, host=host(ALL, log=logged(PAUSE_LINE)))
    engine.restarts()
    assert kinds(stall(engine, 8)) == ["HANG"]


def test_a_restart_ends_a_hang() -> None:
    engine = working_engine()
    stall(engine, 5)
    engine.restarts()
    assert stall(engine, 6) == []


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 60)), min_size=1, max_size=60))
def test_an_engine_that_computes_in_every_second_poll_never_hangs(
    polls: list[tuple[bool, float]],
) -> None:
    engine = PolledEngine()
    for number, (busy, after_s) in enumerate(polls):
        facts: Facts = {fact.REQUESTS_RUNNING: float(busy)}
        assert engine.works(facts, stalled=number % 2 == 0, after_s=after_s) == ()
