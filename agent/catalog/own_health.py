"""The agent's own health: its metrics, its stages and queues, and when each is in trouble."""

from collections.abc import Mapping
from enum import StrEnum

from agent.catalog.metric import Merge, Metric, Unit, counter, gauge
from agent.catalog.time_units import MINUTE_S

# The status of a part without a problem.
OK = "ok"
# The status of a part that the settings leave out.
NOT_CONFIGURED = "not configured"


class Stage(StrEnum):
    """A part of the agent's work that can fall behind."""

    COMMIT = "commit"
    FORWARD = "forward"
    FOLD = "fold"
    EXPLAIN = "explain"
    MINUTES = "book"
    PUSH = "push"


# From this age of its oldest work on a stage is behind. Folding and minutes begin late on purpose.
BEHIND_S: Mapping[Stage, float] = {
    Stage.COMMIT: 30.0,
    Stage.FORWARD: MINUTE_S,
    Stage.FOLD: 2 * MINUTE_S,
    Stage.EXPLAIN: 2 * MINUTE_S,
    Stage.MINUTES: 10 * MINUTE_S,
    Stage.PUSH: 2 * MINUTE_S,
}


class Queue(StrEnum):
    """Work that waits in memory with a limit."""

    COMMIT = "commit"
    EVENTS = "events"
    EXPLAIN = "explain"
    EXPORTS = "exports"
    FORWARD = "forward"
    PROXY = "proxy"
    PUSH = "push"


NEARLY_FULL = 0.8


class JobMiss(StrEnum):
    """Why a run of a job did not do its work."""

    SKIPPED = "skipped"
    FAILED = "failed"


class DiscoveryCall(StrEnum):
    """What the agent asks the API server of a cluster for."""

    LIST = "list"
    WATCH = "watch"


class DiscoveryFailure(StrEnum):
    """Why a list or a watch of pods failed.

    `gone`: the server has forgotten the changes since the last one, so the pods are listed again.
    `ended`: it ended a watch with an error.
    """

    UNREACHABLE = "unreachable"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    HTTP_STATUS = "http_status"
    NO_JSON = "no_json"
    MALFORMED = "malformed"
    GONE = "gone"
    ENDED = "ended"


STAGE_LAG = gauge(
    "llm_agent_stage_lag_seconds",
    "Age of the oldest work that a stage of the agent has not done, by stage.",
    "stage",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent="of stages without work: forward, book and push",
)
QUEUE_FILL = gauge(
    "llm_agent_queue_fill_ratio",
    "Share of the room of a queue in memory that is taken, 0 to 1, by queue.",
    "queue",
    unit=Unit.RATIO,
    merge=Merge.MAX,
    absent="of forward without otlp.forward_to, of proxy without a proxy, and of push without "
    "otlp_metrics.endpoint",
)
NEWEST_ROW = gauge(
    "llm_agent_newest_row_timestamp_seconds",
    "Unix time of the newest row that the agent stored since it started, by table.",
    "table",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent="until a row of the table is stored",
)
DATABASE_SIZE = gauge(
    "llm_agent_database_bytes",
    "Size of the database, that of all agents if they share it; measured once a minute.",
    unit=Unit.BYTES,
    merge=Merge.MAX,
    absent="until it was measured, and while it is away",
)
UNREADABLE_ROWS = counter(
    "llm_agent_unreadable_rows",
    "Rows of the database that cannot be read and are left out of everything, by table.",
    "table",
)
JOB_LATE = gauge(
    "llm_agent_job_late_seconds",
    "How long a scheduled job is overdue: since its last run began, beyond its interval.",
    "job_name",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
)
JOB_MISSES = counter(
    "llm_agent_job_misses",
    "Runs of a scheduled job that failed, or were skipped because the one before still ran.",
    "job_name",
    "reason",
)
_NO_PUSH = "without otlp_metrics.endpoint"
METRICS_PUSHED = counter(
    "llm_agent_metrics_pushed",
    "Exports of all metrics that the OTLP endpoint accepted.",
    absent=_NO_PUSH,
)
PUSH_DROPPED = counter(
    "llm_agent_metrics_push_dropped",
    "Exports of all metrics that were dropped, by reason.",
    "reason",
    absent=_NO_PUSH,
)
PUSH_POINTS_REJECTED = counter(
    "llm_agent_metrics_push_rejected_points",
    "Points of accepted exports that the OTLP endpoint refused.",
    absent=_NO_PUSH,
)
_NO_DISCOVERY = "without engines_from.kubernetes"
DISCOVERED_ENGINES = gauge(
    "llm_agent_discovered_engines",
    "Engines found in the pods of a namespace; `all` if the agent looks in every namespace.",
    "namespace",
    merge=Merge.MAX,
    absent=_NO_DISCOVERY,
)
DISCOVERY_FAILURES = counter(
    "llm_agent_discovery_failures",
    "Lists and watches of pods that failed, by reason.",
    "namespace",
    "call",
    "reason",
    absent=_NO_DISCOVERY,
)
DISCOVERY_SUCCESS = gauge(
    "llm_agent_discovery_success_timestamp_seconds",
    "Unix time at which a list of pods succeeded, or a watch gave an event or ended in order.",
    "namespace",
    unit=Unit.SECONDS,
    merge=Merge.MAX,
    absent="without engines_from.kubernetes, and until the first list",
)

HEALTH_METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
