"""Delayed jobs: none is forgotten or runs too often, and all give way to senders."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo

import apscheduler.schedulers.base
import apscheduler.triggers.interval
import pytest

from agent.app import storing
from agent.app.jobs import Jobs
from agent.app.storing import Precedence
from agent.catalog.own_health import JobMiss
from agent.errors import PayloadInvalid

WITHIN_S = 60.0


@pytest.fixture
def opened() -> Iterator[threading.Event]:
    """An event that ends every waiting job, set at the end of the test at the latest."""
    released = threading.Event()
    yield released
    released.set()


class Clock:
    """The wall clock that jobs and their scheduler read; a test can set it."""

    def __init__(self) -> None:
        self.set_by_s = 0.0

    def now(self) -> float:
        return time.time() + self.set_by_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()

    class FakeDatetime(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "FakeDatetime":
            return super().now(tz) + timedelta(seconds=clock.set_by_s)

    monkeypatch.setattr(apscheduler.schedulers.base, "datetime", FakeDatetime)
    monkeypatch.setattr(apscheduler.triggers.interval, "datetime", FakeDatetime)
    return clock


@pytest.mark.parametrize("interval_s", [60.0, 3600.0])
def test_a_job_that_was_due_long_ago_runs_once(clock: Clock, interval_s: float) -> None:
    """For example after the machine slept for less than an interval, or for thirty."""
    runs: list[float] = []
    ran = threading.Event()

    def job(now: float) -> None:
        runs.append(now)
        ran.set()

    jobs = Jobs(clock.now)
    jobs.every(interval_s, "fold", job, first_in_s=0.0)
    clock.set_by_s = 1800.0
    jobs.start()
    assert ran.wait(WITHIN_S)
    # Waits for the runs of a job that is running.
    asyncio.run(jobs.stop())
    assert len(runs) == 1


class Ticks:
    """A job that signals its runs."""

    def __init__(self) -> None:
        self._ran = threading.Semaphore(0)

    def run(self, _now: float) -> None:
        self._ran.release()

    def runs_again(self, times: int = 3) -> bool:
        """Whether it runs this many more times without a long delay."""
        while self._ran.acquire(blocking=False):
            pass
        return all(self._ran.acquire(timeout=WITHIN_S) for _ in range(times))


HOUR_S, YEAR_S = 3600.0, 365 * 86400.0


@pytest.mark.parametrize("set_by_s", [-HOUR_S, HOUR_S, 40 * YEAR_S, -40 * YEAR_S])
def test_jobs_keep_running_when_the_clock_is_set_and_set_back(
    clock: Clock, set_by_s: float
) -> None:
    ticks, jobs = Ticks(), Jobs(clock.now)
    jobs.every(0.05, "ticks", ticks.run)
    jobs.start()
    assert ticks.runs_again()
    clock.set_by_s = set_by_s
    assert ticks.runs_again()
    clock.set_by_s = 0.0
    assert ticks.runs_again()
    asyncio.run(jobs.stop())


@pytest.mark.parametrize("set_by_s", [-HOUR_S, HOUR_S])
def test_jobs_that_start_together_run_apart_also_after_the_clock_was_set(
    clock: Clock, set_by_s: float
) -> None:
    """Or a request that comes while they all run would wait for all of them."""
    # Also on a busy machine, all are scheduled at one moment.
    times, ticks = iter([clock.now()] * 12), Ticks()
    jobs = Jobs(lambda: next(times, clock.now()))
    for number in range(12):
        jobs.every(0.5, f"job {number}", ticks.run, first_in_s=None if number % 3 else 0.0)
    jobs.start()
    for seconds in (0.0, set_by_s):
        clock.set_by_s = seconds
        assert ticks.runs_again(36)
        due_s = sorted(job.next_run_time.timestamp() % 0.5 for job in jobs._scheduler.get_jobs())
        due_again_s = [*due_s, due_s[0] + 0.5]
        assert min(b - a for a, b in itertools.pairwise(due_again_s)) > 0.5 / 40
    asyncio.run(jobs.stop())


def test_after_a_clock_jump_only_due_jobs_run_at_once(
    clock: Clock,
) -> None:
    due, later, ran = Ticks(), threading.Event(), Jobs(clock.now)
    ran.every(HOUR_S, "due", due.run)
    ran.every(3 * HOUR_S, "later", lambda _now: later.set())
    ran.start()
    clock.set_by_s = 2 * HOUR_S
    assert due.runs_again(1)
    asyncio.run(ran.stop())
    assert not later.is_set()


def test_blocked_jobs_delay_no_other(opened: threading.Event) -> None:
    """All jobs but one wait for a database that does not respond."""
    ticks, jobs = Ticks(), Jobs(time.time)
    for number in range(20):
        jobs.every(60.0, f"waits {number}", lambda _now: opened.wait(WITHIN_S), first_in_s=0.0)
    jobs.every(0.05, "ticks", ticks.run)
    jobs.start()
    assert ticks.runs_again()
    opened.set()
    asyncio.run(jobs.stop())


def test_a_job_delayed_by_several_intervals_catches_up_with_one_run(
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

    jobs = Jobs(time.time)
    jobs.every(0.02, "held up", held_up, first_in_s=0.0)
    jobs.every(0.02, "ticks", lambda _now: ticks.release(), first_in_s=0.0)
    jobs.start()
    for _ in range(10):
        assert ticks.acquire(timeout=WITHIN_S)
    assert begun == [0]
    opened.set()
    assert again.wait(WITHIN_S)
    assert begun == [0, 1]
    opened.set()
    asyncio.run(jobs.stop())


def test_a_job_that_is_too_slow_logs_its_skipped_runs_once(
    opened: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    ticks, jobs = Ticks(), Jobs(time.time)
    jobs.every(0.02, "poll chat", lambda _now: opened.wait(WITHIN_S), first_in_s=0.0)
    jobs.every(0.02, "ticks", ticks.run)
    jobs.start()
    assert ticks.runs_again(10)
    logged = [message for name, _, message in caplog.record_tuples if name == "agent.app.jobs"]
    opened.set()
    asyncio.run(jobs.stop())
    # On a busy machine the other job may be late, too.
    slow = [message for message in logged if message.startswith("poll chat")]
    assert slow == ["poll chat takes longer than its interval of 0.02 s: runs are skipped"]
    assert "maximum number of running instances" not in caplog.text


def test_runs_that_fail_and_runs_that_are_skipped_are_missed(opened: threading.Event) -> None:
    missed: list[tuple[str, JobMiss, int]] = []
    seen = threading.Semaphore(0)

    def miss(name: str, reason: JobMiss, runs: int) -> None:
        missed.append((name, reason, runs))
        seen.release()

    def fails(_now: float) -> None:
        raise ValueError("on purpose")

    jobs = Jobs(time.time, miss)
    jobs.every(HOUR_S, "fails", fails, first_in_s=0.0)
    jobs.every(0.05, "hangs", lambda _now: opened.wait(WITHIN_S))
    # Both reasons of both jobs are known before any run.
    assert [(name, runs) for name, _, runs in missed] == [("fails", 0)] * 2 + [("hangs", 0)] * 2
    jobs.start()
    wanted = {("fails", JobMiss.FAILED, 1), ("hangs", JobMiss.SKIPPED, 1)}
    while not wanted <= set(missed):
        assert seen.acquire(timeout=WITHIN_S)
    opened.set()
    asyncio.run(jobs.stop())
    assert {name for name, reason, _ in missed[4:] if reason is JobMiss.FAILED} == {"fails"}


def test_a_job_is_late_by_the_time_beyond_its_interval(opened: threading.Event) -> None:
    monotonic = [100.0]
    ran = threading.Event()
    jobs = Jobs(time.time, monotonic=lambda: monotonic[0])
    jobs.every(60.0, "runs", lambda _now: ran.set(), first_in_s=0.0)
    jobs.every(10.0, "waits", lambda _now: None)
    monotonic[0] = 105.0
    jobs.start()
    assert ran.wait(WITHIN_S)
    asyncio.run(jobs.stop())
    assert jobs.late_s() == {"runs": 0.0, "waits": 0.0}
    monotonic[0] = 175.0
    # The first began at 105 and was due at 165; the second was due at 110.
    assert jobs.late_s() == {"runs": 10.0, "waits": 65.0}


# Jobs give way while a sender waits

# A job that does not wait goes on within this time.
LONG_ENOUGH_S = 0.2


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "GIVES_WAY_S", WITHIN_S)


class _Job(threading.Thread):
    """A job between two slices of its work."""

    def __init__(self, senders: Precedence) -> None:
        super().__init__(daemon=True)
        self._senders = senders
        self.goes_on = threading.Event()
        self.start()

    def run(self) -> None:
        self._senders.give_way()
        self.goes_on.set()


def test_a_job_goes_on_when_the_last_sender_has_its_answer(no_limit: None) -> None:
    senders = Precedence()
    assert _Job(senders).goes_on.wait(WITHIN_S / 2)
    with pytest.raises(PayloadInvalid), senders:
        raise PayloadInvalid("not a protobuf message")
    assert _Job(senders).goes_on.wait(WITHIN_S / 2)
    with senders:
        with senders:
            job = _Job(senders)
        assert not job.goes_on.wait(LONG_ENOUGH_S)
    assert job.goes_on.wait(WITHIN_S / 2)


def test_senders_that_never_cease_do_not_stop_a_job() -> None:
    with Precedence() as senders:
        assert _Job(senders).goes_on.wait(WITHIN_S)
