"""The jobs that run on time: one look at each engine, at the GPUs, and keeping house."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler

# For the jobs that are no engine's.
_OTHER_THREADS = 4


class Jobs:
    """Runs each job in a thread, one run of it at a time; runs that were missed become one."""

    def __init__(self, engines: int, now: Callable[[], float]) -> None:
        """Each of the `engines` may be waited for without delaying another."""
        executor = ThreadPoolExecutor(engines + _OTHER_THREADS)
        self._scheduler = BackgroundScheduler(timezone=UTC, executors={"default": executor})
        self._now = now

    def every(
        self, interval_s: float, name: str, job: Callable[[float], object], *, at_once: bool = False
    ) -> None:
        """Call a job with the time, each interval; `at_once` also when the jobs start."""
        first = {"next_run_time": datetime.fromtimestamp(self._now(), UTC)} if at_once else {}
        self._scheduler.add_job(
            lambda: job(self._now()),
            "interval",
            seconds=interval_s,
            name=name,
            max_instances=1,
            coalesce=True,
            misfire_grace_time=None,
            **first,
        )

    def start(self) -> None:
        """Begin."""
        self._scheduler.start()

    async def stop(self) -> None:
        """Wait for what runs, and run nothing more."""
        if self._scheduler.running:
            await asyncio.to_thread(self._scheduler.shutdown)
