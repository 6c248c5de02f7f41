"""Every metric that the agent publishes."""

from agent.catalog.efficiency_metrics import EFFICIENCY_METRICS
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metrics import AGENT_METRICS
from agent.catalog.routers import ROUTER_FACTS

METRICS = (
    *(*AGENT_METRICS, *EFFICIENCY_METRICS),
    *(*ENGINE_FACTS, *HOST_FACTS, *GPU_FACTS, *ROUTER_FACTS),
)
