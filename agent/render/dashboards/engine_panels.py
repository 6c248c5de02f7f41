"""Engines in operation: queue, batch, caches, throughput, speculation, health."""

from agent.catalog import engine_facts as fact
from agent.catalog import host_facts
from agent.catalog import metrics as m
from agent.render.dashboards.latency_panels import LATENCY_ROWS, OWN_LATENCY_ROW
from agent.render.dashboards.panel_expressions import (
    ENGINE,
    ENGINE_MODEL,
    RATE,
    gauge,
    increase,
    rate,
    ratio,
)
from agent.render.dashboards.panel_parts import (
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    warn_above,
)
from agent.render.dashboards.panel_styles import STACKED, STATES
from agent.render.dashboards.shared_queries import ENGINE_NAME, by_engine, sum_by
from agent.render.promql import by

_RUNNING = by(ENGINE_MODEL, gauge(fact.REQUESTS_RUNNING))
_MOST_RUNNING = by(ENGINE_MODEL, gauge(fact.MAX_RUNNING_REQUESTS))
_STEP_TOKENS = ratio(by(ENGINE_MODEL, rate(fact.STEP_TOKENS)), by(ENGINE_MODEL, rate(fact.STEPS)))
_MOST_STEP_TOKENS = by(ENGINE_MODEL, gauge(fact.MAX_STEP_TOKENS), "max")
_QUEUE = (
    Panel(
        title="Requests running and waiting",
        description="Requests in the batch and before it, with the most that may run. Waiting with "
        "room left in the batch is want of KV cache.",
        unit=PanelUnit.NUMBER,
        queries=(
            by_engine(fact.REQUESTS_RUNNING, "running"),
            by_engine(fact.REQUESTS_WAITING, "waiting"),
            by_engine(fact.MAX_RUNNING_REQUESTS, "maximum"),
        ),
    ),
    Panel(
        title="Waiting by reason",
        description="What requests wait for, in the engine's own words.",
        unit=PanelUnit.NUMBER,
        queries=(sum_by(("engine", "reason"), gauge(fact.REQUESTS_WAITING_BY_REASON)),),
        style=STACKED,
    ),
    Panel(
        title="Batch fill",
        description="Requests in the batch over the most that may run, and tokens of a step over "
        "the most that it may compute. Full means that limits hold requests back, empty that the "
        "GPU has room. Only where the engine tells its limits.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(expression=ratio(_RUNNING, _MOST_RUNNING), legend=f"{ENGINE_NAME} requests"),
            Query(
                expression=f"{_STEP_TOKENS}\n  / {_MOST_STEP_TOKENS}",
                legend=f"{ENGINE_NAME} tokens",
            ),
        ),
        highest=1,
    ),
    Panel(
        title="Tokens per step",
        description="Tokens that one step computes, prompts and answers together.",
        unit=PanelUnit.NUMBER,
        queries=(Query(expression=_STEP_TOKENS, legend=ENGINE_NAME),),
    ),
    Panel(
        title="Steps",
        description="Steps per second that gave output. None while requests run is a hang.",
        unit=PanelUnit.OPERATIONS_PER_S,
        queries=(sum_by(ENGINE_MODEL, rate(fact.STEPS)),),
    ),
    Panel(
        title="Preemptions",
        description="Running requests thrown back for want of KV cache; each computes its prompt "
        "again. Now and then is harmless, all the time is a batch too large for the cache.",
        unit=PanelUnit.PER_SECOND,
        queries=(sum_by(ENGINE_MODEL, rate(fact.PREEMPTIONS)),),
    ),
)


_CACHES = (
    Panel(
        title="KV cache in use",
        description="Share of the KV cache held by live requests, of the fullest rank. Full is "
        "normal under load; full with requests that wait or start over is too small.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(
                expression=by(ENGINE_MODEL, gauge(fact.KV_CACHE_USAGE), "max"),
                legend=ENGINE_NAME,
            ),
        ),
        thresholds=warn_above(0.95),
        highest=1,
    ),
    Panel(
        title="Prefix cache hits",
        description="Share of the tokens looked up in the prefix cache that were found. A sudden "
        "fall makes every prompt slower and dearer.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(
                expression=ratio(
                    by(ENGINE_MODEL, rate(fact.PREFIX_CACHE_HIT_TOKENS)),
                    by(ENGINE_MODEL, rate(fact.PREFIX_CACHE_QUERY_TOKENS)),
                ),
                legend=ENGINE_NAME,
            ),
        ),
        highest=1,
    ),
    Panel(
        title="Input tokens, computed and cached",
        description="Prompt tokens by where their KV values came from.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            sum_by(("source",), rate(fact.INPUT_TOKENS_BY_SOURCE)),
            Query(expression=f"sum({rate(fact.CACHED_INPUT_TOKENS)})", legend="from a cache"),
        ),
    ),
)


_THROUGHPUT = (
    Panel(
        title="Tokens in and out",
        description="Tokens per second by the engine's own count, kept apart: input is cheap, "
        "output is not.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            by_engine(fact.INPUT_TOKENS, "input"),
            by_engine(fact.OUTPUT_TOKENS, "output"),
        ),
    ),
    Panel(
        title="Requests by finish reason",
        description="Requests that the engine finished, by its own reason. Many of `length` are "
        "answers cut off.",
        unit=PanelUnit.REQUESTS_PER_S,
        queries=(sum_by(("finish_reason",), rate(fact.REQUESTS_FINISHED)),),
        style=STACKED,
    ),
    Panel(
        title="Requests that failed in the engine",
        description="Failed, given up and turned away, as far as the engine tells.",
        unit=PanelUnit.REQUESTS_PER_S,
        queries=(
            Query(
                expression=by(("reason",), rate(fact.REQUESTS_FAILED)), legend="failed {{reason}}"
            ),
            Query(expression=f"sum({rate(fact.REQUESTS_ABORTED)})", legend="given up"),
            Query(
                expression=by(("reason",), rate(fact.ADMISSION_REJECTIONS)),
                legend="turned away {{reason}}",
            ),
        ),
    ),
)


_ACCEPTED = by(ENGINE_MODEL, rate(fact.SPEC_DECODE_ACCEPTED_TOKENS))
_DRAFTED = by(ENGINE_MODEL, rate(fact.SPEC_DECODE_DRAFT_TOKENS))
_DRAFTS = by(ENGINE_MODEL, rate(fact.SPEC_DECODE_DRAFTS))
_SPECULATION = (
    Panel(
        title="Draft tokens accepted",
        description="Share of the drafted tokens that verification accepted. Where it is low, "
        "speculation costs more than it gives.",
        unit=PanelUnit.SHARE,
        queries=(Query(expression=ratio(_ACCEPTED, _DRAFTED), legend=ENGINE_NAME),),
        highest=1,
    ),
    Panel(
        title="Accepted tokens per draft",
        description="How many tokens of a draft are kept; one more comes from the model itself.",
        unit=PanelUnit.NUMBER,
        queries=(Query(expression=ratio(_ACCEPTED, _DRAFTS), legend=ENGINE_NAME),),
    ),
    Panel(
        title="Tokens drafted and accepted",
        description="Tokens per second put up for verification, and those that it accepted.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            Query(expression=_DRAFTED, legend=f"{ENGINE_NAME} drafted"),
            Query(expression=_ACCEPTED, legend=f"{ENGINE_NAME} accepted"),
        ),
    ),
)


_HEALTH = (
    Panel(
        title="Engines up",
        description="1 while the engine's page can be read.",
        unit=PanelUnit.NUMBER,
        queries=(
            Query(expression=by(ENGINE, gauge(m.ENGINE_UP), "max"), legend="{{engine}}"),
            Query(expression=by(ENGINE, gauge(fact.AWAKE), "max"), legend="{{engine}} awake"),
        ),
        style=STATES,
        highest=1,
        thresholds=(*warn_above(1, "green"),),
    ),
    Panel(
        title="Events",
        description="What happened to engines, by kind. Each is listed "
        "with its evidence at /api/v1/events of the agent.",
        unit=PanelUnit.NUMBER,
        queries=(
            Query(
                expression=by((*ENGINE, "kind"), increase(m.ENGINE_EVENTS, RATE)),
                legend="{{engine}} {{kind}}",
            ),
        ),
    ),
    Panel(
        title="Time since the engine started",
        description="A line that falls to the ground is a restart.",
        unit=PanelUnit.SECONDS,
        queries=(
            Query(
                expression=f"time() - {by(ENGINE, gauge(fact.PROCESS_START_TIME), 'max')}",
                legend="{{engine}}",
            ),
        ),
    ),
    Panel(
        title="CPU of the engine's processes",
        description="Cores in use by what they do. A front near one core is a bottleneck that no "
        "GPU figure shows. Where the agent sees the processes.",
        unit=PanelUnit.NUMBER,
        queries=(sum_by(("engine", "role"), rate(host_facts.CPU)),),
    ),
    Panel(
        title="Host memory of the engine",
        description="Memory in use in the engine's cgroup, page cache included, and its limit.",
        unit=PanelUnit.BYTES,
        queries=(
            Query(
                expression=by(ENGINE, gauge(host_facts.MEMORY_USAGE), "max"), legend="{{engine}}"
            ),
            Query(
                expression=by(ENGINE, gauge(host_facts.MEMORY_LIMIT), "max"),
                legend="{{engine}} limit",
            ),
        ),
    ),
    Panel(
        title="Processes killed for want of memory",
        description="By the kernel, in the engine's cgroup.",
        unit=PanelUnit.PER_SECOND,
        queries=(sum_by(ENGINE, rate(host_facts.OOM_KILLS)),),
    ),
)


ENGINE_ROWS = (
    *LATENCY_ROWS,
    PanelRow("Queue and batch", _QUEUE),
    PanelRow("KV cache and prefix cache", _CACHES),
    PanelRow("Throughput", _THROUGHPUT),
    PanelRow("Speculative decoding", _SPECULATION, closed=True),
    OWN_LATENCY_ROW,
    PanelRow("Health", _HEALTH),
)
