"""Kills by the kernel, of the engine and of other processes."""

from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    CORE_LOST_LINE,
    FATAL_LINE,
    FRONT,
    NEXT,
    OOM_LINE,
    WORKER,
    PolledEngine,
    engine_in_use,
    host,
    kinds,
    logged,
    verdicts,
)


def test_a_kill_is_certain_and_names_its_victim() -> None:
    sample = host([FRONT], kills=1, node=1, log=logged(CORE_LOST_LINE))
    (event,) = engine_in_use().works(stalled=True, health=503, host=sample)
    assert event.evidence["victims"] == "VLLM::core (11)"
    assert event.evidence["kills"] == 1
    assert event.evidence["memory_limit_bytes"] == 1000
    assert event.evidence["log_line"] == CORE_LOST_LINE


def test_a_kill_whose_victim_ends_slowly_is_reported_at_the_next_poll() -> None:
    engine = engine_in_use()
    assert engine.works(host=host(ALL, kills=1)) == ()
    events = engine.works(stalled=True, health=503, host=host([FRONT], kills=1))
    assert verdicts(events) == [("HOST_OOM", "certain")]


def test_a_kill_of_another_process_in_the_cgroup_is_only_suspected() -> None:
    engine = engine_in_use()
    events = (*engine.works(host=host(ALL, kills=1)), *engine.works(host=host(ALL, kills=1)))
    assert verdicts(events) == [("HOST_OOM", "suspected")]


def test_a_kill_is_probable_when_the_processes_are_unknown() -> None:
    engine = PolledEngine()
    engine.works(host=host(kills=0))
    events = (*engine.works(host=host(kills=1)), *engine.works(host=host(kills=1)))
    assert verdicts(events) == [("HOST_OOM", "probable")]


def test_a_kill_of_another_process_does_not_hide_the_cause_of_a_death() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=1))
    engine.works(host=host(ALL, kills=1))
    events = engine.fails(host=host([], kills=1, log=logged(FATAL_LINE, OOM_LINE)))
    assert kinds(events) == ["CUDA_OOM", "UNREACHABLE"]


def test_a_suspected_kill_is_probable_when_the_death_has_no_other_cause() -> None:
    engine = engine_in_use()
    engine.works(host=host(ALL, kills=1))
    assert verdicts(engine.works(host=host(ALL, kills=1))) == [("HOST_OOM", "suspected")]
    events = engine.fails(host=host([], kills=1, log=logged(CORE_LOST_LINE)))
    assert ("HOST_OOM", "probable") in verdicts(events)


def test_kills_before_the_first_poll_are_not_reported() -> None:
    engine = PolledEngine()
    assert engine.works(host=host(ALL, kills=5, node=9)) == ()
    assert engine.works(host=host(ALL, kills=5, node=9)) == ()


def test_a_new_cgroup_starts_its_own_count() -> None:
    engine = engine_in_use()
    events = (
        *engine.works(host=host(ALL, kills=3, inode=8)),
        *engine.works(host=host(ALL, kills=3, inode=8)),
    )
    assert events == ()


def test_a_kill_is_counted_across_polls_without_a_host_sample() -> None:
    engine = engine_in_use()
    engine.works(host=None)
    engine.works(host=host(ALL))
    events = engine.works(stalled=True, health=503, host=host([FRONT], kills=1))
    assert kinds(events) == ["HOST_OOM"]


def test_several_kills_of_one_death_are_one_event() -> None:
    engine = engine_in_use()
    events = (
        *engine.works(stalled=True, health=503, host=host([FRONT], kills=1)),
        *engine.fails(host=host([], kills=2)),
        *engine.fails(host=host([], kills=2)),
    )
    assert kinds(events) == ["HOST_OOM", "UNREACHABLE"]


def test_a_kill_after_a_restart_is_another_event() -> None:
    engine = engine_in_use()
    engine.fails(host=host([], kills=1))
    engine.restarts(host=host(NEXT, kills=1))
    assert "HOST_OOM" in kinds(engine.fails(host=host([], kills=2)))


def test_each_kill_of_repeated_starts_is_reported() -> None:
    engine = engine_in_use()
    reported = [*engine.fails(host=host([], kills=1))]
    for kills in range(1, 5):
        for _ in range(7):
            reported += engine.fails(host=host(NEXT, kills=kills))
        reported += engine.fails(host=host([], kills=kills + 1))
    assert kinds(reported) == ["HOST_OOM", "UNREACHABLE", *["HOST_OOM"] * 4]


def test_a_kill_reported_before_the_death_explains_it_during_the_next_start() -> None:
    engine = engine_in_use()
    next_front = NEXT[:1]
    reported = [*engine.works(host=host([FRONT], kills=1, log=CHATTER))]
    reported += engine.fails(host=host(next_front, kills=1, log=logged(CORE_LOST_LINE)))
    for _ in range(20):
        reported += engine.fails(host=host(next_front, kills=1, log=CHATTER))
    assert verdicts(reported) == [("HOST_OOM", "certain"), ("UNREACHABLE", "certain")]
    assert reported[1].evidence["cause"] == "HOST_OOM"


def test_a_kill_is_the_cause_of_its_outage_although_the_engine_dies_slowly() -> None:
    engine = PolledEngine()
    engine.works(host=host([*ALL, WORKER], kills=0, log=CHATTER))
    reported = [*engine.fails("timeout", host=host(ALL, kills=1, log=CHATTER), after_s=40)]
    reported += engine.fails(host=host([], log=logged(CORE_LOST_LINE)))
    reported += engine.fails(host=host([], log=CHATTER))
    assert verdicts(reported) == [("HOST_OOM", "certain"), ("UNREACHABLE", "certain")]


def test_a_kill_on_the_machine_is_ignored_when_the_cgroup_counted_none_or_is_elsewhere() -> None:
    engine = engine_in_use()
    sample = host([], kills=0, node=1, log=logged(CORE_LOST_LINE))
    events = (*engine.fails(host=sample), *engine.fails(host=host([], kills=0, node=1)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]
    elsewhere = PolledEngine()
    elsewhere.works(host=host(node=0))
    events = (*elsewhere.fails(host=host(node=1)), *elsewhere.fails(host=host(node=1)))
    assert kinds(events) == ["UNREACHABLE"]


def test_a_kill_on_the_machine_is_suspected_when_the_engine_only_disappeared() -> None:
    engine = PolledEngine()
    engine.works(host=host(ALL, node=0))
    assert verdicts(engine.fails(host=host([], node=1))) == [
        ("HOST_OOM", "suspected"),
        ("UNREACHABLE", "certain"),
    ]


def test_the_example_of_the_documentation_is_reported() -> None:
    """`docs/failures.md`: polls at 12:00:05, 12:00:10, 12:00:15 and 12:01:20."""
    engine = PolledEngine()
    assert engine.works(host=host(ALL, kills=0, log=CHATTER)) == ()
    lost = host([FRONT], kills=1, log=logged(CORE_LOST_LINE))
    (kill,) = engine.works(stalled=True, health=503, host=lost)
    (gone,) = engine.fails(host=host([], kills=1, log=CHATTER), after_s=65)
    (back,) = engine.restarts(host=host(NEXT, kills=1, log=CHATTER))
    assert verdicts([kill, gone, back]) == [
        ("HOST_OOM", "certain"),
        ("UNREACHABLE", "certain"),
        ("RESTART", "certain"),
    ]
    assert kill.evidence["victims"] == "VLLM::core (11)"
    assert gone.evidence["cause"] == "HOST_OOM"
    assert back.evidence["gone_s"] == 70
