"""Jobs that were kept from running: none is forgotten, and none runs more often for it."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from agent.app.jobs import Jobs

WITHIN_S = 60.0


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    """What lets go of every job that waits, at the latest when the test is over."""
    let_go = threading.Event()
    yield let_go
    let_go.set()


@pytest.mark.parametrize("interval_s", [60.0, 3600.0])
def test_a_job_that_was_due_long_ago_runs_once(interval_s: float) -> None:
    """As after the machine slept: for less than an interval, or for thirty of them."""
    due_since = time.time() - 1800
    runs: list[float] = []
    ran = threading.Event()

    def job(now: float) -> None:
        runs.append(now)
        ran.set()

    jobs = Jobs(0, lambda: due_since)
    jobs.every(interval_s, "fold", job, at_once=True)
    jobs.start()
    assert ran.wait(WITHIN_S)
    # Waits for the runs of a job that is running.
    asyncio.run(jobs.stop())
    assert len(runs) == 1


def test_a_job_that_is_held_up_past_several_intervals_catches_up_with_one_run(
    opened: threading.Event,
) -> None:
    begun: list[int] = []
    again = threading.Event()
    ticks = threading.Semaphore(0)

    def held_up(_now: float) -> None:
        begun.append(len(begun))
        if len(begun) > 1:
            again.set()
        opened.wait(WITHIN_S)
        if len(begun) == 1:
            opened.clear()

    jobs = Jobs(0, time.time)
    jobs.every(0.02, "held up", held_up, at_once=True)
    jobs.every(0.02, "ticks", lambda _now: ticks.release(), at_once=True)
    jobs.start()
    for _ in range(10):
        assert ticks.acquire(timeout=WITHIN_S)
    assert begun == [0]
    opened.set()
    assert again.wait(WITHIN_S)
    assert begun == [0, 1]
    opened.set()
    asyncio.run(jobs.stop())
