"""Which death an engine died, by what was seen of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from agent.catalog import engine_facts as fact
from agent.records.event import Event
from tests.analysis.failure_polls import (
    ALL,
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
    host,
    kinds,
    said,
    verdicts,
    xid,
)

CHATTER = said(count=3)


def engine_in_use() -> Watched:
    """An engine with everything in view, seen at work."""
    watched = Watched()
    assert watched.works(seen=host(ALL, kills=0, node=0, log=CHATTER)) == ()
    assert watched.works(seen=host(ALL, kills=0, node=0, log=CHATTER)) == ()
    return watched


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
        killed_after_it_was_told_to_stop,
    ],
)
def test_what_is_no_crash_is_only_unreachable(story: Story) -> None:
    assert kinds(story(engine_in_use())) == ["UNREACHABLE"]


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


def test_a_kill_is_certain_and_names_its_victim() -> None:
    (event,) = core_killed_by_the_kernel(engine_in_use())
    assert event.evidence["victims"] == "VLLM::core (11)"
    assert event.evidence["kills"] == 1
    assert event.evidence["memory_limit_bytes"] == 1000
    assert event.evidence["log_line"] == CORE_LOST_LINE


def test_a_kill_whose_victim_goes_slowly_is_told_of_at_the_next_poll() -> None:
    engine = engine_in_use()
    assert engine.works(seen=host(ALL, kills=1)) == ()
    events = engine.works(stands=True, health=503, seen=host([FRONT], kills=1))
    assert verdicts(events) == [("HOST_OOM", "certain")]


def test_a_kill_of_a_neighbour_in_the_cgroup_is_only_suspected_to_be_the_engine_s() -> None:
    engine = engine_in_use()
    events = (*engine.works(seen=host(ALL, kills=1)), *engine.works(seen=host(ALL, kills=1)))
    assert verdicts(events) == [("HOST_OOM", "suspected")]


def test_a_kill_is_probable_where_the_processes_cannot_be_seen() -> None:
    engine = Watched()
    engine.works(seen=host(kills=0))
    events = (*engine.works(seen=host(kills=1)), *engine.works(seen=host(kills=1)))
    assert verdicts(events) == [("HOST_OOM", "probable")]


def test_a_neighbour_s_kill_does_not_hide_what_the_engine_died_of() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=1))
    engine.works(seen=host(ALL, kills=1))
    events = engine.fails(seen=host([], kills=1, log=said(FATAL_LINE, OOM_LINE)))
    assert kinds(events) == ["CUDA_OOM", "UNREACHABLE"]


def test_a_kill_that_was_only_near_becomes_probable_when_the_engine_dies_of_nothing_else() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=1))
    assert verdicts(engine.works(seen=host(ALL, kills=1))) == [("HOST_OOM", "suspected")]
    events = engine.fails(seen=host([], kills=1, log=said(CORE_LOST_LINE)))
    assert ("HOST_OOM", "probable") in verdicts(events)


def test_kills_before_the_first_look_are_not_news() -> None:
    engine = Watched()
    assert engine.works(seen=host(ALL, kills=5, node=9)) == ()
    assert engine.works(seen=host(ALL, kills=5, node=9)) == ()


def test_another_cgroup_counts_for_itself() -> None:
    engine = engine_in_use()
    events = (
        *engine.works(seen=host(ALL, kills=3, inode=8)),
        *engine.works(seen=host(ALL, kills=3, inode=8)),
    )
    assert events == ()


def test_a_kill_is_counted_across_looks_that_saw_nothing() -> None:
    engine = engine_in_use()
    engine.works(seen=None)
    engine.works(seen=host(ALL))
    events = engine.works(stands=True, health=503, seen=host([FRONT], kills=1))
    assert kinds(events) == ["HOST_OOM"]


def test_several_kills_of_one_death_are_one_event() -> None:
    engine = engine_in_use()
    events = (
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=1)),
        *engine.fails(seen=host([], kills=2)),
        *engine.fails(seen=host([], kills=2)),
    )
    assert kinds(events) == ["HOST_OOM", "UNREACHABLE"]


def test_a_kill_in_the_next_life_is_another_event() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=1))
    engine.restarts(seen=host(NEXT, kills=1))
    assert "HOST_OOM" in kinds(engine.fails(seen=host([], kills=2)))


def test_a_kill_on_the_machine_is_none_of_an_engine_whose_cgroup_counted_none() -> None:
    engine = engine_in_use()
    seen = host([], kills=0, node=1, log=said(CORE_LOST_LINE))
    assert kinds((*engine.fails(seen=seen), *engine.fails(seen=host([], kills=0, node=1)))) == [
        "UNREACHABLE",
        "ENGINE_DEAD",
    ]


def test_a_kill_on_the_machine_is_none_of_an_engine_elsewhere() -> None:
    engine = Watched()
    engine.works(seen=host(node=0))
    assert kinds((*engine.fails(seen=host(node=1)), *engine.fails(seen=host(node=1)))) == [
        "UNREACHABLE"
    ]


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


def test_a_sizing_line_in_a_running_engine_is_nothing() -> None:
    engine = engine_in_use()
    events = engine.fails(seen=host([], kills=0, log=said(SIZING_LINE, STOP_LINE)))
    assert kinds(events) == ["UNREACHABLE"]


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
