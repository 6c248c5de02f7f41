"""Faults of GPUs, and Xids that are none."""

import pytest

from agent.catalog.gpu_problems import LOST, UNSEEN
from agent.sources.nvml.library import REASONS
from tests.analysis.failure_polls import (
    ALL,
    CORE_LOST_LINE,
    CUDA_ERROR_LINE,
    FATAL_LINE,
    FRONT,
    GPU,
    NEXT,
    engine_in_use,
    host,
    kinds,
    said,
    verdicts,
    xid,
)


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


def test_a_lost_gpu_is_reported_once_while_it_is_lost() -> None:
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


def test_a_gpu_that_stays_lost_explains_no_death_long_after() -> None:
    engine = engine_in_use()
    lost = {GPU: "gpu_lost"}
    for _ in range(20):
        engine.works(problems=lost, seen=host(ALL, kills=0))
    seen = host([FRONT], kills=0, log=said(CORE_LOST_LINE))
    events = [
        *engine.works(stands=True, health=503, seen=seen, problems=lost),
        *engine.works(stands=True, health=503, seen=host([FRONT], kills=0), problems=lost),
    ]
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]
    assert events[0].evidence["gpus_lost"] == f"{GPU}: gpu_lost"


def test_a_fault_that_one_life_ended_with_explains_no_death_of_the_next() -> None:
    engine = engine_in_use()
    engine.works(xids=[xid(79)], seen=host(ALL, kills=0))
    assert kinds(engine.restarts(seen=host(NEXT, kills=0))) == ["RESTART"]
    events = [
        *engine.fails(seen=host([], kills=0, log=said(CORE_LOST_LINE))),
        *engine.fails(seen=host([], kills=0)),
    ]
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_xid_that_came_again_just_before_a_death_explains_it() -> None:
    engine = engine_in_use()
    for _ in range(20):
        engine.works(xids=[xid(74)], seen=host(ALL, kills=0))
    events = engine.fails(seen=host([], kills=0, log=said(FATAL_LINE)))
    assert verdicts(events) == [("GPU_FAULT", "probable"), ("UNREACHABLE", "certain")]
    assert events[0].evidence["cause_line"] == f"{GPU}: Xid 74, NVLink error"


@pytest.mark.parametrize("problem", sorted(LOST))
def test_a_gpu_that_is_gone_is_a_fault_whatever_the_word(problem: str) -> None:
    engine = engine_in_use()
    assert verdicts(engine.works(problems={GPU: problem})) == [("GPU_FAULT", "certain")]


def test_one_loss_is_reported_once_though_its_word_changes() -> None:
    engine = engine_in_use()
    words = ("gpu_lost", "gpu_missing", "no_gpu")
    events = [event for word in words for event in engine.works(problems={GPU: word})]
    assert [event.evidence["problem"] for event in events] == ["gpu_lost"]


@pytest.mark.parametrize("problem", UNSEEN)
def test_a_gpu_that_the_agent_cannot_see_is_no_fault_and_explains_nothing(problem: str) -> None:
    engine = engine_in_use()
    unseen = {GPU: problem}
    events = [event for _ in range(3) for event in engine.works(problems=unseen)]
    seen = host([FRONT], kills=0, log=said(CORE_LOST_LINE))
    events += engine.works(stands=True, health=503, seen=seen, problems=unseen)
    events += engine.works(stands=True, health=503, seen=host([FRONT], kills=0), problems=unseen)
    assert kinds(events) == ["ENGINE_DEAD"]


def test_a_driver_that_holds_its_calls_is_suspected_and_explains_nothing() -> None:
    engine = engine_in_use()
    held = {GPU: "not_answering"}
    events = [event for _ in range(6) for event in engine.works(problems=held)]
    assert events == []
    events = [event for _ in range(10) for event in engine.works(problems=held)]
    assert verdicts(events) == [("GPU_FAULT", "suspected")]
    seen = host([], kills=0, log=said(CORE_LOST_LINE))
    events = [*engine.fails(seen=seen), *engine.fails(seen=host([], kills=0))]
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_polls_that_saw_one_reading_of_a_slow_driver_make_no_fault() -> None:
    engine = engine_in_use()
    held = {GPU: "not_answering"}
    samples = [held, held, held, {}] * 10
    assert [event for problems in samples for event in engine.works(problems=problems)] == []


def test_a_driver_that_was_slow_once_is_no_fault() -> None:
    engine = engine_in_use()
    events = [*engine.works(problems={GPU: "not_answering"}), *engine.works()]
    assert [*events, *engine.works(problems={GPU: "not_answering"})] == []


def test_a_gpu_that_is_lost_after_its_driver_hung_is_reported() -> None:
    engine = engine_in_use()
    for _ in range(8):
        engine.works(problems={GPU: "not_answering"})
    assert verdicts(engine.works(problems={GPU: "gpu_lost"})) == [("GPU_FAULT", "certain")]


def test_every_word_of_nvml_for_what_cannot_be_read_is_a_loss_or_blindness() -> None:
    assert set(REASONS.values()) <= LOST | set(UNSEEN)


@pytest.mark.parametrize(
    ("action", "wanted"),
    [
        (1, "reset"),
        (2, "reboot"),
        (3, "drain"),
        (4, "drain and reset"),
        (6, "bus reset"),
        (7, "system reboot"),
    ],
)
def test_a_gpu_that_its_driver_wants_recovered_is_at_fault_once(action: int, wanted: str) -> None:
    engine = engine_in_use()
    events = [e for _ in range(20) for e in engine.works(recovery_actions={GPU: action})]
    assert verdicts(events) == [("GPU_FAULT", "probable")]
    assert (events[0].gpu, events[0].evidence["recovery_action"]) == (GPU, wanted)


@pytest.mark.parametrize("action", [0, 5, 8])
def test_a_driver_that_asks_for_nothing_that_is_known_blames_no_gpu(action: int) -> None:
    assert engine_in_use().works(recovery_actions={GPU: action}) == ()
