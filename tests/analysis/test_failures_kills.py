"""Kills by the kernel, of the engine and of other processes."""

from tests.analysis.failure_polls import (
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
    said,
    verdicts,
)


def test_a_kill_is_certain_and_names_its_victim() -> None:
    seen = host([FRONT], kills=1, node=1, log=said(CORE_LOST_LINE))
    (event,) = engine_in_use().works(stands=True, health=503, seen=seen)
    assert event.evidence["victims"] == "VLLM::core (11)"
    assert event.evidence["kills"] == 1
    assert event.evidence["memory_limit_bytes"] == 1000
    assert event.evidence["log_line"] == CORE_LOST_LINE


def test_a_kill_whose_victim_goes_slowly_is_reported_at_the_next_poll() -> None:
    engine = engine_in_use()
    assert engine.works(seen=host(ALL, kills=1)) == ()
    events = engine.works(stands=True, health=503, seen=host([FRONT], kills=1))
    assert verdicts(events) == [("HOST_OOM", "certain")]


def test_a_kill_of_a_neighbour_in_the_cgroup_is_only_suspected_to_be_the_engine_s() -> None:
    engine = engine_in_use()
    events = (*engine.works(seen=host(ALL, kills=1)), *engine.works(seen=host(ALL, kills=1)))
    assert verdicts(events) == [("HOST_OOM", "suspected")]


def test_a_kill_is_probable_where_the_processes_cannot_be_seen() -> None:
    engine = PolledEngine()
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


def test_kills_before_the_first_poll_are_not_news() -> None:
    engine = PolledEngine()
    assert engine.works(seen=host(ALL, kills=5, node=9)) == ()
    assert engine.works(seen=host(ALL, kills=5, node=9)) == ()


def test_another_cgroup_counts_for_itself() -> None:
    engine = engine_in_use()
    events = (
        *engine.works(seen=host(ALL, kills=3, inode=8)),
        *engine.works(seen=host(ALL, kills=3, inode=8)),
    )
    assert events == ()


def test_a_kill_is_counted_across_polls_that_read_nothing() -> None:
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


def test_each_kill_of_a_start_that_is_tried_again_and_again_is_reported() -> None:
    engine = engine_in_use()
    reported = [*engine.fails(seen=host([], kills=1))]
    for kills in range(1, 5):
        for _ in range(7):
            reported += engine.fails(seen=host(NEXT, kills=kills))
        reported += engine.fails(seen=host([], kills=kills + 1))
    assert kinds(reported) == ["HOST_OOM", "UNREACHABLE", *["HOST_OOM"] * 4]


def test_a_kill_that_was_reported_before_the_death_explains_it_in_the_next_try() -> None:
    engine = engine_in_use()
    next_front = NEXT[:1]
    reported = [*engine.works(seen=host([FRONT], kills=1, log=CHATTER))]
    reported += engine.fails(seen=host(next_front, kills=1, log=said(CORE_LOST_LINE)))
    for _ in range(20):
        reported += engine.fails(seen=host(next_front, kills=1, log=CHATTER))
    assert verdicts(reported) == [("HOST_OOM", "certain"), ("UNREACHABLE", "certain")]
    assert reported[1].evidence["cause"] == "HOST_OOM"


def test_a_kill_is_the_cause_of_the_outage_that_it_began_however_long_the_engine_takes_to_die() -> (
    None
):
    engine = PolledEngine()
    engine.works(seen=host([*ALL, WORKER], kills=0, log=CHATTER))
    reported = [*engine.fails("timeout", seen=host(ALL, kills=1, log=CHATTER), after_s=40)]
    reported += engine.fails(seen=host([], log=said(CORE_LOST_LINE)))
    reported += engine.fails(seen=host([], log=CHATTER))
    assert verdicts(reported) == [("HOST_OOM", "certain"), ("UNREACHABLE", "certain")]


def test_a_kill_on_the_machine_is_none_of_an_engine_whose_cgroup_counted_none() -> None:
    engine = engine_in_use()
    seen = host([], kills=0, node=1, log=said(CORE_LOST_LINE))
    assert kinds((*engine.fails(seen=seen), *engine.fails(seen=host([], kills=0, node=1)))) == [
        "UNREACHABLE",
        "ENGINE_DEAD",
    ]


def test_a_kill_on_the_machine_is_suspected_of_an_engine_that_only_went() -> None:
    engine = PolledEngine()
    engine.works(seen=host(ALL, node=0))
    assert verdicts(engine.fails(seen=host([], node=1))) == [
        ("HOST_OOM", "suspected"),
        ("UNREACHABLE", "certain"),
    ]


def test_a_kill_on_the_machine_is_none_of_an_engine_elsewhere() -> None:
    engine = PolledEngine()
    engine.works(seen=host(node=0))
    assert kinds((*engine.fails(seen=host(node=1)), *engine.fails(seen=host(node=1)))) == [
        "UNREACHABLE"
    ]


def test_the_example_of_the_documentation_is_what_is_reported() -> None:
    """`docs/failures.md`: polls at 12:00:05, 12:00:10, 12:00:15 and 12:01:20."""
    engine = PolledEngine()
    assert engine.works(seen=host(ALL, kills=0, log=CHATTER)) == ()
    lost = host([FRONT], kills=1, log=said(CORE_LOST_LINE))
    (kill,) = engine.works(stands=True, health=503, seen=lost)
    (gone,) = engine.fails(seen=host([], kills=1, log=CHATTER), after_s=65)
    (back,) = engine.restarts(seen=host(NEXT, kills=1, log=CHATTER))
    assert verdicts([kill, gone, back]) == [
        ("HOST_OOM", "certain"),
        ("UNREACHABLE", "certain"),
        ("RESTART", "certain"),
    ]
    assert kill.evidence["victims"] == "VLLM::core (11)"
    assert gone.evidence["cause"] == "HOST_OOM"
    assert back.evidence["gone_s"] == 70
