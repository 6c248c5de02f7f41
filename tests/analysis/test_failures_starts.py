"""Engines that do not start, and the reasons in their logs."""

import pytest

from tests.analysis.failure_polls import (
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
    said,
)


@pytest.mark.parametrize(
    ("line", "expected"),
    [(SIZING_LINE, "SIZING_ERROR"), (OOM_LINE, "CUDA_OOM"), (CUDA_ERROR_LINE, "GPU_FAULT")],
)
def test_an_engine_that_does_not_come_up_says_why(line: str, expected: str) -> None:
    starting = PolledEngine()
    assert starting.fails(seen=host([FRONT, CORE], kills=0, log=CHATTER)) == ()
    (event,) = starting.fails(seen=host([FRONT], kills=0, log=said(line, START_FAILED_LINE)))
    assert event.kind.value == expected
    assert event.evidence["at_start"] == 1
    assert starting.fails(seen=host([], kills=0, log=said(START_FAILED_LINE))) == ()


def test_a_reason_may_come_a_poll_after_the_word_that_the_start_failed() -> None:
    starting = PolledEngine()
    assert starting.fails(seen=host([FRONT], kills=0, log=said(START_FAILED_LINE))) == ()
    events = starting.fails(seen=host([FRONT], kills=0, log=said(SIZING_LINE)))
    assert kinds(events) == ["SIZING_ERROR"]


def test_a_start_that_fails_without_a_reason_is_a_death_at_the_start() -> None:
    starting = PolledEngine()
    starting.fails(seen=host([FRONT], kills=0, log=said(START_FAILED_LINE)))
    (event,) = starting.fails(seen=host([], kills=0, log=SILENCE))
    assert (event.kind.value, event.evidence["exit_code"]) == ("ENGINE_DEAD", 1)


def test_a_sizing_line_explains_no_death_of_a_running_engine() -> None:
    engine = engine_in_use()
    events = (
        *engine.fails(seen=host([], kills=0, log=said(SIZING_LINE, FATAL_LINE))),
        *engine.fails(seen=host([], kills=0)),
    )
    assert kinds(events) == ["UNREACHABLE", "ENGINE_DEAD"]


def test_a_start_that_fails_after_a_stop_is_reported_with_its_reason() -> None:
    engine = engine_in_use()
    engine.works(seen=host(ALL, kills=0, log=said(STOP_LINE)))
    engine.works(stands=True, health=503, seen=host([FRONT], kills=0, log=SILENCE))
    engine.fails(seen=host([], kills=0, log=said(FRONT_ENDED_LINE)))
    assert engine.fails(seen=host(NEXT, kills=0, log=said(START_FAILED_LINE))) == ()
    events = engine.fails(seen=host(NEXT, kills=0, log=said(SIZING_LINE)))
    assert kinds(events) == ["SIZING_ERROR"]


def test_each_start_that_fails_is_reported() -> None:
    starting = PolledEngine()
    seen = host([FRONT], kills=0, log=said(SIZING_LINE, START_FAILED_LINE))
    first = starting.fails(seen=seen, after_s=60)
    second = starting.fails(seen=seen, after_s=60)
    assert kinds((*first, *second)) == ["SIZING_ERROR", "SIZING_ERROR"]


def test_a_start_that_fails_after_a_death_is_another_event() -> None:
    engine = engine_in_use()
    engine.fails(seen=host([], kills=0, log=said(FATAL_LINE, OOM_LINE)), after_s=60)
    seen = host([FRONT], kills=0, log=said(SIZING_LINE, START_FAILED_LINE))
    assert kinds(engine.fails(seen=seen)) == ["SIZING_ERROR"]
