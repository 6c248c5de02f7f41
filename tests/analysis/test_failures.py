"""Which death an engine died, by what was seen of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.catalog import engine_facts as fact
from agent.records.event import Event
from agent.records.host import ProcessRole
from tests.analysis.failure_polls import (
    ALL,
    CHATTER,
    CORE,
    CORE_LOST_LINE,
    CUDA_ERROR_LINE,
    FATAL_LINE,
    FRONT,
    FRONT_ENDED_LINE,
    GPU,
    NEXT,
    OOM_LINE,
    SIZING_LINE,
    START_FAILED_LINE,
    STOP_LINE,
    WORKER,
    Watched,
    engine_in_use,
    host,
    kinds,
    process,
    said,
    verdicts,
    xid,
)

Story = Callable[[Watched], tuple[Event, ...]]


def core_killed_by_the_kernel(engine: Watched) -> tuple[Event, ...]:
    seen = host([FRONT], kills=1, node=1, log=said(CORE_LOST_LINE))
    return engine.works(stands=True, health=503, seen=seen)


def killed_by_the_kernel_beside_an_oom_line(engine: Watched) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=1, node=1, log=said(OOM_LINE, FATAL_LINE)))


def container_gone_with_its_cgroup(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([], node=1, log=said(count=0))),
        *engine.fails(seen=host([], node=1, log=said(count=0))),
    )


def cuda_ran_out_of_memory(engine: Watched) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=0, log=said(FATAL_LINE, OOM_LINE, CORE_LOST_LINE)))


def cuda_line_in_the_next_poll(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.works(stands=True, health=503, seen=host(ALL, kills=0, log=said(FATAL_LINE))),
        *engine.fails(seen=host([], kills=0, log=said(OOM_LINE))),
    )


def cuda_oom_beside_a_cuda_error(engine: Watched) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=0, log=said(CUDA_ERROR_LINE, OOM_LINE, FATAL_LINE)))


def cuda_error_without_an_xid(engine: Watched) -> tuple[Event, ...]:
    return engine.fails(seen=host([], kills=0, log=said(CUDA_ERROR_LINE, FATAL_LINE)))


def program_fault_on_the_gpu(engine: Watched) -> tuple[Event, ...]:
    seen = host([], kills=0, log=said(FATAL_LINE))
    return engine.fails(seen=seen, xids=[xid(31)])


def core_killed_by_hand(engine: Watched) -> tuple[Event, ...]:
    log = said(CORE_LOST_LINE, FRONT_ENDED_LINE)
    return (
        *engine.fails(seen=host([], kills=0, node=0, log=log)),
        *engine.fails(seen=host([], kills=0, node=0, log=said(count=0))),
    )


def core_killed_by_hand_and_no_log(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0, node=0)),
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0, node=0)),
    )


def front_killed_by_hand(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([CORE], kills=0, node=0, log=said(count=0))),
        *engine.fails(seen=host([CORE], kills=0, node=0, log=said(count=0))),
    )


def core_killed_and_its_worker_left_behind(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([WORKER], kills=0, node=0)),
        *engine.fails(seen=host([WORKER], kills=0, node=0)),
    )


def everything_killed_and_the_log_silent(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([], kills=0, node=0, log=said(count=0))),
        *engine.fails(seen=host([], kills=0, node=0, log=said(count=0))),
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
    told = [verdict for verdict in verdicts(story(engine)) if verdict[0] != "UNREACHABLE"]
    assert told == expected
    quiet = host([], kills=None, log=said(count=0))
    assert [event for _ in range(20) for event in engine.fails(seen=quiet) if _] == []


def stopped_as_it_should(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE))),
        *engine.fails(seen=host([FRONT], kills=0, log=said(FRONT_ENDED_LINE))),
        *engine.fails(seen=host([], kills=0, log=said(count=0))),
    )


def stopped_between_two_polls(engine: Watched) -> tuple[Event, ...]:
    log = said(STOP_LINE, CORE_LOST_LINE, FRONT_ENDED_LINE)
    return (
        *engine.fails(seen=host([], kills=0, log=log)),
        *engine.fails(seen=host([], kills=0, log=said(count=0))),
    )


def stopped_slowly_with_its_core_gone_first(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.works(stands=True, seen=host([FRONT], kills=0, log=said(STOP_LINE))),
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=CHATTER)),
        *engine.fails(seen=host([], kills=0, log=said(FRONT_ENDED_LINE))),
    )


def gone_without_an_error_and_no_log(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([], kills=0, node=0)),
        *engine.fails(seen=host([], kills=0, node=0)),
    )


def gone_with_a_worker_a_moment_later(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.fails(seen=host([WORKER], kills=0, node=0)),
        *engine.fails(seen=host([], kills=0, node=0)),
    )


def gone_with_the_front_saying_goodbye(engine: Watched) -> tuple[Event, ...]:
    """The line that tells of the stop is of a level that the operator does not log."""
    return (
        *engine.fails(seen=host([], kills=0, log=said(FRONT_ENDED_LINE))),
        *engine.fails(seen=host([], kills=0, log=said(count=0))),
    )


def cut_off_by_the_network(engine: Watched) -> tuple[Event, ...]:
    seen = host(ALL, kills=0, log=said(count=0))
    return (*engine.fails(seen=seen), *engine.fails(seen=seen))


def out_of_memory_while_it_stops(engine: Watched) -> tuple[Event, ...]:
    return (
        *engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE))),
        *engine.fails(seen=host([], kills=0, log=said(OOM_LINE, FATAL_LINE, FRONT_ENDED_LINE))),
    )


def cut_off_by_the_network_after_an_out_of_memory_line(engine: Watched) -> tuple[Event, ...]:
    seen = host(ALL, kills=0, log=said(OOM_LINE))
    return (*engine.fails(seen=seen), *engine.fails(seen=host(ALL, kills=0, log=CHATTER)))


def killed_after_it_was_told_to_stop(engine: Watched) -> tuple[Event, ...]:
    """As a supervisor does whose patience ended."""
    return (
        *engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE))),
        *engine.fails(seen=host([CORE], kills=0, log=said(count=0), node=0)),
        *engine.fails(seen=host([], kills=0, log=said(count=0), node=0)),
    )


@pytest.mark.parametrize(
    "story",
    [
        stopped_as_it_should,
        stopped_between_two_polls,
        stopped_slowly_with_its_core_gone_first,
        gone_without_an_error_and_no_log,
        gone_with_a_worker_a_moment_later,
        gone_with_the_front_saying_goodbye,
        cut_off_by_the_network,
        out_of_memory_while_it_stops,
        cut_off_by_the_network_after_an_out_of_memory_line,
        killed_after_it_was_told_to_stop,
    ],
)
def test_what_is_no_crash_is_only_unreachable(story: Story) -> None:
    engine = engine_in_use()
    assert kinds(story(engine)) == ["UNREACHABLE"]
    quiet = host([], kills=0, node=0, log=said(count=0) if engine.watching.front_ended else None)
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


def test_an_out_of_memory_line_explains_no_death_half_a_minute_later() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(OOM_LINE)), after_s=31)
    events = (
        *engine.fails(seen=host([], kills=0, log=said(CORE_LOST_LINE))),
        *engine.fails(seen=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_health_check_that_never_held_says_nothing_of_a_death() -> None:
    starting = Watched()
    assert [e for _ in range(5) for e in starting.works(health=503, seen=host(ALL))] == []


def test_a_death_that_only_the_health_check_shows_is_told_of_at_the_second_poll() -> None:
    engine = Watched()
    engine.works()
    assert engine.works(stands=True, health=503) == ()
    assert verdicts(engine.works(stands=True, health=503)) == [("ENGINE_DEAD", "certain")]


def test_a_health_check_that_failed_once_is_no_death() -> None:
    engine = Watched()
    events = (*engine.works(), *engine.works(health=503), *engine.works(), *engine.works())
    assert events == ()


@pytest.mark.parametrize(
    ("line", "expected"),
    [(SIZING_LINE, "SIZING_ERROR"), (OOM_LINE, "CUDA_OOM"), (CUDA_ERROR_LINE, "GPU_FAULT")],
)
def test_an_engine_that_does_not_come_up_says_why(line: str, expected: str) -> None:
    starting = Watched()
    assert starting.fails(seen=host([FRONT, CORE], kills=0, log=CHATTER)) == ()
    (event,) = starting.fails(seen=host([FRONT], kills=0, log=said(line, START_FAILED_LINE)))
    assert event.kind.value == expected
    assert event.evidence["at_start"] == 1
    assert starting.fails(seen=host([], kills=0, log=said(START_FAILED_LINE))) == ()


def test_a_reason_may_come_a_poll_after_the_word_that_the_start_failed() -> None:
    starting = Watched()
    assert starting.fails(seen=host([FRONT], kills=0, log=said(START_FAILED_LINE))) == ()
    events = starting.fails(seen=host([FRONT], kills=0, log=said(SIZING_LINE)))
    assert kinds(events) == ["SIZING_ERROR"]


def test_a_start_that_fails_for_no_reason_told_is_a_death_at_the_start() -> None:
    starting = Watched()
    starting.fails(seen=host([FRONT], kills=0, log=said(START_FAILED_LINE)))
    (event,) = starting.fails(seen=host([], kills=0, log=said(count=0)))
    assert (event.kind.value, event.evidence["exit_code"]) == ("ENGINE_DEAD", 1)


def test_a_sizing_line_explains_no_death_of_a_running_engine() -> None:
    engine = engine_in_use()
    events = (
        *engine.fails(seen=host([], kills=0, log=said(SIZING_LINE, FATAL_LINE))),
        *engine.fails(seen=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_start_that_fails_after_a_stop_is_told_of_with_its_reason() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE)))
    engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=said(count=0)))
    engine.fails(seen=host([], kills=0, log=said(FRONT_ENDED_LINE)))
    assert engine.fails(seen=host(NEXT, kills=0, log=said(START_FAILED_LINE))) == ()
    events = engine.fails(seen=host(NEXT, kills=0, log=said(SIZING_LINE)))
    assert kinds(events) == ["SIZING_ERROR"]


def test_each_start_that_fails_is_told_of() -> None:
    starting = Watched()
    seen = host([FRONT], kills=0, log=said(SIZING_LINE, START_FAILED_LINE))
    first = starting.fails(seen=seen, after_s=60)
    second = starting.fails(seen=seen, after_s=60)
    assert kinds((*first, *second)) == ["SIZING_ERROR", "SIZING_ERROR"]


def test_a_start_that_fails_after_a_death_is_another_event() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=0, log=said(FATAL_LINE, OOM_LINE)), after_s=60)
    seen = host([FRONT], kills=0, log=said(SIZING_LINE, START_FAILED_LINE))
    assert kinds(engine.fails(seen=seen)) == ["SIZING_ERROR"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (79, [("GPU_FAULT", "certain")]),
        (48, [("GPU_FAULT", "certain")]),
        (94, [("GPU_FAULT", "certain")]),
        (99999, [("GPU_FAULT", "probable")]),
        (13, []),
        (31, []),
        (43, []),
        (45, []),
        (63, []),
        (154, []),
    ],
)
def test_an_xid_is_a_fault_of_the_gpu_or_it_is_not(
    number: int, expected: list[tuple[str, str]]
) -> None:
    engine = engine_in_use()
    events = engine.works(xids=[xid(number)])
    assert verdicts(events) == expected
    assert all(event.gpu == GPU and event.evidence["xid"] == number for event in events)


def test_an_xid_that_repeats_is_one_fault() -> None:
    engine = engine_in_use()
    events = [event for _ in range(10) for event in engine.works(xids=[xid(74), xid(74)])]
    assert kinds(events) == ["GPU_FAULT"]


def test_an_xid_explains_the_death_that_follows() -> None:
    engine = engine_in_use()
    assert kinds(engine.works(xids=[xid(79)])) == ["GPU_FAULT"]
    events = (
        *engine.fails(seen=host([], kills=0, log=said(CUDA_ERROR_LINE, FATAL_LINE))),
        *engine.fails(seen=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE"]
    assert events[0].evidence["cause"] == "GPU_FAULT"


def test_a_lost_gpu_is_told_of_once_while_it_is_lost() -> None:
    engine = engine_in_use()
    events = [event for _ in range(20) for event in engine.works(problems={GPU: "gpu_lost"})]
    assert verdicts(events) == [("GPU_FAULT", "certain")]
    assert (events[0].gpu, events[0].evidence["problem"]) == (GPU, "gpu_lost")


def test_an_xid_that_follows_a_kill_blames_no_gpu() -> None:
    engine = engine_in_use()
    seen = host([], kills=0, log=said(CORE_LOST_LINE))
    events = (*engine.fails(seen=seen, xids=[xid(45)]), *engine.fails(seen=host([], kills=0)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]
    assert events[1].evidence["xids"] == f"{GPU}: 45"


def test_a_restart_tells_for_how_long_the_engine_was_gone() -> None:
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
    engine = Watched()
    engine.hides_its_start()
    engine.works(seen=host(ALL))
    assert verdicts(engine.works(seen=host(NEXT))) == [("RESTART", "certain")]


def test_a_pid_that_was_given_out_again_is_another_process() -> None:
    engine = Watched()
    engine.hides_its_start()
    engine.works(seen=host(ALL))
    reused = [replace(process, started_after_boot_s=99.0) for process in ALL]
    assert verdicts(engine.works(seen=host(reused))) == [("RESTART", "certain")]


def test_a_death_that_the_restart_outran_is_told_of_with_it() -> None:
    engine = engine_in_use()
    seen = host(NEXT, kills=0, log=said(CORE_LOST_LINE, FRONT_ENDED_LINE))
    assert kinds(engine.restarts(seen=seen)) == ["ENGINE_DEAD", "RESTART"]


def test_a_restart_after_a_stop_tells_that_it_was_one() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=0, log=said(STOP_LINE)))
    (event,) = engine.restarts(seen=host(NEXT, kills=0))
    assert event.evidence["stop_line"] == STOP_LINE


def test_an_engine_that_comes_back_without_a_restart_can_be_lost_again() -> None:
    engine = Watched()
    engine.works()
    events = (*engine.fails("timeout"), *engine.works(), *engine.fails("timeout"))
    assert kinds(events) == ["UNREACHABLE", "UNREACHABLE"]


def test_a_page_that_cannot_be_read_is_not_unreachable() -> None:
    engine = engine_in_use()
    assert engine.fails("not_text") == ()


def test_an_engine_that_was_never_seen_is_not_lost() -> None:
    assert Watched().fails() == ()


def test_a_death_holds_the_last_sample_before_it() -> None:
    engine = Watched()
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


def test_a_line_of_an_earlier_life_explains_no_later_death() -> None:
    engine = engine_in_use()
    assert "CUDA_OOM" in kinds(engine.fails(seen=host([], log=said(OOM_LINE, FATAL_LINE))))
    engine.restarts(seen=host(NEXT, log=CHATTER))
    events = (
        *engine.fails(seen=host([], log=said(CORE_LOST_LINE))),
        *engine.fails(seen=host([], log=said(count=0))),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_helper_of_the_engine_is_no_victim() -> None:
    engine = Watched()
    helper = process(ProcessRole.OTHER, 13)
    engine.works(seen=host([*ALL, helper], kills=0))
    events = (*engine.works(seen=host(ALL, kills=1)), *engine.works(seen=host(ALL, kills=1)))
    assert verdicts(events) == [("HOST_OOM", "suspected")]


def test_a_core_that_is_gone_for_two_polls_while_its_front_lives_is_a_probable_death() -> None:
    engine = Watched()
    engine.works(health=None, seen=host(ALL))
    events = [engine.works(stands=True, health=None, seen=host([FRONT])) for _ in range(5)]
    assert [verdicts(told) for told in events] == [[], [("ENGINE_DEAD", "probable")], [], [], []]


def test_an_engine_that_goes_on_computing_did_not_die_whatever_the_log_says() -> None:
    engine = Watched()
    engine.works(health=None)
    events = [*engine.works(health=None, seen=host(log=said(CORE_LOST_LINE)))]
    assert [*events, *engine.works(health=None), *engine.works(health=None)] == []


def test_an_outage_ends_when_the_page_is_back_though_nobody_asks_for_its_health() -> None:
    engine = Watched()
    engine.works(health=None)
    engine.fails()
    engine.works(stands=True, health=None, after_s=100)
    (event,) = engine.restarts()
    assert event.evidence["gone_s"] == 100


def test_an_engine_whose_log_never_spoke_may_have_stopped() -> None:
    engine = Watched()
    engine.works(seen=host(ALL, kills=0, log=said(count=0)))
    silent = host([], kills=0, log=said(count=0))
    assert kinds([e for _ in range(5) for e in engine.fails(seen=silent)]) == ["UNREACHABLE"]


def test_an_engine_that_says_nothing_of_its_stops_may_have_stopped() -> None:
    engine = Watched(dialect="tgi")
    engine.works(seen=host(ALL, kills=0, log=CHATTER))
    silent = host([], kills=0, log=said(count=0))
    assert kinds([e for _ in range(5) for e in engine.fails(seen=silent)]) == ["UNREACHABLE"]


def test_a_death_that_only_silence_shows_is_suspected_where_no_process_can_be_seen() -> None:
    engine = Watched()
    engine.works(seen=host(log=CHATTER))
    silent = host(log=said(count=0))
    events = [event for _ in range(5) for event in engine.fails(seen=silent)]
    assert verdicts(events) == [("UNREACHABLE", "certain"), ("ENGINE_DEAD", "suspected")]


def test_a_container_s_kill_may_be_counted_a_poll_before_the_engine_is_missed() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, node=1, log=CHATTER))
    events = engine.fails(seen=host([], node=1, log=said(CORE_LOST_LINE)))
    assert ("HOST_OOM", "probable") in verdicts(events)


def test_a_death_is_told_of_when_the_engine_is_back_before_the_second_poll() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=0, log=said(CORE_LOST_LINE)), after_s=7)
    events = engine.restarts(seen=host(NEXT, kills=0))
    assert kinds(events) == ["ENGINE_DEAD", "RESTART"]
    assert events[1].evidence["gone_s"] == 7


def test_a_new_engine_whose_health_check_does_not_hold_yet_is_starting() -> None:
    engine = engine_in_use()
    engine.fails()
    events = [event for _ in range(4) for event in engine.fails("http_status", health=503)]
    events += engine.restarts(health=503)
    events += [event for _ in range(4) for event in engine.works(health=503)]
    assert kinds(events) == ["RESTART"]


def test_an_engine_that_came_back_from_a_stop_unnoticed_can_die() -> None:
    engine = engine_in_use()
    engine.fails(seen=host(log=said(STOP_LINE)))
    assert engine.works(seen=host(log=CHATTER)) == ()
    events = (*engine.fails(seen=host(log=said(CORE_LOST_LINE))), *engine.fails(seen=host()))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_what_happened_is_told_worst_first() -> None:
    engine = engine_in_use()
    asleep = {fact.AWAKE: 0, fact.PREEMPTIONS: 3}
    assert kinds(engine.works(asleep, xids=[xid(79)])) == ["GPU_FAULT", "KV_PRESSURE", "SLEEP"]
