"""Faults of GPUs, and Xids that are none."""

import pytest

from tests.analysis.failure_polls import (
    CORE_LOST_LINE,
    CUDA_ERROR_LINE,
    FATAL_LINE,
    GPU,
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
