"""When an engine hangs, and cases that only look similar."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineProcess, ProcessRole
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
    New,
    Part,
    PolledEngine,
    Scenarios,
    check,
    dying,
    fails,
    host,
    kinds,
    logged,
    process,
    restarts,
    verdicts,
    works,
)

IDLE: Facts = {fact.REQUESTS_RUNNING: 0}
ASLEEP: Facts = {fact.AWAKE: 0}
STOPPED = host([FRONT, replace(CORE, state="T")])


def stall(engine: PolledEngine, polls: int, facts: Facts | None = None) -> list[Event]:
    """Events of so many polls in which nothing was computed."""
    return [event for _ in range(polls) for event in engine.works(facts, stalled=True)]


def working_engine(limits: DetectionLimits | None = None) -> PolledEngine:
    engine = PolledEngine(limits)
    for _ in range(3):
        assert engine.works(host=host(ALL)) == ()
    return engine


HANGS: Scenarios = {
    "work and no heartbeat for half a minute": [
        works(stalled=True, times=6),
        works(stalled=True), "HANG probable", {"stalled_s": 35, "requests_running": 4},
        works(stalled=True, times=200),
    ],
    "a hang that ended can come again": [
        works(stalled=True, times=6),
        works(stalled=True), "HANG probable",
        works(),
        works(stalled=True, times=6),
        works(stalled=True), "HANG probable",
    ],
    "the time until a hang is configurable": [
        New(DetectionLimits(hang_s=8.0)), works(host(ALL), times=3), works(stalled=True, times=2),
        works(stalled=True), "HANG probable",
    ],
    "idle time does not count as a long step": [
        works(None, IDLE, stalled=True, times=100),
        works(),
        works(stalled=True, times=6),
        works(stalled=True), "HANG probable",
    ],
    "tokens that SGLang and others count at the end of a request alone are no heartbeat": [
        New(), works(None, {fact.STEPS: None}),
        works(None, {fact.STEPS: None}, stalled=True, times=100),
    ],
    "time in which the agent did not poll": [
        works(stalled=True, after_s=3600),
        works(stalled=True),
    ],
    "a living front that does not respond": [
        fails(host(ALL), "timeout"), "UNREACHABLE certain",
        fails(host(ALL), "timeout", times=5),
        fails(host(ALL), "timeout"), "HANG probable",
    ],
    "a front that does not respond, without processes, is only unreachable": [
        New(), works(),
        fails(None, "timeout"), "UNREACHABLE certain",
        fails(None, "timeout", times=19),
    ],
    "a process stopped by a signal, at the second poll": [
        works(STOPPED, stalled=True),
        works(STOPPED, stalled=True), "HANG certain",
        {"processes_stopped": "VLLM::core (11)", "process_states": "ST"},
        works(STOPPED, stalled=True),
    ],
    "a process of an idle engine stopped by a signal, each time for two polls": [
        works(STOPPED, IDLE),
        works(STOPPED, IDLE), "HANG certain",
        works(host(ALL), IDLE),
        works(STOPPED, IDLE),
        works(STOPPED, IDLE), "HANG certain",
    ],
    "a stopped process of a sleeping engine": [
        works(None, ASLEEP), "SLEEP certain",
        works(STOPPED, ASLEEP, stalled=True, times=5),
    ],
    "a stopped helper process": [
        works(host([*ALL, process(ProcessRole.OTHER, 13, state="T")]), times=5),
    ],
    "a hang logged by the engine is certain and its death another event": [
        fails(host([], log=logged(HANG_LINE, CORE_LOST_LINE))), "HANG certain, UNREACHABLE certain",
        fails(host([], log=logged(HANG_LINE, CORE_LOST_LINE))), "ENGINE_DEAD certain",
    ],
    "a dead engine with a living front is not also a hang": [
        dying(host([FRONT])),
        dying(host([FRONT])), "ENGINE_DEAD certain",
        dying(host([FRONT]), times=28),
    ],
    "a hang line of an engine that computes": [works(host(ALL, log=logged(HANG_LINE)))],
    "a hang logged by an idle engine": [
        works(None, IDLE),
        works(host(ALL, log=logged(HANG_LINE)), IDLE, stalled=True), "HANG certain",
    ],
    "a hang logged by the engine is reported once without any sample": [
        New(), fails(host(ALL, log=logged(HANG_LINE)), "timeout"), "HANG certain",
        fails(host(ALL, log=logged(HANG_LINE)), "timeout", times=3),
        works(stalled=True, times=20),
        works(),
        works(host(ALL, log=logged(HANG_LINE)), stalled=True), "HANG certain",
    ],
    "a death line at every poll does not hide a hang": [
        works(host(ALL, log=logged(FATAL_LINE)), stalled=True, times=6),
        works(host(ALL, log=logged(FATAL_LINE)), stalled=True), "HANG probable",
        works(host(ALL, log=logged(FATAL_LINE)), stalled=True, times=93),
    ],
}  # fmt: skip

PAUSES: Scenarios = {
    "an engine paused with running requests does not hang": [
        works(host(ALL, log=logged(PAUSE_LINE)), stalled=True),
        works(stalled=True, times=100),
        works(host(ALL, log=logged(RESUME_LINE)), stalled=True),
        works(None, {fact.PREEMPTIONS: 1}, times=20),
    ],
    "steps end a pause although its end was not logged": [
        works(host(ALL, log=logged(PAUSE_LINE))),
        works(times=3),
        works(stalled=True, times=6),
        works(stalled=True), "HANG probable", {"paused_at": 1015.0},
    ],
    "steps made before a pause, which the first sample after it counts, do not end it": [
        works(host(ALL, log=logged(PAUSE_LINE))),
        works(),
        works(stalled=True, times=100),
    ],
    "a pause without a logged end does not hide pressure on the cache for ever": [
        works(host(ALL, log=logged(PAUSE_LINE))),
        works(None, {fact.PREEMPTIONS: 1}, times=4),
        works(None, {fact.PREEMPTIONS: 2}), "KV_PRESSURE certain", {"paused_at": 1015.0},
    ],
    "a pause that ended does not hide pressure on the cache": [
        works(host(ALL, log=logged(PAUSE_LINE, RESUME_LINE))),
        works(),
        works(None, {fact.PREEMPTIONS: 1}), "KV_PRESSURE certain",
    ],
    "a restarted engine is not paused": [
        works(host(ALL, log=logged(PAUSE_LINE)), stalled=True),
        restarts(), "RESTART certain",
        works(stalled=True, times=7),
        works(stalled=True), "HANG probable",
    ],
}  # fmt: skip


EVERY = {**HANGS, **PAUSES}


@pytest.mark.parametrize("parts", EVERY.values(), ids=EVERY)
def test_hangs_and_pauses(parts: Sequence[Part]) -> None:
    check(parts, working_engine)


@pytest.mark.parametrize("facts", [IDLE, ASLEEP])
def test_an_engine_that_is_idle_or_asleep_does_not_hang_and_starts_anew(facts: Facts) -> None:
    engine = working_engine()
    assert "HANG" not in kinds(stall(engine, 100, facts))
    assert stall(engine, 6) == []


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


@pytest.mark.parametrize("back_s", [10.0, 3600.0, 1e9])
def test_a_clock_set_back_neither_hides_nor_causes_a_hang(back_s: float) -> None:
    engine = working_engine()
    stall(engine, 3)
    engine.now -= back_s
    assert stall(engine, 3) == []
    assert kinds(stall(engine, 4)) == ["HANG"]


@pytest.mark.parametrize(
    ("cpu_s", "polls", "expected"),
    [
        # Its core computes.
        (4.0, 20, [("UNREACHABLE", "certain")]),
        (5.0, 700, [("UNREACHABLE", "certain"), ("HANG", "suspected")]),
        # Its core waits.
        (0.02, 8, [("UNREACHABLE", "certain"), ("HANG", "probable")]),
    ],
)
def test_a_front_that_does_not_respond_hangs_if_its_core_waits_or_after_minutes(
    cpu_s: float, polls: int, expected: list[tuple[str, str]]
) -> None:
    engine = working_engine()
    samples = [host([FRONT, replace(CORE, cpu_s=1.0 + cpu_s * poll)]) for poll in range(polls)]
    events = [e for sample in samples for e in engine.fails("timeout", host=sample)]
    assert verdicts(events) == expected
    if expected[-1] == ("HANG", "suspected"):
        assert events[1].at - events[0].at > 120


CORES = [replace(process(ProcessRole.CORE, 30 + n), name=f"VLLM::EngineCore_DP{n}") for n in (0, 1)]


def ranks_at(*steps: float, running: float = 4.0) -> dict[str, Facts]:
    """The facts of ranks with these step counts."""
    return {
        str(rank): {fact.STEPS: count, fact.REQUESTS_RUNNING: running, fact.AWAKE: 1}
        for rank, count in enumerate(steps)
    }


def ranks(
    polls: int,
    steps: Callable[[int], Sequence[float]],
    cores: Sequence[EngineProcess] | None = None,
) -> Part:
    """Polls in which the ranks have these step counts, by the number of the poll."""
    sample = None if cores is None else host([FRONT, *cores])
    return lambda engine: [
        e for n in range(polls) for e in engine.works(ranks=ranks_at(*steps(n)), host=sample)
    ]


RANKS: Scenarios = {
    "a stalled rank beside a working one is a hang of the engine": [
        New(), ranks(120, lambda n: (100 + n, 7), CORES), "HANG probable",
        {"ranks_standing": "1", "stalled_s": 35},
    ],
    "a rank whose core is unknown may have been removed": [
        New(), ranks(120, lambda n: (100 + n, 7)), "HANG suspected",
    ],
    "a removed rank with constant facts does not hang": [
        New(), ranks(5, lambda n: (n, n), CORES),
        ranks(120, lambda n: (n, 4), CORES[:1]),
    ],
    "a rank that was removed before a restart can hang, though then no title names a rank": [
        New(), ranks(1, lambda _: (1, 1), CORES),
        ranks(1, lambda _: (1, 1), CORES[:1]),
        restarts(), "RESTART certain",
        ranks(20, lambda n: (n, 4)), "HANG suspected",
    ],
    "a rank that was removed and added again can hang": [
        New(), ranks(1, lambda _: (1, 1), CORES),
        ranks(1, lambda _: (1, 1), CORES[:1]),
        ranks(20, lambda n: (n, 4), CORES), "HANG probable",
    ],
    "a rank can hang again while in each interval one of the two makes no step": [
        New(), ranks(20, lambda n: (n // 2, (n + 1) // 2)),
        ranks(80, lambda n: (10 + n // 2, 10)), "HANG suspected", {"ranks_standing": "1"},
        ranks(100, lambda n: (50 + n // 2, 10 + (n + 1) // 2)),
        ranks(100, lambda n: (100 + n // 2, 60)), "HANG suspected", {"ranks_standing": "1"},
    ],
    "a second rank that hangs later is reported": [
        New(), ranks(30, lambda n: (n, min(n, 5))), "HANG suspected", {"ranks_standing": "1"},
        ranks(70, lambda _: (30, 5)), "HANG probable", {"ranks_standing": "0, 1"},
    ],
    "ranks that stall shortly after each other are one hang": [
        New(), ranks(60, lambda n: (min(n, 20), min(n, 22)), CORES), "HANG probable",
        New(), ranks(60, lambda n: (min(n, 20), min(n, 22))), "HANG probable",
    ],
}  # fmt: skip


@pytest.mark.parametrize("parts", RANKS.values(), ids=RANKS)
def test_hangs_of_ranks(parts: Sequence[Part]) -> None:
    check(parts, working_engine)


def test_a_rank_without_work_does_not_hang() -> None:
    engine = PolledEngine()
    for step in range(30):
        assert (
            engine.works(ranks={**ranks_at(100 + step), "1": ranks_at(7, running=0.0)["0"]}) == ()
        )


@given(st.lists(st.tuples(st.booleans(), st.floats(0.1, 60)), min_size=1, max_size=60))
def test_an_engine_that_computes_in_every_second_poll_never_hangs(
    polls: list[tuple[bool, float]],
) -> None:
    engine = PolledEngine()
    for number, (busy, after_s) in enumerate(polls):
        facts: Facts = {fact.REQUESTS_RUNNING: float(busy)}
        assert engine.works(facts, stalled=number % 2 == 0, after_s=after_s) == ()


# An engine that does not count its steps, as SGLang, may be in a long step whenever requests run.
WAITING: Facts = {
    fact.STEPS: None,
    fact.OUTPUT_TOKENS: 56_000,
    fact.REQUESTS_RUNNING: 0,
    fact.REQUESTS_WAITING: 212,
}


def test_requests_that_only_wait_hang_also_where_steps_are_not_counted() -> None:
    engine = PolledEngine(dialect="sglang")
    assert kinds(engine.works({**WAITING, fact.REQUESTS_WAITING: 0})) == []
    events = stall(engine, 12, WAITING)
    assert verdicts(events) == [("HANG", "probable")]
    assert events[0].evidence["requests_waiting"] == 212


@pytest.mark.parametrize(
    "moving",
    [
        # Each of these may change at each step.
        lambda poll: {fact.KV_CACHE_USAGE: poll / 100},
        lambda poll: {fact.OUTPUT_TOKENS: 56_000 + poll},
        lambda poll: {fact.REQUESTS_RUNNING: 1},
        lambda poll: {fact.REQUESTS_WAITING: 0},
        lambda poll: {fact.REQUESTS_RUNNING: None},
    ],
)
def test_an_engine_that_does_not_count_its_steps_and_may_compute_is_no_hang(
    moving: Callable[[int], Facts],
) -> None:
    engine = PolledEngine(dialect="sglang")
    for poll in range(30):
        assert engine.works({**WAITING, **moving(poll)}, stalled=True) == ()


# vLLM counts its steps, and admits no request (vllm#39863, vllm#53130).
ADMITS_NOTHING: Facts = {fact.REQUESTS_RUNNING: 0, fact.REQUESTS_WAITING: 6}


def test_an_engine_that_counts_its_steps_and_admits_no_waiting_request_hangs() -> None:
    events = stall(working_engine(), 20, ADMITS_NOTHING)
    assert verdicts(events) == [("HANG", "probable")]
    assert events[0].evidence["requests_waiting"] == 6


@pytest.mark.parametrize(
    "facts",
    [
        # They wait for KV from elsewhere, or for a grammar.
        {**ADMITS_NOTHING, (fact.REQUESTS_WAITING_BY_REASON, "deferred"): 6},
        {**ADMITS_NOTHING, fact.AWAKE: 0},
        {**ADMITS_NOTHING, fact.REQUESTS_WAITING: 0},
    ],
)
def test_requests_that_wait_for_something_else_than_a_place_are_no_hang(facts: Facts) -> None:
    assert "HANG" not in kinds(stall(working_engine(), 40, facts))


def test_one_request_that_waits_for_a_place_beside_deferred_ones_hangs() -> None:
    deferred: Facts = {**ADMITS_NOTHING, (fact.REQUESTS_WAITING_BY_REASON, "deferred"): 5}
    assert kinds(stall(working_engine(), 20, deferred)) == ["HANG"]


def test_the_time_of_a_scrape_is_no_progress() -> None:
    engine = PolledEngine(dialect="sglang")
    events = [
        event
        for poll in range(12)
        for event in engine.works({**WAITING, fact.SCRAPE_DURATION: poll / 1000}, stalled=True)
    ]
    assert kinds(events) == ["HANG"]


def test_requests_that_come_to_the_waiting_ones_are_no_progress() -> None:
    engine = PolledEngine(dialect="sglang")
    events = [
        event
        for poll in range(12)
        for event in engine.works({**WAITING, fact.REQUESTS_WAITING: 200 + poll}, stalled=True)
    ]
    assert kinds(events) == ["HANG"]
