"""Builds what explains the missed requests of all engines."""

from collections.abc import Sequence

from agent.app.gpu_jobs import GpuJobs
from agent.app.storing import AgentStore
from agent.outputs.prometheus.meter import Meter
from agent.pipeline.explaining import MissedRequests
from agent.records.objective import Objective
from agent.settings import Settings

EXPLAIN_EVERY_S = 1.0


def missed_requests(
    settings: Settings,
    objectives: Sequence[Objective],
    store: AgentStore,
    gpus: GpuJobs,
    meter: Meter,
) -> MissedRequests:
    """What explains missed requests; a job runs it every EXPLAIN_EVERY_S."""
    return MissedRequests(
        objectives,
        [engine.name for engine in settings.engines],
        store.explanations,
        gpus=gpus.inventory.samples_of,
        on_explained=meter.explained,
        give_way=store.precedence.give_way,
    )
