"""The figures that an event is shown with."""

from agent.analysis.failures.poll import Evidence, Poll
from agent.analysis.failures.signs import Signs
from agent.analysis.failures.state import Watching
from agent.catalog.failure_lines import LineMeaning


def of_death(poll: Poll, before: Watching, signs: Signs) -> Evidence:
    """What was seen of a death: what is unknown is left out, less the last sample's own figures."""
    told: dict[str, str | float | None] = {
        "page": poll.failure,
        "health": poll.health,
        "processes_gone": ", ".join(signs.lost) or None,
        "log_line": signs.death_line,
        "exit_code": signs.exit_code,
        "last_scheduler_stats": signs.clue(LineMeaning.LAST_STATS),
        "xids": ", ".join(f"{seen.gpu}: {seen.xid}" for seen in poll.xids) or None,
        "gpus_lost": ", ".join(f"{gpu}: {why}" for gpu, why in poll.gpu_problems.items()) or None,
        **memory(signs),
        **poll.gpu_figures,
    }
    return before.last_figures() | {
        name: value for name, value in told.items() if value is not None
    }


def memory(signs: Signs) -> dict[str, str | float | None]:
    """What the engine's cgroup told last."""
    if signs.cgroup is None:
        return {}
    return {
        "cgroup": signs.cgroup.path,
        "cgroup_oom_kills": signs.cgroup.oom_kills,
        "memory_usage_bytes": signs.cgroup.usage_bytes,
        "memory_limit_bytes": signs.cgroup.limit_bytes,
    }
