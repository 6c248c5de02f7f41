"""The engines of one agent: what looks at each, and who is told."""

from agent.analysis.failures import Limits
from agent.app.gpus import Gpus
from agent.outputs.prometheus.hosts import HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.engine_limits import EngineLimits
from agent.pipeline.engines import EnginePipeline
from agent.pipeline.rounds import EngineRounds
from agent.records.host import HostSighting
from agent.settings import EngineSettings
from agent.sources.engines.directory import EngineDirectory
from agent.sources.engines.fetch import open_session
from agent.sources.engines.health import HealthProbe
from agent.sources.engines.watch import EngineSinks, EngineWatch
from agent.sources.host.watch import HostWatch
from agent.store.keeping import Keeper


class Rounds:
    """Makes the rounds over engines that share a store, a page and a machine's GPUs."""

    def __init__(self, keeper: Keeper, meter: Meter, gpus: Gpus, hosts: HostBoard) -> None:
        self._keeper = keeper
        self._meter = meter
        self._gpus = gpus
        self._hosts = hosts

    def over(self, engine: EngineSettings, directory: EngineDirectory) -> EngineRounds:
        """The rounds over one engine."""
        pipeline = EnginePipeline(self._keeper, self._meter)
        limits = EngineLimits(engine.limits.by_fact())
        session = open_session()

        def seen(name: str, sighting: HostSighting) -> None:
            limits.sighting(sighting)
            self._hosts.sighting(name, sighting)

        page = EngineWatch(
            name=engine.name,
            url=engine.url,
            kind=engine.kind,
            session=session,
            directory=directory,
            sinks=EngineSinks(
                on_sample=lambda sample: pipeline.sample(limits.added_to(sample)),
                on_failure=self._meter.scrape_failed,
            ),
        )
        host = HostWatch(
            url=engine.url, pids=engine.pids, log=engine.log, same_machine=engine.same_machine
        )
        return EngineRounds(
            engine.name,
            page=page,
            health=HealthProbe(engine.url, session).status,
            host=host,
            gpus=self._gpus.links,
            limits=Limits(hang_s=engine.hang_after),
            on_host=seen,
            on_event=pipeline.event,
        )
