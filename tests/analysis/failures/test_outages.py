"""Outages and their ends, restarts, and conditions that last."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.failures import DetectionLimits
from agent.analysis.failures.progress import restart_between
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineProcess, EngineSample, ProcessRole
from agent.records.event import Confidence, Event
from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    CORE,
    CORE_LOST_LINE,
    FRONT,
    FRONT_ENDED_LINE,
    NEXT,
    SILENCE,
    STOP_LINE,
    Facts,
    New,
    Part,
    PolledEngine,
    Scenarios,
    check,
    dying,
    engine_in_use,
    fails,
    hides_start_time,
    host,
    kinds,
    logged,
    process,
    restarts,
    verdicts,
    works,
)

REFUSED = (fact.ADMISSION_REJECTIONS, "max_num_queued_reqs")

FactsAt = Callable[[float], Facts]


def preempted(total: float) -> Facts:
    """Facts after so many preemptions."""
    return {fact.PREEMPTIONS: total, fact.KV_CACHE_USAGE: 0.99, fact.REQUESTS_WAITING: 12}


def refused(total: float) -> Facts:
    """Facts after so many refusals."""
    return {(fact.ADMISSION_REJECTIONS, "max_num_queued_reqs"): total, fact.REQUESTS_WAITING: 12}


def takes_requests(polls: int) -> Part:
    """Polls in which requests come and go."""
    busy: list[Facts] = [{fact.REQUESTS_RUNNING: 4 + poll % 2} for poll in range(polls)]
    sample = host(ALL, kills=0, log=CHATTER)
    return lambda engine: [e for facts in busy for e in engine.works(facts, host=sample)]


OUTAGES: Scenarios = {
    "a restart has the length of the outage": [
        fails(after_s=40), "UNREACHABLE certain",
        fails(after_s=2),
        restarts(), "RESTART certain", {"gone_s": 42, "output_tokens": 800},
    ],
    "a new front that has no core yet is no death after a stop": [
        fails(host(())), "UNREACHABLE certain",
        fails(host(NEXT[:1]), times=9),
        restarts(host(NEXT)), "RESTART certain",
    ],
    "new PIDs make a restart certain without a start time": [
        New(), hides_start_time,
        works(host(ALL)),
        works(host(NEXT)), "RESTART certain",
    ],
    "reused PIDs make a restart certain without a start time": [
        New(), hides_start_time,
        works(host(ALL)),
        works(host([replace(each, started_after_boot_s=99.0) for each in ALL])), "RESTART certain",
    ],
    "a death between two polls is reported with the restart": [
        restarts(host(NEXT, kills=0, log=logged(CORE_LOST_LINE, FRONT_ENDED_LINE))),
        "ENGINE_DEAD certain, RESTART certain",
    ],
    "an exposition that cannot be parsed is not unreachable": [fails(None, "not_text")],
    "an engine that was never reached has no outage": [New(), fails()],
    "an outage ends with a sample when there is no health check": [
        New(), works(health=None),
        fails(), "UNREACHABLE certain",
        works(stalled=True, health=None, after_s=100),
        restarts(), "RESTART certain", {"gone_s": 100},
    ],
    "a death is reported when the engine is back before the second poll": [
        fails(host([], kills=0, log=logged(CORE_LOST_LINE)), after_s=7), "UNREACHABLE certain",
        restarts(host(NEXT, kills=0)), "ENGINE_DEAD certain, RESTART certain", {"gone_s": 7},
    ],
    "a new engine whose health check does not pass yet is starting": [
        New(dialect="sglang"), works(),
        fails(), "UNREACHABLE certain",
        fails(None, "http_status", health=503, times=4),
        restarts(health=503), "RESTART certain",
        works(health=503, times=4),
    ],
    "a wrapper first taken for the front is no restart": [
        New(), works(host([process(ProcessRole.FRONT, 9), CORE])),
        works(host([process(ProcessRole.OTHER, 9), *ALL]), times=3),
    ],
    "an engine that responds 503 while it changes its ranks is not dead": [
        fails(host(ALL, kills=0, log=CHATTER), "http_status", health=503, times=30),
        "UNREACHABLE certain",
        works(host(ALL, kills=0, log=CHATTER), times=3),
    ],
    "an engine that works long after a stop line can die": [
        works(host(ALL, kills=0, log=logged(STOP_LINE))),
        takes_requests(130),
        dying(host([FRONT], kills=0, log=logged(CORE_LOST_LINE))),
        dying(host([FRONT], kills=0, log=CHATTER)), "ENGINE_DEAD certain",
    ],
    "counters that fall with a removed rank are no restart": [
        New(), works(None, {fact.DATA_PARALLEL_RANKS: 2, fact.OUTPUT_TOKENS: 900, REFUSED: 9}),
        works(None, {fact.DATA_PARALLEL_RANKS: 1, fact.OUTPUT_TOKENS: 5, REFUSED: 4}, times=3),
    ],
    "a dead engine that is healthy again restarted without a start time": [
        New(), hides_start_time,
        works(),
        dying(),
        dying(), "ENGINE_DEAD certain",
        fails(), "UNREACHABLE certain",
        works(), "RESTART probable", {"cause": "ENGINE_DEAD", "gone_s": 15},
        works(),
    ],
    "an engine with the same processes did not restart": [
        New(), hides_start_time,
        works(host(ALL)),
        dying(host(ALL)),
        dying(host(ALL)), "ENGINE_DEAD certain",
        works(host(ALL)),
    ],
    "a dead engine that is healthy again did not restart where its start is the same": [
        New(), works(host(log=CHATTER)),
        fails(host(log=logged(CORE_LOST_LINE))), "UNREACHABLE certain",
        fails(host(log=logged(CORE_LOST_LINE))), "ENGINE_DEAD certain",
        works(host(log=CHATTER)),
    ],
    "an engine that takes requests soon after a stop line still stops": [
        works(host(ALL, kills=0, log=logged(STOP_LINE))),
        works(host(ALL, kills=0, log=CHATTER), {fact.REQUESTS_RUNNING: 5}),
        dying(host([FRONT], kills=0, log=SILENCE), times=3),
        fails(host([], kills=0, log=SILENCE)), "UNREACHABLE certain", {"stop_line": STOP_LINE},
    ],
    "a suspected death that ended does not lengthen a later outage": [
        New(), works(host(ALL), health=None),
        dying(host([FRONT]), health=None),
        dying(host(ALL), health=None, times=3),
        restarts(host(NEXT)), "RESTART certain", {"gone_s": 5},
    ],
}  # fmt: skip

CONDITIONS: Scenarios = {
    "preemptions are pressure on the cache": [
        New(), works(),
        works(None, {**preempted(3), (fact.REQUESTS_WAITING_BY_REASON, "capacity"): 9}),
        "KV_PRESSURE certain",
        {"preemptions": 3, "kv_cache_usage": 0.99, "requests_waiting_for_capacity": 9},
    ],
    "refusals are an admission limit": [
        New(), works(),
        works(None, refused(7)), "ADMISSION_LIMIT certain",
        {"refused_max_num_queued_reqs": 7, "requests_waiting": 12},
    ],
    "counts before the first sample are not reported": [
        New(), works(None, {**preempted(500), **refused(500)}, times=2),
    ],
    "a pressure that ended a minute ago is reported again": [
        New(), works(None, preempted(0)),
        works(None, preempted(1), after_s=61), "KV_PRESSURE certain",
        works(None, preempted(1)),
        works(None, preempted(2)), "KV_PRESSURE certain",
    ],
    "a pressure does not end before the configured quiet time": [
        New(DetectionLimits(quiet_s=20)), works(None, preempted(0)),
        works(None, preempted(1), after_s=19), "KV_PRESSURE certain",
        works(None, preempted(2), after_s=19),
        works(None, preempted(3)),
    ],
    "a restart counts preemptions from zero": [
        New(), works(None, preempted(100), times=2),
        hides_start_time,
        works(None, preempted(4)), "KV_PRESSURE certain, RESTART probable", {"preemptions": 4},
    ],
    "all counts after a restart are new": [
        New(), works(None, preempted(2)),
        restarts(None, preempted(5)), "KV_PRESSURE certain, RESTART certain", {"preemptions": 5},
    ],
    "sleep is reported once and again after waking": [
        New(), works(),
        works(None, {fact.AWAKE: 0}), "SLEEP certain",
        works(None, {fact.AWAKE: 0}),
        works(),
        works(None, {fact.AWAKE: 0}), "SLEEP certain",
    ],
}  # fmt: skip


EVERY = {**OUTAGES, **CONDITIONS}


@pytest.mark.parametrize("parts", EVERY.values(), ids=EVERY)
def test_outages_restarts_and_conditions_are_reported_once(parts: Sequence[Part]) -> None:
    check(parts)


@pytest.mark.parametrize("failure", ["html", "json", "http_status"])
def test_an_engine_that_says_it_is_healthy_is_reachable_whatever_its_metrics_are(
    failure: str,
) -> None:
    """For example behind a gateway that answers /metrics with a page of its own."""
    check([fails(None, failure, health=200, times=30), fails(), "UNREACHABLE certain"])


@pytest.mark.parametrize(
    ("dialect", "facts"),
    [("vllm", {}), ("vllm", {fact.REQUESTS_RUNNING: 0}), ("trtllm", {fact.STEPS: None})],
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


def test_an_engine_that_responds_503_for_minutes_is_suspected_to_be_dead() -> None:
    engine = engine_in_use()
    sample = host(ALL, kills=0, log=CHATTER)
    events = [e for _ in range(300) for e in engine.fails("http_status", health=503, host=sample)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "suspected")]
    assert events[1].at - events[0].at > 600


@pytest.mark.parametrize("left", [FRONT, CORE])
def test_503_from_an_engine_that_lost_a_process_is_a_death(left: EngineProcess) -> None:
    poll = fails(host([left], kills=0, log=CHATTER), "http_status", health=503)
    check([poll, "UNREACHABLE certain", poll, "ENGINE_DEAD certain", poll, poll])


def test_an_engine_that_drains_for_minutes_before_it_stops_does_not_die() -> None:
    # A preempted request waits again.
    draining: list[Facts] = [
        {fact.REQUESTS_RUNNING: 4 - n % 2, fact.REQUESTS_WAITING: n % 2} for n in range(200)
    ]
    gone = host([FRONT], kills=0, log=SILENCE)
    check(
        [
            works(host(ALL, kills=0, log=logged(STOP_LINE))),
            *(works(host(ALL, kills=0, log=CHATTER), facts) for facts in draining),
            works(gone, stalled=True, times=5),
            fails(gone), "UNREACHABLE certain",
            fails(gone, times=2),
        ]
    )  # fmt: skip


@pytest.mark.parametrize("facts_at", [preempted, refused])
def test_a_pressure_that_lasts_is_reported_once(facts_at: FactsAt) -> None:
    engine = PolledEngine()
    engine.works()
    events = [event for total in range(1, 200) for event in engine.works(facts_at(total))]
    assert len(events) == 1


def test_a_clock_set_back_by_a_year_does_not_silence_a_pressure_for_a_year() -> None:
    engine = PolledEngine()
    engine.works(preempted(0))
    events: list[Event] = [*engine.works(preempted(1))]
    engine.now -= 365 * 86400
    events += [event for _ in range(20) for event in engine.works(preempted(1))]
    events += engine.works(preempted(2))
    assert kinds(events) == ["KV_PRESSURE", "KV_PRESSURE"]


# Restarts found by comparing two samples

KeyedFacts = Mapping[tuple[str, tuple[str, ...]], float]

OUTPUT = (fact.OUTPUT_TOKENS.name, ())
INPUT = (fact.INPUT_TOKENS.name, ())
STOPPED = (fact.REQUESTS_FINISHED.name, ("stop",))
RANKS = (fact.DATA_PARALLEL_RANKS.name, ())
RUNNING = (fact.REQUESTS_RUNNING.name, ())


def sample(facts: KeyedFacts, *, at: float = 100.0, started: float | None = None) -> EngineSample:
    return EngineSample(
        engine="chat", at=at, dialect="vllm", model="m", facts=facts, process_started_at=started
    )


@pytest.mark.parametrize(
    ("started", "output", "expected"),
    [
        (2000, 20, Confidence.CERTAIN),
        # Start times within a second are the same.
        (1000.02, 20, None),
        (1000, 3, Confidence.SUSPECTED),
    ],
)
def test_another_start_time_makes_a_restart_certain_and_a_fallen_counter_only_suspected(
    started: float, output: float, expected: Confidence | None
) -> None:
    before, after = sample({OUTPUT: 10}, started=1000), sample({OUTPUT: output}, started=started)
    assert restart_between(before, after) is expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({OUTPUT: 10, INPUT: 5}, {OUTPUT: 3, INPUT: 50}, Confidence.PROBABLE),
        ({OUTPUT: 10}, {OUTPUT: 0}, Confidence.PROBABLE),
        ({OUTPUT: 10, STOPPED: 5, RUNNING: 2}, {RUNNING: 0}, Confidence.PROBABLE),
        ({OUTPUT: 10, RANKS: 1}, {OUTPUT: 6, RANKS: 2}, Confidence.PROBABLE),
        ({OUTPUT: 10, RANKS: 2}, {OUTPUT: 6, RANKS: 1}, None),
        ({OUTPUT: 10, STOPPED: 5}, {OUTPUT: 11}, None),
        ({OUTPUT: 0}, {}, None),
        ({RUNNING: 4, OUTPUT: 1}, {RUNNING: 0, OUTPUT: 1}, None),
    ],
    ids=[
        "one fell", "one fell to 0", "all disappeared", "fell while a rank came",
        "fell with a removed rank", "one is missing", "one at 0 disappeared", "a gauge fell",
    ],
)  # fmt: skip
def test_counters_that_fell_or_all_disappeared_make_a_restart_probable(
    before: KeyedFacts, after: KeyedFacts, expected: Confidence | None
) -> None:
    assert restart_between(sample(before), sample(after)) is expected


def with_ranks(total: float, **ranks: float) -> EngineSample:
    """A sample of several ranks, with the output tokens of each."""
    by_rank = {rank[1:]: sample({OUTPUT: counted}) for rank, counted in ranks.items()}
    return replace(sample({OUTPUT: total, RANKS: max(len(ranks), 1)}), ranks=by_rank)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (with_ranks(31, r0=11, r1=20), None),
        (with_ranks(5, r0=2, r1=3), Confidence.PROBABLE),
        # A single rank is reported without its name.
        (with_ranks(11), None),
        (with_ranks(5), Confidence.PROBABLE),
    ],
)
def test_a_removed_rank_does_not_hide_a_counter_reset_of_another(
    after: EngineSample, expected: Confidence | None
) -> None:
    assert restart_between(with_ranks(60, r0=10, r1=20, r2=30), after) is expected


counts = st.integers(0, 10**15).map(float)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=3), st.floats(0, 1) | st.none())
def test_counters_that_only_grow_are_no_restart(
    counts_and_growth: list[tuple[float, float]], started: float | None
) -> None:
    keys = (OUTPUT, INPUT, STOPPED)
    before = {key: value for key, (value, _) in zip(keys, counts_and_growth, strict=False)}
    after = {key: value + more for key, (value, more) in zip(keys, counts_and_growth, strict=False)}
    assert restart_between(sample(before, started=started), sample(after, started=started)) is None
