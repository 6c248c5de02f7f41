"""Panels on the agents themselves: received, stored and forwarded data, and failures."""

from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.metric import Metric
from agent.render.dashboards.panel_parts import (
    SHOWN,
    STAT,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    gauge,
    increase,
    legend,
    rate,
    sum_by,
    total,
)
from agent.render.promql import by

# The agent's own namespace may be a label of its target; then Prometheus renames that of the pods.
_NAMESPACE = ("instance", "namespace", "exported_namespace")


def _by(label: str, metric: Metric, before: str) -> Query:
    return Query(by((label,), rate(metric)), f"{before}: {{{{{label}}}}}")


_HEALTH = (
    Panel(
        "Agents",
        "Each agent with its version; `simulated` is a demonstration without a real engine.",
        PanelUnit.NUMBER,
        (
            Query(
                by(("agent", "version", "simulated"), gauge(m.AGENT_INFO), "max"),
                "{{agent}} {{version}} simulated={{simulated}}",
            ),
        ),
        style=STAT,
    ),
    Panel(
        "What agents could not do",
        "Writes that failed, rows that cannot be read, requests that were proxied and not "
        "measured, requests whose model or tenant is counted as unknown or other, and clients "
        "that were cut off.",
        PanelUnit.PER_SECOND,
        (
            _by("what", m.STORE_FAILURES, "store"),
            _by("table", own.UNREADABLE_ROWS, "unreadable rows"),
            _by("reason", m.PROXY_FAILURES, "proxy"),
            _by("label", m.LABELS_REPLACED, "replaced"),
            _by("reason", m.CLIENTS_CUT, "cut off"),
        ),
    ),
    Panel(
        "Stages that are behind",
        "Age of the oldest work that a stage has not done. Folding is up to half a minute late "
        "on purpose, computing a minute some minutes.",
        PanelUnit.SECONDS,
        (Query(by(("stage",), gauge(own.STAGE_LAG), "max"), "{{stage}}"),),
    ),
    Panel(
        "Queues in memory",
        "Share of the room of each queue that is taken. What does not fit is refused and sent "
        "again, or dropped and counted.",
        PanelUnit.SHARE,
        (Query(by(("queue",), gauge(own.QUEUE_FILL), "max"), "{{queue}}"),),
    ),
    Panel(
        "Late jobs",
        "How long a job is overdue: since its last run began, beyond its interval.",
        PanelUnit.SECONDS,
        (Query(by(("job_name",), gauge(own.JOB_LATE), "max"), "{{job_name}}"),),
    ),
    Panel(
        "Missed runs of jobs",
        "Runs that failed, or were skipped because the one before still ran.",
        PanelUnit.PER_SECOND,
        (
            Query(
                by(("job_name", "reason"), rate(own.JOB_MISSES)),
                "{{job_name}} {{reason}}",
            ),
        ),
    ),
)

_INPUT = (
    Panel(
        "Readings of engines' pages",
        "Scrapes of engines by outcome, and failed reads of GPUs. Every outcome but ok leaves "
        "a gap in graphs.",
        PanelUnit.PER_SECOND,
        (
            sum_by(("engine", "outcome"), m.SCRAPES),
            _by("reason", m.GPU_FAILURES, "GPUs"),
        ),
    ),
    Panel(
        "Spans received",
        "Spans by outcome, and the reasons of the rejected ones.",
        PanelUnit.PER_SECOND,
        (
            sum_by(("outcome",), m.SPANS),
            _by("reason", m.SPANS_REJECTED, "rejected"),
            _by("reason", m.EXPORTS_REFUSED, "whole exports refused"),
        ),
    ),
    Panel(
        "Plugins of engines",
        "Steps and ended requests that engines' plugins reported, and records that were "
        "dropped. docs/vllm-plugin.md names the reasons.",
        PanelUnit.PER_SECOND,
        (
            sum_by(("engine", "kind"), m.PLUGIN_RECORDS),
            Query(
                by(("engine", "reason"), rate(m.PLUGIN_DROPPED)),
                "{{engine}} dropped: {{reason}}",
            ),
        ),
    ),
    Panel(
        "Values stored as unknown",
        "Values of engines and clients that cannot be true, by field.",
        PanelUnit.PER_SECOND,
        (sum_by(("field", "reason"), m.VALUES_DROPPED),),
    ),
    Panel(
        "Figures of efficiency and cost that are missing",
        "Why, by engine: no model's config, a GPU that the agent does not know, GPUs of "
        "several kinds. docs/efficiency.md says what to set.",
        PanelUnit.NUMBER,
        (
            Query(
                by(("engine", "reason"), increase(m.FIGURES_MISSING, SHOWN)),
                "{{engine}} {{reason}}",
            ),
        ),
    ),
)

_STORE = (
    Panel(
        "Waiting to be stored",
        "Rows and records that wait for the database. It stays near 0 while the database keeps up.",
        PanelUnit.NUMBER,
        (
            total(m.STORE_WAITING, "rows"),
            total(m.UNPUBLISHED_ROWS, "rows to publish"),
            total(m.PROXY_WAITING, "records of the proxy"),
            total(m.PROXY_OPEN, "requests in the proxy"),
        ),
    ),
    Panel(
        "Age of the newest row",
        "Since the agent stored a row of the table. That of requests grows while none come.",
        PanelUnit.SECONDS,
        (Query(f"time() - {by(('table',), gauge(own.NEWEST_ROW), 'max')}", "{{table}}"),),
    ),
    Panel(
        "Size of the database",
        "With its log, if it is a file. Agents that share a database have one size.",
        PanelUnit.BYTES,
        (Query(by(("instance",), gauge(own.DATABASE_SIZE), "max"), "{{instance}}"),),
    ),
    Panel(
        "Publishing",
        "Rows of agents' files that the shared database took, and those that it will "
        "never have. docs/storage.md names the reasons.",
        PanelUnit.PER_SECOND,
        (
            total(m.PUBLISHED_ROWS, "taken"),
            _by("reason", m.LOST_ROWS, "dropped"),
        ),
    ),
    Panel(
        "Age of what waits to be published",
        "For how long the shared database has lacked rows of any agent.",
        PanelUnit.SECONDS,
        (Query(f"max({gauge(m.PUBLISH_LAG)})", "oldest"),),
    ),
    Panel(
        "Size of published files",
        "Bytes of rows in agents' files; each refuses requests at its storage.max_bytes.",
        PanelUnit.BYTES,
        (total(m.FILE_BYTES, "bytes"),),
    ),
)

_OUTPUT = (
    Panel(
        "Forwarding",
        "OTLP bodies that were forwarded, and those that were not.",
        PanelUnit.PER_SECOND,
        (total(m.FORWARDED, "passed on"), _by("reason", m.FORWARD_DROPPED, "not")),
    ),
    Panel(
        "Waiting to be forwarded",
        "Bytes of OTLP bodies that wait for their destination.",
        PanelUnit.BYTES,
        (total(m.FORWARD_QUEUE, "bytes"),),
    ),
    Panel(
        "Push of metrics",
        "Exports of all metrics over OTLP, those that were dropped, and points that the "
        "endpoint refused.",
        PanelUnit.PER_SECOND,
        (
            total(own.METRICS_PUSHED, "accepted"),
            _by("reason", own.PUSH_DROPPED, "dropped"),
            total(own.PUSH_POINTS_REJECTED, "points refused"),
        ),
    ),
)

_DISCOVERY = (
    Panel(
        "Engines found in pods",
        "Engines that the discovery of each agent found, by namespace.",
        PanelUnit.NUMBER,
        (
            Query(
                by(_NAMESPACE, gauge(own.DISCOVERED_ENGINES), "max"),
                legend(_NAMESPACE),
            ),
        ),
    ),
    Panel(
        "Failed lists and watches of pods",
        "By reason. An agent goes on with the engines that it knows.",
        PanelUnit.PER_SECOND,
        (Query(by(("call", "reason"), rate(own.DISCOVERY_FAILURES)), "{{call}} {{reason}}"),),
    ),
    Panel(
        "Age of what is known of pods",
        "Since the API server listed pods, or a watch gave an event or ended in order. It ends "
        "each watch after a minute.",
        PanelUnit.SECONDS,
        (
            Query(
                f"time() - {by(_NAMESPACE, gauge(own.DISCOVERY_SUCCESS), 'min')}",
                legend(_NAMESPACE),
            ),
        ),
    ),
)

AGENT_ROWS = (
    PanelRow("Health", _HEALTH),
    PanelRow("What agents read", _INPUT),
    PanelRow("Database", _STORE),
    PanelRow("Forwarding and pushing", _OUTPUT),
    PanelRow("Discovery of engines", _DISCOVERY),
)
