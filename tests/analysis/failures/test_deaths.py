"""The cause of a death that is reported for given evidence, and engines that fail to start."""

from collections.abc import Callable

import pytest

from agent.catalog import engine_facts as fact
from agent.records.engine import LogSample, ProcessRole
from agent.records.event import Event
from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    CORE,
    CORE_LOST_LINE,
    CUDA_ERROR_LINE,
    FATAL_LINE,
    FRONT,
    FRONT_ENDED_LINE,
    NEXT,
    OOM_LINE,
    SILENCE,
    SIZING_LINE,
    START_FAILED_LINE,
    STOP_LINE,
    WORKER,
    Facts,
    PolledEngine,
    engine_in_use,
    host,
    kinds,
    logged,
    process,
    verdicts,
    xid,
)

Scenario = Callable[[PolledEngine], tuple[Event, ...]]


def core_killed_by_the_kernel(engine: PolledEngine) -> tuple[Event, ...]:
    sample = host([FRONT], kills=1, node=1, log=logged(CORE_LOST_LINE))
    return engine.works(stalled=True, health=503, host=sample)


def killed_by_the_kernel_beside_an_oom_line(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(host=host([], kills=1, node=1, log=logged(OOM_LINE, FATAL_LINE)))


def container_gone_with_its_cgroup(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(host=host([], node=1, log=SILENCE)),
        *engine.fails(host=host([], node=1, log=SILENCE)),
    )


def cuda_ran_out_of_memory(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(host=host([], kills=0, log=logged(FATAL_LINE, OOM_LINE, CORE_LOST_LINE)))


def cuda_line_in_the_next_poll(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(stalled=True, health=503, host=host(ALL, kills=0, log=logged(FATAL_LINE))),
        *engine.fails(host=host([], kills=0, log=logged(OOM_LINE))),
    )


def cuda_oom_beside_a_cuda_error(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(host=host([], kills=0, log=logged(CUDA_ERROR_LINE, OOM_LINE, FATAL_LINE)))


def cuda_error_without_an_xid(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(host=host([], kills=0, log=logged(CUDA_ERROR_LINE, FATAL_LINE)))


def program_fault_on_the_gpu(engine: PolledEngine) -> tuple[Event, ...]:
    sample = host([], kills=0, log=logged(FATAL_LINE))
    return engine.fails(host=sample, xids=[xid(31)])


def core_killed_by_a_signal(engine: PolledEngine) -> tuple[Event, ...]:
    log = logged(CORE_LOST_LINE, FRONT_ENDED_LINE)
    return (
        *engine.fails(host=host([], kills=0, node=0, log=log)),
        *engine.fails(host=host([], kills=0, node=0, log=SILENCE)),
    )


def core_killed_by_a_signal_without_a_log(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(stalled=True, health=503, host=host([FRONT], kills=0, node=0)),
        *engine.works(stalled=True, health=503, host=host([FRONT], kills=0, node=0)),
    )


def front_killed_by_a_signal(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(host=host([CORE], kills=0, node=0, log=SILENCE)),
        *engine.fails(host=host([CORE], kills=0, node=0, log=SILENCE)),
    )


def core_killed_and_its_worker_left_behind(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(host=host([WORKER], kills=0, node=0)),
        *engine.fails(host=host([WORKER], kills=0, node=0)),
    )


def all_killed_without_log_lines(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(host=host([], kills=0, node=0, log=SILENCE)),
        *engine.fails(host=host([], kills=0, node=0, log=SILENCE)),
    )


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        (core_killed_by_the_kernel, [("HOST_OOM", "certain")]),
        (killed_by_the_kernel_beside_an_oom_line, [("HOST_OOM", "certain")]),
        (container_gone_with_its_cgroup, [("HOST_OOM", "probable")]),
        (cuda_ran_out_of_memory, [("CUDA_OOM", "certain")]),
        (cuda_line_in_the_next_poll, [("CUDA_OOM", "certain")]),
        (cuda_oom_beside_a_cuda_error, [("CUDA_OOM", "certain")]),
        (cuda_error_without_an_xid, [("GPU_FAULT", "probable")]),
        (program_fault_on_the_gpu, [("GPU_FAULT", "probable")]),
        (core_killed_by_a_signal, [("ENGINE_DEAD", "certain")]),
        (core_killed_by_a_signal_without_a_log, [("ENGINE_DEAD", "certain")]),
        (front_killed_by_a_signal, [("ENGINE_DEAD", "certain")]),
        (core_killed_and_its_worker_left_behind, [("ENGINE_DEAD", "probable")]),
        (all_killed_without_log_lines, [("ENGINE_DEAD", "probable")]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_cause_of_a_death_is_reported_within_two_polls(
    scenario: Scenario, expected: list[tuple[str, str]]
) -> None:
    engine = engine_in_use()
    reported = [verdict for verdict in verdicts(scenario(engine)) if verdict[0] != "UNREACHABLE"]
    assert reported == expected
    quiet = host([], kills=None, log=SILENCE)
    assert [event for _ in range(20) for event in engine.fails(host=quiet) if _] == []


def stopped_in_order(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE))),
        *engine.fails(host=host([FRONT], kills=0, log=logged(FRONT_ENDED_LINE))),
        *engine.fails(host=host([], kills=0, log=SILENCE)),
    )


def stopped_between_two_polls(engine: PolledEngine) -> tuple[Event, ...]:
    log = logged(STOP_LINE, CORE_LOST_LINE, FRONT_ENDED_LINE)
    return (
        *engine.fails(host=host([], kills=0, log=log)),
        *engine.fails(host=host([], kills=0, log=SILENCE)),
    )


def stopped_slowly_with_its_core_gone_first(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(stalled=True, host=host([FRONT], kills=0, log=logged(STOP_LINE))),
        *engine.works(stalled=True, health=503, host=host([FRONT], kills=0, log=CHATTER)),
        *engine.fails(host=host([], kills=0, log=logged(FRONT_ENDED_LINE))),
    )


def gone_without_an_error_and_no_log(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(host=host([], kills=0, node=0)),
        *engine.fails(host=host([], kills=0, node=0)),
    )


def gone_and_its_worker_one_poll_later(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(host=host([WORKER], kills=0, node=0)),
        *engine.fails(host=host([], kills=0, node=0)),
    )


def gone_after_the_line_of_the_front(engine: PolledEngine) -> tuple[Event, ...]:
    """The operator does not log at the level of the stop line."""
    return (
        *engine.fails(host=host([], kills=0, log=logged(FRONT_ENDED_LINE))),
        *engine.fails(host=host([], kills=0, log=SILENCE)),
    )


def cut_off_by_the_network(engine: PolledEngine) -> tuple[Event, ...]:
    sample = host(ALL, kills=0, log=SILENCE)
    return (*engine.fails(host=sample), *engine.fails(host=sample))


def out_of_memory_while_it_stops(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE))),
        *engine.fails(host=host([], kills=0, log=logged(OOM_LINE, FATAL_LINE, FRONT_ENDED_LINE))),
    )


def killed_after_the_stop_line(engine: PolledEngine) -> tuple[Event, ...]:
    """A supervisor kills an engine that takes too long to stop."""
    return (
        *engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE))),
        *engine.fails(host=host([CORE], kills=0, log=SILENCE, node=0)),
        *engine.fails(host=host([], kills=0, log=SILENCE, node=0)),
    )


@pytest.mark.parametrize(
    ("scenario", "log"),
    [
        (stopped_in_order, SILENCE),
        (stopped_between_two_polls, SILENCE),
        (stopped_slowly_with_its_core_gone_first, SILENCE),
        (gone_without_an_error_and_no_log, None),
        (gone_and_its_worker_one_poll_later, None),
        (gone_after_the_line_of_the_front, SILENCE),
        (cut_off_by_the_network, None),
        (out_of_memory_while_it_stops, SILENCE),
        (killed_after_the_stop_line, SILENCE),
    ],
)
def test_an_engine_that_did_not_crash_is_only_unreachable(
    scenario: Scenario, log: LogSample | None
) -> None:
    engine = engine_in_use()
    assert kinds(scenario(engine)) == ["UNREACHABLE"]
    quiet = host([], kills=0, node=0, log=log)
    assert [event for _ in range(5) for event in engine.fails(host=quiet)] == []
    assert kinds(engine.restarts(host=host(NEXT, kills=0))) == ["RESTART"]


def test_a_lost_core_while_the_health_check_passes_is_no_death() -> None:
    engine = engine_in_use()
    smaller = host([FRONT], kills=0, log=CHATTER)
    assert [event for _ in range(5) for event in engine.works(host=smaller)] == []


def test_a_stop_line_after_a_death_line_does_not_hide_the_death() -> None:
    engine = engine_in_use()
    log = logged(CORE_LOST_LINE, STOP_LINE, FRONT_ENDED_LINE)
    events = (*engine.fails(host=host([], kills=0, log=log)), *engine.fails(host=host([], kills=0)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_out_of_memory_line_is_no_death_without_other_evidence() -> None:
    engine = engine_in_use()
    line, quiet = (host(ALL, kills=0, log=log) for log in (logged(OOM_LINE), CHATTER))
    assert (*engine.works(host=line), *engine.works(host=quiet)) == ()
    engine = engine_in_use()
    assert kinds((*engine.fails(host=line), *engine.fails(host=quiet))) == ["UNREACHABLE"]


def test_an_out_of_memory_line_explains_no_death_half_a_minute_later() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=0, log=logged(OOM_LINE)), after_s=31)
    events = (
        *engine.fails(host=host([], kills=0, log=logged(CORE_LOST_LINE))),
        *engine.fails(host=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_health_check_that_never_passed_is_no_death() -> None:
    starting = PolledEngine(dialect="sglang")
    assert [e for _ in range(5) for e in starting.works(health=503, host=host(ALL))] == []


def test_a_vllm_that_was_dead_before_the_agent_started_is_reported() -> None:
    engine = PolledEngine()
    events = [event for _ in range(5) for event in engine.works(stalled=True, health=503)]
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]


@pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm"])
def test_an_engine_that_finishes_its_requests_before_it_stops_does_not_die(dialect: str) -> None:
    engine = PolledEngine(dialect=dialect)
    events = [*engine.works(), *engine.works()]
    events += [event for _ in range(5) for event in engine.works(health=503)]
    assert kinds([*events, *engine.fails(), *engine.fails()]) == ["UNREACHABLE"]


@pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm"])
def test_an_unhealthy_and_stalled_engine_is_suspected_to_be_dead(dialect: str) -> None:
    engine = PolledEngine(dialect=dialect)
    engine.works()
    events = [event for _ in range(5) for event in engine.works(stalled=True, health=503)]
    assert verdicts(events) == [("ENGINE_DEAD", "suspected")]


def test_a_death_seen_by_the_health_check_alone_is_reported_at_the_second_poll() -> None:
    engine = PolledEngine()
    engine.works()
    assert engine.works(stalled=True, health=503) == ()
    assert verdicts(engine.works(stalled=True, health=503)) == [("ENGINE_DEAD", "certain")]


def test_a_health_check_that_failed_once_is_no_death() -> None:
    engine = PolledEngine()
    events = (*engine.works(), *engine.works(health=503), *engine.works(), *engine.works())
    assert events == ()


def test_a_death_holds_the_last_sample_before_it() -> None:
    engine = PolledEngine()
    engine.works({fact.REQUESTS_RUNNING: 7}, host=host(ALL, log=CHATTER))
    (event,) = (
        *engine.works(stalled=True, health=503, host=host([FRONT], log=logged(CORE_LOST_LINE))),
        *engine.works(stalled=True, health=503, host=host([FRONT])),
    )
    assert (event.evidence["requests_running"], event.evidence["health"]) == (7, 503)


def test_the_first_line_is_the_evidence() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=0, log=logged(OOM_LINE)))
    later = logged("torch.OutOfMemoryError: CUDA out of memory, as a later one says", FATAL_LINE)
    event = next(iter(engine.fails(host=host([], kills=0, log=later))))
    assert (event.kind.value, event.evidence["cause_line"]) == ("CUDA_OOM", OOM_LINE)


def test_a_helper_process_of_the_engine_is_no_victim() -> None:
    engine = PolledEngine()
    helper = process(ProcessRole.OTHER, 13)
    engine.works(host=host([*ALL, helper], kills=0))
    events = (*engine.works(host=host(ALL, kills=1)), *engine.works(host=host(ALL, kills=1)))
    assert verdicts(events) == [("HOST_OOM", "suspected")]


def test_a_core_missing_for_two_polls_beside_a_living_front_is_a_probable_death() -> None:
    engine = PolledEngine()
    engine.works(health=None, host=host(ALL))
    events = [engine.works(stalled=True, health=None, host=host([FRONT])) for _ in range(5)]
    assert [verdicts(each) for each in events] == [[], [("ENGINE_DEAD", "probable")], [], [], []]


def test_an_engine_that_still_computes_is_not_dead_despite_its_log() -> None:
    engine = PolledEngine()
    engine.works(health=None)
    events = [*engine.works(health=None, host=host(log=logged(CORE_LOST_LINE)))]
    assert [*events, *engine.works(health=None), *engine.works(health=None)] == []


def test_repeated_death_lines_of_a_healthy_engine_are_no_death() -> None:
    engine = engine_in_use()
    sample = host(ALL, kills=0, log=logged(OOM_LINE, CORE_LOST_LINE))
    events = [event for _ in range(5) for event in engine.works(stalled=True, host=sample)]
    assert events == []


def test_a_death_after_the_health_check_is_reported_at_the_next_poll() -> None:
    engine = engine_in_use()
    sample = host([FRONT], kills=0, log=logged(OOM_LINE, FATAL_LINE))
    assert engine.works(host=sample) == ()
    events = engine.works(stalled=True, health=503, host=host([FRONT], kills=0, log=SILENCE))
    assert verdicts(events) == [("CUDA_OOM", "certain")]
    assert events[0].evidence["log_line"] == FATAL_LINE


@pytest.mark.parametrize(
    ("dialect", "logs", "dies"),
    [
        ("vllm", [SILENCE], False),
        ("vllm", [CHATTER, CHATTER, SILENCE, SILENCE], False),
        # TGI does not log its stops.
        ("tgi", [CHATTER], False),
        # A line may come after its poll.
        ("vllm", [CHATTER, CHATTER, SILENCE], True),
    ],
)
def test_only_the_silence_of_an_engine_that_logs_often_shows_a_death(
    dialect: str, logs: list[LogSample], dies: bool
) -> None:
    engine = PolledEngine(dialect=dialect)
    for log in logs:
        engine.works(host=host(ALL, kills=0, log=log))
    no_lines = host([], kills=0, log=SILENCE)
    events = [event for _ in range(5) for event in engine.fails(host=no_lines)]
    assert kinds(events) == ["UNREACHABLE", *["ENGINE_DEAD"] * dies]


def test_a_death_seen_by_a_silent_log_alone_is_suspected_without_processes() -> None:
    engine = PolledEngine()
    engine.works(host=host(log=CHATTER))
    no_lines = host(log=SILENCE)
    events = [event for _ in range(5) for event in engine.fails(host=no_lines)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "suspected")]


def test_a_kill_of_a_container_may_be_counted_one_poll_before_the_engine_is_gone() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, node=1, log=CHATTER))
    events = engine.fails(host=host([], node=1, log=logged(CORE_LOST_LINE)))
    assert ("HOST_OOM", "probable") in verdicts(events)


def test_events_of_one_poll_are_reported_worst_first() -> None:
    engine = engine_in_use()
    asleep: Facts = {fact.AWAKE: 0, fact.PREEMPTIONS: 3}
    assert kinds(engine.works(asleep, xids=[xid(79)])) == ["GPU_FAULT", "KV_PRESSURE", "SLEEP"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [(SIZING_LINE, "SIZING_ERROR"), (OOM_LINE, "CUDA_OOM"), (CUDA_ERROR_LINE, "GPU_FAULT")],
)
def test_a_failed_start_is_reported_with_its_reason(line: str, expected: str) -> None:
    starting = PolledEngine()
    assert starting.fails(host=host([FRONT, CORE], kills=0, log=CHATTER)) == ()
    (event,) = starting.fails(host=host([FRONT], kills=0, log=logged(line, START_FAILED_LINE)))
    assert event.kind.value == expected
    assert event.evidence["at_start"] == 1
    assert starting.fails(host=host([], kills=0, log=logged(START_FAILED_LINE))) == ()


def test_a_reason_may_be_logged_one_poll_after_the_failed_start() -> None:
    starting = PolledEngine()
    assert starting.fails(host=host([FRONT], kills=0, log=logged(START_FAILED_LINE))) == ()
    events = starting.fails(host=host([FRONT], kills=0, log=logged(SIZING_LINE)))
    assert kinds(events) == ["SIZING_ERROR"]


def test_a_failed_start_without_a_reason_is_a_death() -> None:
    starting = PolledEngine()
    starting.fails(host=host([FRONT], kills=0, log=logged(START_FAILED_LINE)))
    (event,) = starting.fails(host=host([], kills=0, log=SILENCE))
    assert (event.kind.value, event.evidence["exit_code"]) == ("ENGINE_DEAD", 1)


def test_a_sizing_line_explains_no_death_of_a_running_engine() -> None:
    engine = engine_in_use()
    events = (
        *engine.fails(host=host([], kills=0, log=logged(SIZING_LINE, FATAL_LINE))),
        *engine.fails(host=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_start_that_fails_after_a_stop_is_reported_with_its_reason() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=0, log=logged(STOP_LINE)))
    engine.works(stalled=True, health=503, host=host([FRONT], kills=0, log=SILENCE))
    engine.fails(host=host([], kills=0, log=logged(FRONT_ENDED_LINE)))
    assert engine.fails(host=host(NEXT, kills=0, log=logged(START_FAILED_LINE))) == ()
    events = engine.fails(host=host(NEXT, kills=0, log=logged(SIZING_LINE)))
    assert kinds(events) == ["SIZING_ERROR"]


def test_each_start_that_fails_is_reported() -> None:
    starting = PolledEngine()
    sample = host([FRONT], kills=0, log=logged(SIZING_LINE, START_FAILED_LINE))
    first = starting.fails(host=sample, after_s=60)
    second = starting.fails(host=sample, after_s=60)
    assert kinds((*first, *second)) == ["SIZING_ERROR", "SIZING_ERROR"]


def test_a_start_that_fails_after_a_death_is_another_event() -> None:
    engine = engine_in_use()
    engine.fails(host=host([], kills=0, log=logged(FATAL_LINE, OOM_LINE)), after_s=60)
    sample = host([FRONT], kills=0, log=logged(SIZING_LINE, START_FAILED_LINE))
    assert kinds(engine.fails(host=sample)) == ["SIZING_ERROR"]
