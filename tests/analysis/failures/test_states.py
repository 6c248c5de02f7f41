"""The state that probes report: never dead while it computes, and never alive while it stands."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from agent.analysis.failures import DetectionLimits
from agent.catalog import engine_facts as fact
from agent.catalog.engine_states import ENGINE_STATES, ProbedState
from tests.analysis.failures.polled_engine import (
    ALL,
    CORE,
    CORE_LOST_LINE,
    FRONT,
    NEXT,
    PAUSE_LINE,
    RESUME_LINE,
    STOP_LINE,
    Facts,
    PolledEngine,
    engine_in_use,
    host,
    logged,
    verdicts,
)

IDLE: Facts = {fact.REQUESTS_RUNNING: 0, fact.REQUESTS_WAITING: 0}
FULL: Facts = {fact.REQUESTS_RUNNING: 256, fact.REQUESTS_WAITING: 500, fact.KV_CACHE_USAGE: 1}
ADMITS_NOTHING: Facts = {fact.REQUESTS_RUNNING: 0, fact.REQUESTS_WAITING: 6}
REJECTED = (fact.ADMISSION_REJECTIONS, "queue")

Poll = Callable[[PolledEngine], object]


def polled(*polls: Poll, engine: PolledEngine | None = None) -> PolledEngine:
    """The engine after these polls."""
    engine = engine or engine_in_use()
    for poll in polls:
        poll(engine)
    return engine


def works(facts: Facts | None = None, **how: Any) -> Poll:
    return lambda engine: engine.works(facts, **how)


def fails(reason: str = "connection", **how: Any) -> Poll:
    return lambda engine: engine.fails(reason, **how)


def long(poll: Poll, polls: int = 30) -> list[Poll]:
    """The same poll for two and a half minutes, or for so many times 5 s."""
    return [poll] * polls


LOST_CORE = {"health": 503, "stalled": True, "host": host([FRONT], log=logged(CORE_LOST_LINE))}
STOPPED = [FRONT, replace(CORE, state="T")]
STATES: Sequence[tuple[str, Sequence[Poll], ProbedState]] = (
    ("requests run", [works()], ProbedState.OK),
    ("no request", [works(IDLE)], ProbedState.IDLE),
    ("no request for long", long(works(IDLE, stalled=True)), ProbedState.IDLE),
    ("a full batch and a deep queue for minutes", long(works(FULL)), ProbedState.SATURATED),
    ("rejected requests", [works({REJECTED: 0}), works({REJECTED: 3})], ProbedState.SATURATED),
    ("rejected ones before", [works({REJECTED: 3}), works({REJECTED: 3})], ProbedState.OK),
    ("no step for half the patience", long(works(stalled=True), 3), ProbedState.OK),
    ("no step", long(works(stalled=True)), ProbedState.STALLED),
    ("no step of a full batch", long(works(FULL, stalled=True)), ProbedState.STALLED),
    ("it admits nothing", long(works(ADMITS_NOTHING, stalled=True)), ProbedState.STALLED),
    ("steps again", [*long(works(stalled=True)), works()], ProbedState.OK),
    ("a stopped core", long(works(IDLE, host=host(STOPPED)), 3), ProbedState.STALLED),
    ("asleep", long(works({fact.AWAKE: 0}, stalled=True)), ProbedState.PAUSED),
    (
        "paused",
        [works(host=host(ALL, log=logged(PAUSE_LINE))), *long(works(stalled=True))],
        ProbedState.PAUSED,
    ),
    (
        "resumed",
        [works(host=host(ALL, log=logged(PAUSE_LINE, RESUME_LINE))), works()],
        ProbedState.OK,
    ),
    ("a lost core, at the second poll", long(works(None, **LOST_CORE), 2), ProbedState.DEAD),
    ("no response", [fails()], ProbedState.UNREACHABLE),
    ("no response for long", long(fails()), ProbedState.DEAD),
    ("back after that", [*long(fails()), works()], ProbedState.OK),
    ("a front that does not respond, for a moment", [fails("timeout")], ProbedState.UNREACHABLE),
    ("the same for long", long(fails("timeout", host=host(ALL))), ProbedState.STALLED),
    ("a stop", [fails(host=host((), log=logged(STOP_LINE)))], ProbedState.UNREACHABLE),
    ("another process loads", long(fails(host=host(NEXT))), ProbedState.LOADING),
    (
        "another process loads after a death",
        [*long(works(None, **LOST_CORE), 2), *long(fails(host=host(NEXT)))],
        ProbedState.LOADING,
    ),
    ("a restarted one", [fails(), lambda engine: engine.restarts(IDLE)], ProbedState.IDLE),
    ("metrics that cannot be read", [fails("malformed", health=200)], ProbedState.OK),
    ("a failing health check", [works(health=500)], ProbedState.UNREACHABLE),
)  # fmt: skip


@pytest.mark.parametrize(
    ("polls", "state"), [case[1:] for case in STATES], ids=[case[0] for case in STATES]
)
def test_the_state_of_an_engine_that_worked_before(
    polls: Sequence[Poll], state: ProbedState
) -> None:
    assert polled(*polls).status.state is state


SIGNS: Mapping[str, Poll] = {
    "a response": fails("http_status", health=503),
    "a health check alone": fails("timeout", health=503),
    "a process": fails(host=host(ALL)),
    "a line of its log": fails(host=host(log=logged(STOP_LINE))),
}


@pytest.mark.parametrize("sign", SIGNS.values(), ids=SIGNS)
def test_a_first_start_loads_however_long_it_takes(sign: Poll) -> None:
    engine = polled(*long(fails(), 100), sign, engine=PolledEngine())
    since = engine.status.since
    polled(*long(fails(), 1000), engine=engine)
    status = engine.status
    assert (status.state, status.since) == (ProbedState.LOADING, since)
    assert ENGINE_STATES[status.state].alive


@pytest.mark.parametrize("poll", [fails(), fails("timeout"), fails(host=host((), log=logged()))])
def test_an_address_where_no_engine_ever_was_is_unreachable_and_never_dead(poll: Poll) -> None:
    status = polled(*long(poll, 1000), engine=PolledEngine()).status
    assert status.state is ProbedState.UNREACHABLE
    assert ENGINE_STATES[status.state].alive


def test_an_engine_that_sends_metrics_before_it_is_healthy_loads() -> None:
    """SGLang does."""
    starting = PolledEngine(dialect="sglang")
    assert polled(works(IDLE, health=503), engine=starting).status.state is ProbedState.LOADING
    assert polled(works(IDLE), engine=starting).status.state is ProbedState.IDLE
    assert polled(works(health=503), engine=starting).status.state is ProbedState.UNREACHABLE


def test_a_core_that_computes_behind_a_busy_front_is_never_dead() -> None:
    engine, spent_s = engine_in_use(), 0.0
    for _ in range(100):
        spent_s += 5.0
        engine.fails("timeout", host=host([FRONT, replace(CORE, cpu_s=spent_s)]))
        assert ENGINE_STATES[engine.status.state].alive, engine.status


def test_a_suspected_death_or_hang_is_not_reported_as_one() -> None:
    """Only an event that is more than suspected ends an engine."""
    draining = PolledEngine(dialect="sglang")
    draining.works({fact.STEPS: None})
    events = [
        event
        for _ in range(20)
        for event in draining.works({fact.STEPS: None}, stalled=True, health=503)
    ]
    assert verdicts(events) == [("ENGINE_DEAD", "suspected")]
    assert draining.status.state is ProbedState.UNREACHABLE


def test_a_state_has_a_time_since_and_the_event_or_failure_behind_it() -> None:
    engine = polled(works(IDLE))
    idle_since = engine.status.since
    polled(*long(works(IDLE)), engine=engine)
    assert (engine.status.since, engine.status.why) == (idle_since, None)
    assert engine.status.read_at > idle_since
    polled(fails("timeout"), engine=engine)
    assert engine.status.since == engine.status.read_at
    assert engine.status.why == "timeout"
    polled(*long(works(None, **LOST_CORE), 2), engine=engine)
    assert (engine.status.state, engine.status.why) == (ProbedState.DEAD, "ENGINE_DEAD")


def test_the_time_until_a_state_follows_the_setting() -> None:
    patient = DetectionLimits(hang_s=600.0)
    for polls, state in ((30, ProbedState.UNREACHABLE), (500, ProbedState.DEAD)):
        engine = polled(works(), *long(fails(), polls), engine=PolledEngine(patient))
        assert engine.status.state is state


def test_only_what_a_restart_may_cure_is_not_alive() -> None:
    assert {state for state, (alive, _, _) in ENGINE_STATES.items() if not alive} == {
        ProbedState.STALLED,
        ProbedState.DEAD,
    }
    assert all(alive for alive, ready, _ in ENGINE_STATES.values() if ready)
    assert set(ENGINE_STATES) == set(ProbedState)
