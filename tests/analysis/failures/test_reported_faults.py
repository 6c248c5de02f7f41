"""Faults of GPUs, and Xids that are not faults of the GPU."""

import pytest

from agent.catalog.gpu_problems import LOST, UNSEEN
from tests.analysis.failures.polled_engine import (
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
    logged,
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
def test_which_xids_are_faults_of_the_gpu(number: int, expected: list[tuple[str, str]]) -> None:
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
        *engine.fails(host=host([], kills=0, log=logged(CUDA_ERROR_LINE, FATAL_LINE))),
        *engine.fails(host=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE"]
    assert events[0].evidence["cause"] == "GPU_FAULT"


def test_an_xid_after_a_kill_is_no_gpu_fault() -> None:
    engine = engine_in_use()
    sample = host([], kills=0, log=logged(CORE_LOST_LINE))
    events = (*engine.fails(host=sample, xids=[xid(45)]), *engine.fails(host=host([], kills=0)))
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]
    assert events[1].evidence["xids"] == f"{GPU}: 45"


def test_a_gpu_that_stays_lost_explains_no_death_long_after() -> None:
    engine = engine_in_use()
    lost = {GPU: "gpu_lost"}
    for _ in range(20):
        engine.works(problems=lost, host=host(ALL, kills=0))
    sample = host([FRONT], kills=0, log=logged(CORE_LOST_LINE))
    events = [
        *engine.works(stalled=True, health=503, host=sample, problems=lost),
        *engine.works(stalled=True, health=503, host=host([FRONT], kills=0), problems=lost),
    ]
    assert verdicts(events) == [("ENGINE_DEAD", "certain")]
    assert events[0].evidence["gpus_lost"] == f"{GPU}: gpu_lost"


def test_a_fault_before_a_restart_does_not_explain_a_death_after_it() -> None:
    engine = engine_in_use()
    engine.works(xids=[xid(79)], host=host(ALL, kills=0))
    assert kinds(engine.restarts(host=host(NEXT, kills=0))) == ["RESTART"]
    events = [
        *engine.fails(host=host([], kills=0, log=logged(CORE_LOST_LINE))),
        *engine.fails(host=host([], kills=0)),
    ]
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_an_xid_repeated_just_before_a_death_explains_it() -> None:
    engine = engine_in_use()
    for _ in range(20):
        engine.works(xids=[xid(74)], host=host(ALL, kills=0))
    events = engine.fails(host=host([], kills=0, log=logged(FATAL_LINE)))
    assert verdicts(events) == [("GPU_FAULT", "probable"), ("UNREACHABLE", "certain")]
    assert events[0].evidence["cause_line"] == f"{GPU}: Xid 74, NVLink error"


@pytest.mark.parametrize("problem", sorted(LOST))
def test_every_problem_that_means_a_lost_gpu_is_a_fault(problem: str) -> None:
    engine = engine_in_use()
    assert verdicts(engine.works(problems={GPU: problem})) == [("GPU_FAULT", "certain")]


def test_a_lost_gpu_is_reported_once_though_its_problem_changes() -> None:
    engine = engine_in_use()
    problems = ("gpu_lost", "gpu_missing", "no_gpu")
    events = [event for problem in problems for event in engine.works(problems={GPU: problem})]
    assert [event.evidence["problem"] for event in events] == ["gpu_lost"]


@pytest.mark.parametrize("problem", UNSEEN)
def test_a_gpu_that_the_agent_cannot_read_is_no_fault_and_explains_no_death(problem: str) -> None:
    engine = engine_in_use()
    unseen = {GPU: problem}
    events = [event for _ in range(3) for event in engine.works(problems=unseen)]
    sample = host([FRONT], kills=0, log=logged(CORE_LOST_LINE))
    events += engine.works(stalled=True, health=503, host=sample, problems=unseen)
    events += engine.works(stalled=True, health=503, host=host([FRONT], kills=0), problems=unseen)
    assert kinds(events) == ["ENGINE_DEAD"]
    assert "gpus_lost" not in events[0].evidence


def test_a_driver_that_blocks_its_calls_is_suspected_and_explains_no_death() -> None:
    engine = engine_in_use()
    blocked = {GPU: "not_answering"}
    events = [event for _ in range(6) for event in engine.works(problems=blocked)]
    assert events == []
    assert verdicts(engine.works(problems=blocked)) == [("GPU_FAULT", "suspected")]
    assert [event for _ in range(10) for event in engine.works(problems=blocked)] == []
    sample = host([], kills=0, log=logged(CORE_LOST_LINE))
    events = [*engine.fails(host=sample), *engine.fails(host=host([], kills=0))]
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_slow_driver_that_recovers_within_a_few_polls_is_no_fault() -> None:
    engine = engine_in_use()
    blocked = {GPU: "not_answering"}
    samples = [blocked, blocked, blocked, {}] * 10
    assert [event for problems in samples for event in engine.works(problems=problems)] == []


def test_a_gpu_that_is_lost_after_its_driver_hung_is_reported() -> None:
    engine = engine_in_use()
    for _ in range(8):
        engine.works(problems={GPU: "not_answering"})
    assert verdicts(engine.works(problems={GPU: "gpu_lost"})) == [("GPU_FAULT", "certain")]


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (1, "reset"),
        (2, "reboot"),
        (3, "drain"),
        (4, "drain and reset"),
        (6, "bus reset"),
        (7, "system reboot"),
    ],
)
def test_a_recovery_action_of_the_driver_is_reported_once(action: int, expected: str) -> None:
    engine = engine_in_use()
    events = [e for _ in range(20) for e in engine.works(recovery_actions={GPU: action})]
    assert verdicts(events) == [("GPU_FAULT", "probable")]
    assert (events[0].gpu, events[0].evidence["recovery_action"]) == (GPU, expected)


@pytest.mark.parametrize("action", [0, 5, 8])
def test_an_unknown_recovery_action_is_no_gpu_fault(action: int) -> None:
    assert engine_in_use().works(recovery_actions={GPU: action}) == ()
