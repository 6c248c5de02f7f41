"""Engines that fail to start, and the reasons in their logs."""

import pytest

from tests.analysis.failures.polled_engine import (
    ALL,
    CHATTER,
    CORE,
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
    PolledEngine,
    engine_in_use,
    host,
    kinds,
    logged,
)


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
