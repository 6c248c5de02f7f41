"""The cause that is reported of a death, by its evidence."""

from collections.abc import Callable

import pytest

from agent.catalog import engine_facts as fact
from agent.records.event import Event
from agent.records.host import LogSample, ProcessRole
from tests.analysis.failure_polls import (
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
    STOP_LINE,
    WORKER,
    Facts,
    PolledEngine,
    engine_in_use,
    host,
    kinds,
    process,
    said,
    verdicts,
    xid,
)

Story = Callable[[PolledEngine], tuple[Event, ...]]


def core_killed_by_the_kernel(engine: PolledEngine) -> tuple[Event, ...]:
    seen = host([FRONT], kills=1, node=1, log=said(CORE_LOST_LINE))
    return engine.works(stands=True, health=503, seen=seen)


def killed_by_the_kernel_beside_an_oom_line(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=1, node=1, log=said(OOM_LINE, FATAL_LINE)))


def container_gone_with_its_cgroup(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([], node=1, log=SILENCE)),
        *engine.fails(seen=host([], node=1, log=SILENCE)),
    )


def cuda_ran_out_of_memory(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=0, log=said(FATAL_LINE, OOM_LINE, CORE_LOST_LINE)))


def cuda_line_in_the_next_poll(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(stands=True, health=503, seen=host(ALL, kills=0, log=said(FATAL_LINE))),
        *engine.fails(seen=host([], kills=0, log=said(OOM_LINE))),
    )


def cuda_oom_beside_a_cuda_error(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=0, log=said(CUDA_ERROR_LINE, OOM_LINE, FATAL_LINE)))


def cuda_error_without_an_xid(engine: PolledEngine) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=0, log=said(CUDA_ERROR_LINE, FATAL_LINE)))


def program_fault_on_the_gpu(engine: PolledEngine) -> tuple[Event, ...]:
    seen = host([], kills=0, log=said(FATAL_LINE))
    return engine.fails(seen=seen, xids=[xid(31)])


def core_killed_by_hand(engine: PolledEngine) -> tuple[Event, ...]:
    log = said(CORE_LOST_LINE, FRONT_ENDED_LINE)
    return (
        *engine.fails(seen=host([], kills=0, node=0, log=log)),
        *engine.fails(seen=host([], kills=0, node=0, log=SILENCE)),
    )


def core_killed_by_hand_and_no_log(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0, node=0)),
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0, node=0)),
    )


def front_killed_by_hand(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([CORE], kills=0, node=0, log=SILENCE)),
        *engine.fails(seen=host([CORE], kills=0, node=0, log=SILENCE)),
    )


def core_killed_and_its_worker_left_behind(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([WORKER], kills=0, node=0)),
        *engine.fails(seen=host([WORKER], kills=0, node=0)),
    )


def everything_killed_and_the_log_silent(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([], kills=0, node=0, log=SILENCE)),
        *engine.fails(seen=host([], kills=0, node=0, log=SILENCE)),
    )


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        (core_killed_by_the_kernel, [("HOST_OOM", "certain")]),
        (killed_by_the_kernel_beside_an_oom_line, [("HOST_OOM", "certain")]),
        (container_gone_with_its_cgroup, [("HOST_OOM", "probable")]),
        (cuda_ran_out_of_memory, [("CUDA_OOM", "certain")]),
        (cuda_line_in_the_next_poll, [("CUDA_OOM", "certain")]),
        (cuda_oom_beside_a_cuda_error, [("CUDA_OOM", "certain")]),
        (cuda_error_without_an_xid, [("GPU_FAULT", "probable")]),
        (program_fault_on_the_gpu, [("GPU_FAULT", "probable")]),
        (core_killed_by_hand, [("ENGINE_DEAD", "certain")]),
        (core_killed_by_hand_and_no_log, [("ENGINE_DEAD", "certain")]),
        (front_killed_by_hand, [("ENGINE_DEAD", "certain")]),
        (core_killed_and_its_worker_left_behind, [("ENGINE_DEAD", "probable")]),
        (everything_killed_and_the_log_silent, [("ENGINE_DEAD", "probable")]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_death_is_named_within_two_polls(story: Story, expected: list[tuple[str, str]]) -> None:
    engine = engine_in_use()
    reported = [verdict for verdict in verdicts(story(engine)) if verdict[0] != "UNREACHABLE"]
    assert reported == expected
    quiet = host([], kills=None, log=SILENCE)
    assert [event for _ in range(20) for event in engine.fails(seen=quiet) if _] == []


def stopped_as_it_should(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE))),
        *engine.fails(seen=host([FRONT], kills=0, log=said(FRONT_ENDED_LINE))),
        *engine.fails(seen=host([], kills=0, log=SILENCE)),
    )


def stopped_between_two_polls(engine: PolledEngine) -> tuple[Event, ...]:
    log = said(STOP_LINE, CORE_LOST_LINE, FRONT_ENDED_LINE)
    return (
        *engine.fails(seen=host([], kills=0, log=log)),
        *engine.fails(seen=host([], kills=0, log=SILENCE)),
    )


def stopped_slowly_with_its_core_gone_first(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(stands=True, seen=host([FRONT], kills=0, log=said(STOP_LINE))),
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=CHATTER)),
        *engine.fails(seen=host([], kills=0, log=said(FRONT_ENDED_LINE))),
    )


def gone_without_an_error_and_no_log(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([], kills=0, node=0)),
        *engine.fails(seen=host([], kills=0, node=0)),
    )


def gone_with_a_worker_a_moment_later(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([WORKER], kills=0, node=0)),
        *engine.fails(seen=host([], kills=0, node=0)),
    )


def gone_with_the_front_saying_goodbye(engine: PolledEngine) -> tuple[Event, ...]:
    """The operator does not log at the level of the stop line."""
    return (
        *engine.fails(seen=host([], kills=0, log=said(FRONT_ENDED_LINE))),
        *engine.fails(seen=host([], kills=0, log=SILENCE)),
    )


def cut_off_by_the_network(engine: PolledEngine) -> tuple[Event, ...]:
    seen = host(ALL, kills=0, log=SILENCE)
    return (*engine.fails(seen=seen), *engine.fails(seen=seen))


def out_of_memory_while_it_stops(engine: PolledEngine) -> tuple[Event, ...]:
    return (
        *engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE))),
        *engine.fails(seen=host([], kills=0, log=said(OOM_LINE, FATAL_LINE, FRONT_ENDED_LINE))),
    )


def killed_after_it_was_ordered_to_stop(engine: PolledEngine) -> tuple[Event, ...]:
    """As a supervisor does whose patience ended."""
    return (
        *engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE))),
        *engine.fails(seen=host([CORE], kills=0, log=SILENCE, node=0)),
        *engine.fails(seen=host([], kills=0, log=SILENCE, node=0)),
    )


@pytest.mark.parametrize(
    ("story", "log"),
    [
        (stopped_as_it_should, SILENCE),
        (stopped_between_two_polls, SILENCE),
        (stopped_slowly_with_its_core_gone_first, SILENCE),
        (gone_without_an_error_and_no_log, None),
        (gone_with_a_worker_a_moment_later, None),
        (gone_with_the_front_saying_goodbye, SILENCE),
        (cut_off_by_the_network, None),
        (out_of_memory_while_it_stops, SILENCE),
        (killed_after_it_was_ordered_to_stop, SILENCE),
    ],
)
def test_what_is_no_crash_is_only_unreachable(story: Story, log: LogSample | None) -> None:
    engine = engine_in_use()
    assert kinds(story(engine)) == ["UNREACHABLE"]
    quiet = host([], kills=0, node=0, log=log)
    assert [event for _ in range(5) for event in engine.fails(seen=quiet)] == []
    assert kinds(engine.restarts(seen=host(NEXT, kills=0))) == ["RESTART"]


def test_a_core_that_is_lost_while_the_health_check_holds_was_given_up_on_purpose() -> None:
    engine = engine_in_use()
    smaller = host([FRONT], kills=0, log=CHATTER)
    assert [event for _ in range(5) for event in engine.works(seen=smaller)] == []


def test_a_death_is_not_the_stop_that_it_leads_to() -> None:
    engine = engine_in_use()
    log = said(CORE_LOST_LINE, STOP_LINE, FRONT_ENDED_LINE)
    events = (*engine.fails(seen=host([], kills=0, log=log)), *engine.fails(seen=host([], kills=0)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_out_of_memory_line_without_a_death_is_nothing() -> None:
    engine = engine_in_use()
    events = engine.works(seen=host(ALL, kills=0, log=said(OOM_LINE)))
    assert (*events, *engine.works(seen=host(ALL, kills=0, log=CHATTER))) == ()


def test_an_out_of_memory_line_and_a_cut_network_make_no_death() -> None:
    engine = engine_in_use()
    events = (
        *engine.fails(seen=host(ALL, kills=0, log=said(OOM_LINE))),
        *engine.fails(seen=host(ALL, kills=0, log=CHATTER)),
    )
    assert kinds(events) == ["UNREACHABLE"]


def test_an_out_of_memory_line_explains_no_death_half_a_minute_later() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(OOM_LINE)), after_s=31)
    events = (
        *engine.fails(seen=host([], kills=0, log=said(CORE_LOST_LINE))),
        *engine.fails(seen=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_health_check_that_never_held_says_nothing_of_a_death() -> None:
    starting = PolledEngine(dialect="sglang")
    assert [e for _ in range(5) for e in starting.works(health=503, seen=host(ALL))] == []


def test_a_vllm_that_was_dead_when_the_agent_came_is_reported() -> None:
    engine = PolledEngine()
    events = [event for _ in range(5) for event in engine.works(stands=True, health=503)]
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]


@pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm"])
def test_an_engine_that_finishes_its_requests_before_it_stops_does_not_die(dialect: str) -> None:
    engine = PolledEngine(dialect=dialect)
    events = [*engine.works(), *engine.works()]
    events += [event for _ in range(5) for event in engine.works(health=503)]
    assert kinds([*events, *engine.fails(), *engine.fails()]) == ["UNREACHABLE"]


@pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm"])
def test_an_engine_that_is_not_well_and_stands_still_is_suspected_to_be_dead(dialect: str) -> None:
    engine = PolledEngine(dialect=dialect)
    engine.works()
    events = [event for _ in range(5) for event in engine.works(stands=True, health=503)]
    assert verdicts(events) == [("ENGINE_DEAD", "suspected")]


def test_a_death_that_only_the_health_check_shows_is_reported_at_the_second_poll() -> None:
    engine = PolledEngine()
    engine.works()
    assert engine.works(stands=True, health=503) == ()
    assert verdicts(engine.works(stands=True, health=503)) == [("ENGINE_DEAD", "certain")]


def test_a_health_check_that_failed_once_is_no_death() -> None:
    engine = PolledEngine()
    events = (*engine.works(), *engine.works(health=503), *engine.works(), *engine.works())
    assert events == ()


def test_a_death_holds_the_last_sample_before_it() -> None:
    engine = PolledEngine()
    engine.works({fact.REQUESTS_RUNNING: 7}, seen=host(ALL, log=CHATTER))
    (event,) = (
        *engine.works(stands=True, health=503, seen=host([FRONT], log=said(CORE_LOST_LINE))),
        *engine.works(stands=True, health=503, seen=host([FRONT])),
    )
    assert (event.evidence["requests_running"], event.evidence["health"]) == (7, 503)


def test_the_line_that_came_first_is_the_evidence() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(OOM_LINE)))
    later = said("torch.OutOfMemoryError: CUDA out of memory, as a later one says", FATAL_LINE)
    event = next(iter(engine.fails(seen=host([], kills=0, log=later))))
    assert (event.kind.value, event.evidence["cause_line"]) == ("CUDA_OOM", OOM_LINE)


def test_a_helper_of_the_engine_is_no_victim() -> None:
    engine = PolledEngine()
    helper = process(ProcessRole.OTHER, 13)
    engine.works(seen=host([*ALL, helper], kills=0))
    events = (*engine.works(seen=host(ALL, kills=1)), *engine.works(seen=host(ALL, kills=1)))
    assert verdicts(events) == [("HOST_OOM", "suspected")]


def test_a_core_that_is_gone_for_two_polls_while_its_front_lives_is_a_probable_death() -> None:
    engine = PolledEngine()
    engine.works(health=None, seen=host(ALL))
    events = [engine.works(stands=True, health=None, seen=host([FRONT])) for _ in range(5)]
    assert [verdicts(each) for each in events] == [[], [("ENGINE_DEAD", "probable")], [], [], []]


def test_an_engine_that_goes_on_computing_did_not_die_whatever_the_log_says() -> None:
    engine = PolledEngine()
    engine.works(health=None)
    events = [*engine.works(health=None, seen=host(log=said(CORE_LOST_LINE)))]
    assert [*events, *engine.works(health=None), *engine.works(health=None)] == []


def test_no_line_kills_an_engine_that_is_well_however_often_it_is_said() -> None:
    engine = engine_in_use()
    seen = host(ALL, kills=0, log=said(OOM_LINE, CORE_LOST_LINE))
    events = [event for _ in range(5) for event in engine.works(stands=True, seen=seen)]
    assert events == []


def test_an_engine_that_dies_after_its_health_was_asked_is_reported_at_the_next_poll() -> None:
    engine = engine_in_use()
    seen = host([FRONT], kills=0, log=said(OOM_LINE, FATAL_LINE))
    assert engine.works(seen=seen) == ()
    events = engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=SILENCE))
    assert verdicts(events) == [("CUDA_OOM", "certain")]
    assert events[0].evidence["log_line"] == FATAL_LINE


def test_an_engine_whose_log_never_spoke_may_have_stopped() -> None:
    engine = PolledEngine()
    engine.works(seen=host(ALL, kills=0, log=SILENCE))
    silent = host([], kills=0, log=SILENCE)
    assert kinds([e for _ in range(5) for e in engine.fails(seen=silent)]) == ["UNREACHABLE"]


def test_an_engine_whose_log_spoke_rarely_may_have_stopped() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=SILENCE))
    silent = host([], kills=0, log=SILENCE)
    assert kinds([e for _ in range(5) for e in engine.fails(seen=silent)]) == ["UNREACHABLE"]


def test_an_engine_that_says_nothing_of_its_stops_may_have_stopped() -> None:
    engine = PolledEngine(dialect="tgi")
    engine.works(seen=host(ALL, kills=0, log=CHATTER))
    silent = host([], kills=0, log=SILENCE)
    assert kinds([e for _ in range(5) for e in engine.fails(seen=silent)]) == ["UNREACHABLE"]


def test_a_death_that_only_silence_shows_is_suspected_where_no_process_can_be_seen() -> None:
    engine = PolledEngine()
    engine.works(seen=host(log=CHATTER))
    silent = host(log=SILENCE)
    events = [event for _ in range(5) for event in engine.fails(seen=silent)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "suspected")]


def test_a_container_s_kill_may_be_counted_a_poll_before_the_engine_is_missed() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, node=1, log=CHATTER))
    events = engine.fails(seen=host([], node=1, log=said(CORE_LOST_LINE)))
    assert ("HOST_OOM", "probable") in verdicts(events)


def test_what_happened_is_reported_worst_first() -> None:
    engine = engine_in_use()
    asleep: Facts = {fact.AWAKE: 0, fact.PREEMPTIONS: 3}
    assert kinds(engine.works(asleep, xids=[xid(79)])) == ["GPU_FAULT", "KV_PRESSURE", "SLEEP"]
