"""The part of the agent that stores: the receiver of spans over HTTP, the writer, and its jobs.

Its jobs run each second, so that kills and outages come while it folds.
The argument is the file with the settings; the file `clock` beside it sets the clock.
"""

import asyncio
import gc
import sys
from collections.abc import Callable
from pathlib import Path

from agent.analysis.verdicts import Judge
from agent.app.jobs import Jobs
from agent.app.listeners import ConnectionLimits, Listeners, raise_descriptors
from agent.app.storing import EXPIRE_EVERY_S, MEASURE_EVERY_S, AgentStore
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.request_pipeline import RequestPipeline
from agent.settings import Settings, load
from agent.sources.engines.directory import EngineDirectory
from agent.sources.otlp.receiver import Receiver
from agent.sources.otlp.span_reader import SpanReader
from agent.store.claim import AgentState
from tests.real_parts.settable_clock import SettableClock

_SOON_S = 1.0


class _JobsOfNewRows(Jobs):
    """Jobs every second, so that some run in a test.

    Those on old rows are left out: each start would run one, and there are no such rows.
    """

    def every(
        self,
        interval_s: float,
        name: str,
        job: Callable[[float], object],
        *,
        first_in_s: float | None = None,
    ) -> None:
        """Schedule a job on new rows."""
        if interval_s < EXPIRE_EVERY_S and interval_s != MEASURE_EVERY_S:
            super().every(min(interval_s, _SOON_S), name, job, first_in_s=first_in_s)


async def store_until_killed(settings: Settings, now: Callable[[], float]) -> None:
    """Receive and store; never returns."""
    objectives = settings.all_objectives()
    directory = EngineDirectory((engine.name, engine.url) for engine in settings.engines)
    meter = Meter(objectives, [engine.name for engine in settings.engines], directory.is_served)
    store = AgentStore(settings, meter, now, AgentState())
    judge = Judge(objectives)
    pipeline = RequestPipeline(judge, store.writer(judge), meter)
    reader = SpanReader(directory.identify, settings.name)
    receiver = Receiver(reader, pipeline.accept, None, meter, now)
    listeners = Listeners(settings, ConnectionLimits(raise_descriptors(), meter.client_cut))
    await listeners.receive(receiver)
    jobs = _JobsOfNewRows(now)
    store.schedule(jobs)
    jobs.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    # As the agent does: a search among the imports would copy their memory.
    gc.freeze()
    gc.disable()
    config = Path(sys.argv[1])
    clock = SettableClock(config.with_name("clock"))
    clock.rules_jobs()
    asyncio.run(store_until_killed(load(config, {}), clock.now))
