"""Runs periodic jobs: polls of engines and GPUs, settling, folding, expiry."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta

from apscheduler.events import EVENT_JOB_MAX_INSTANCES, EVENT_JOB_SUBMITTED, JobSubmissionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.job import Job
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from agent.catalog.own_health import JobMiss

_LOG = logging.getLogger(__name__)
# It logs each skipped run at WARNING; `Jobs` logs the first one.
_SCHEDULER_LOG = logging.getLogger(f"{__name__}.scheduler")
_SCHEDULER_LOG.setLevel(logging.ERROR)

CLOCK_CHECK_S = 1.0

# Jobs start at different moments of this time, so that an export does not wait for all of them.
_SPREAD_OVER_S = 1.0
# The fractional parts of its multiples are spread evenly, for any number of jobs: Knuth, The Art of
# Computer Programming, volume 3, section 6.4, "Fibonacci hashing".
_GOLDEN_RATIO = 0.618034

# The name of a job, why its run did nothing, and how many runs; 0 when the job is scheduled.
OnMiss = Callable[[str, JobMiss, int], None]


class Jobs:
    """Runs each job in a thread, one run of it at a time; missed runs become one.

    A changed clock delays no job by more than its interval: the scheduler waits for a time of day,
    so a thread checks whether the clock was set back.
    """

    def __init__(
        self,
        now: Callable[[], float],
        on_miss: OnMiss | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`now` gives Unix time of the system clock."""
        self._on_miss = on_miss
        self._monotonic = monotonic
        # By name: the interval, and when the last run began.
        self._intervals_s: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self._scheduler = BackgroundScheduler(timezone=UTC, logger=_SCHEDULER_LOG)
        self._scheduler.add_listener(self._skipped, EVENT_JOB_MAX_INSTANCES)
        self._scheduler.add_listener(self._submitted, EVENT_JOB_SUBMITTED)
        # For each job that is too slow: whether a run was skipped since its last one began.
        self._slow: dict[str, bool] = {}
        self._now = now
        self._stopping = threading.Event()
        self._clock_watch = threading.Thread(target=self._watch_clock, name="clock", daemon=True)

    def every(
        self,
        interval_s: float,
        name: str,
        job: Callable[[float], object],
        *,
        first_in_s: float | None = None,
    ) -> None:
        """Call a job with the time at each interval, and first after `first_in_s` or an interval.

        The first run is up to a second later or, without `first_in_s`, earlier: see _SPREAD_OVER_S.
        """
        spread_s = len(self._intervals_s) * _GOLDEN_RATIO % 1.0 * min(interval_s, _SPREAD_OVER_S)
        wait_s = interval_s - spread_s if first_in_s is None else first_in_s + spread_s
        self._intervals_s[name], self._began[name] = interval_s, self._monotonic()
        for reason in JobMiss:
            self._report_miss(name, reason, 0)
        self._scheduler.add_job(
            lambda: self._run(name, job),
            _Interval(seconds=interval_s, timezone=UTC),
            name=name,
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
            next_run_time=datetime.fromtimestamp(self._now() + wait_s, UTC),
        )

    def _run(self, name: str, job: Callable[[float], object]) -> None:
        self._began[name] = self._monotonic()
        try:
            job(self._now())
        except Exception:
            # The scheduler logs it.
            self._report_miss(name, JobMiss.FAILED, 1)
            raise

    def late_s(self) -> Mapping[str, float]:
        """By job, how long ago its last run began, less its interval; 0 while it is in time."""
        now = self._monotonic()
        return {
            name: max(now - self._began[name] - interval_s, 0.0)
            for name, interval_s in self._intervals_s.items()
        }

    def start(self) -> None:
        """Start all jobs."""
        # A thread for each job: one that waits for the database must not delay another.
        threads = max(1, len(self._scheduler.get_jobs()))
        self._scheduler.add_executor(ThreadPoolExecutor(threads))
        self._scheduler.start()
        self._clock_watch.start()

    def _report_miss(self, name: str, reason: JobMiss, runs: int) -> None:
        if self._on_miss is not None:
            self._on_miss(name, reason, runs)

    def _skipped(self, event: JobSubmissionEvent) -> None:
        job = self._scheduler.get_job(event.job_id)
        if job is not None:
            self._report_miss(job.name, JobMiss.SKIPPED, 1)
        if event.job_id not in self._slow and job is not None:
            _LOG.warning(
                "%s takes longer than its interval of %g s: runs are skipped",
                job.name,
                job.trigger.interval.total_seconds(),
            )
        self._slow[event.job_id] = True

    def _submitted(self, event: JobSubmissionEvent) -> None:
        if self._slow.pop(event.job_id, False):
            self._slow[event.job_id] = False

    def _watch_clock(self) -> None:
        while not self._stopping.wait(CLOCK_CHECK_S):
            now = datetime.fromtimestamp(self._now(), UTC)
            late = [job for job in self._scheduler.get_jobs() if _is_due_too_late(job, now)]
            if late:
                _LOG.warning("the clock was set back, and %d jobs go on from now", len(late))
            for job in late:
                due = now + (job.next_run_time - now) % job.trigger.interval
                self._scheduler.modify_job(job.id, next_run_time=due)
            # The scheduler must read the clock again, which may have been set ahead.
            self._scheduler.wakeup()

    async def stop(self) -> None:
        """Wait for running jobs, and start no more."""
        if self._scheduler.running:
            self._stopping.set()
            await asyncio.to_thread(self._clock_watch.join)
            await asyncio.to_thread(self._scheduler.shutdown)


def _is_due_too_late(job: Job, now: datetime) -> bool:
    latest: datetime = now + job.trigger.interval + timedelta(seconds=CLOCK_CHECK_S)
    return bool(job.next_run_time > latest)


class _Interval(IntervalTrigger):  # type: ignore[misc]
    """An interval without its missed runs, of which a clock set ahead by years has too many."""

    def get_next_fire_time(self, previous: datetime | None, now: datetime) -> datetime:
        due: datetime = super().get_next_fire_time(previous, now)
        missed: int = max((now - due) // self.interval, 0)
        interval: timedelta = self.interval
        return due + missed * interval
