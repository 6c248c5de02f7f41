"""The metrics of the machine that an engine runs on, one row each.

Two agents on one machine publish the same numbers; MAX merges them into one.
"""

from functools import partial

from agent.catalog.metric import Merge, Metric, Unit, counter, gauge

_UNSEEN = "if the agent does not see the engine's processes"
_NO_CGROUP = "if the agent does not see the engine's cgroup"

_gauge = partial(gauge, merge=Merge.MAX)
_counter = partial(counter, merge=Merge.MAX)

CPU = _counter(
    "llm_engine_cpu_seconds",
    "CPU time of the engine's processes by what they do: front takes requests, core computes.",
    *("engine", "role"),
    unit=Unit.SECONDS,
    absent=_UNSEEN,
)
MEMORY_USAGE = _gauge(
    "llm_engine_memory_usage_bytes",
    "Host memory in use in the engine's cgroup, page cache included.",
    "engine",
    unit=Unit.BYTES,
    absent=_NO_CGROUP,
)
MEMORY_LIMIT = _gauge(
    "llm_engine_memory_limit_bytes",
    "Host memory that the engine's cgroup may use at most.",
    "engine",
    unit=Unit.BYTES,
    absent="if the cgroup has no limit or is not seen",
)
OOM_KILLS = _counter(
    "llm_engine_oom_kills",
    "Processes in the engine's cgroup that the kernel killed because memory ran out.",
    "engine",
    absent=_NO_CGROUP,
)
EXPERT_BALANCE = _gauge(
    "llm_engine_expert_balance_ratio",
    "Mean load of the ranks' experts over the highest, 0 to 1, by vLLM's log; 1 is even.",
    "engine",
    unit=Unit.RATIO,
    absent="without engines[].log, and if its last 5 minutes have no line on expert balance",
)

HOST_FACTS: tuple[Metric, ...] = (CPU, MEMORY_USAGE, MEMORY_LIMIT, OOM_KILLS, EXPERT_BALANCE)
