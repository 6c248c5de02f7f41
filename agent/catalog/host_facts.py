"""The metrics of the machine that an engine runs on, one row each.

Two agents on one machine publish the same numbers; MAX merges them into one.
"""

from agent.catalog.metric import Kind, Merge, Metric, Unit

CPU = Metric(
    name="llm_engine_cpu_seconds",
    kind=Kind.COUNTER,
    unit=Unit.SECONDS,
    labels=("engine", "role"),
    merge=Merge.MAX,
    help="CPU time of the engine's processes by what they do: front takes requests, core computes.",
)
MEMORY_USAGE = Metric(
    name="llm_engine_memory_usage_bytes",
    kind=Kind.GAUGE,
    unit=Unit.BYTES,
    labels=("engine",),
    merge=Merge.MAX,
    help="Host memory in use in the engine's cgroup, page cache included.",
)
MEMORY_LIMIT = Metric(
    name="llm_engine_memory_limit_bytes",
    kind=Kind.GAUGE,
    unit=Unit.BYTES,
    labels=("engine",),
    merge=Merge.MAX,
    help="Host memory that the engine's cgroup may use at most.",
)
OOM_KILLS = Metric(
    name="llm_engine_oom_kills",
    kind=Kind.COUNTER,
    labels=("engine",),
    merge=Merge.MAX,
    help="Processes that the kernel killed for want of memory in the engine's cgroup.",
)

HOST_FACTS: tuple[Metric, ...] = (CPU, MEMORY_USAGE, MEMORY_LIMIT, OOM_KILLS)
