"""Panels on capacity: free room, and the work of requests."""

from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.catalog.thresholds import DEEP_QUEUE, FULL_CACHE
from agent.render.dashboards.cost_panels import COST_ROW
from agent.render.dashboards.ledger_panels import LEDGER_ROW
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query, warn_above
from agent.render.dashboards.panel_queries import (
    ENGINE_MODEL,
    GPU,
    by_engine,
    gauge,
    max_by,
    per_engine,
    quantile,
    rate,
    ratio,
)
from agent.render.dashboards.panel_styles import STAT
from agent.render.promql import by

_RUNNING = by(ENGINE_MODEL, gauge(fact.REQUESTS_RUNNING))
_MOST_RUNNING = by(ENGINE_MODEL, gauge(fact.MAX_RUNNING_REQUESTS))
_ROOM = (
    Panel(
        "Queue depth",
        f"Requests that wait for a place. If there are always more than {DEEP_QUEUE}, add a "
        "replica.",
        PanelUnit.NUMBER,
        (by_engine(fact.REQUESTS_WAITING),),
        thresholds=warn_above(DEEP_QUEUE),
    ),
    Panel(
        "p95 of the time in the queue",
        "Near the limit on the time to first token there is no room for peaks.",
        PanelUnit.SECONDS,
        (per_engine(quantile(0.95, m.QUEUE, ENGINE_MODEL)),),
    ),
    Panel(
        "Batch in use",
        "Requests that run over the most that may run. Only where the engine's limit is known.",
        PanelUnit.SHARE,
        (per_engine(ratio(_RUNNING, _MOST_RUNNING)),),
        highest=1,
    ),
)

_ENDED = by(ENGINE_MODEL, rate(m.REQUESTS))
_LOAD = (
    Panel(
        "Requests per minute",
        "Requests that ended, with any status.",
        PanelUnit.PER_MINUTE,
        (per_engine(f"60 * {_ENDED}"),),
    ),
    Panel(
        "Tokens of a request",
        "Mean input and output. Check this first when latency grows: longer prompts or outputs are "
        "more work with as many requests.",
        PanelUnit.NUMBER,
        tuple(
            per_engine(ratio(by(ENGINE_MODEL, rate(metric)), _ENDED), what)
            for metric, what in ((m.INPUT_TOKENS, "input"), (m.OUTPUT_TOKENS, "output"))
        ),
    ),
    Panel(
        "Output tokens per second of a running request",
        "The pace of one user's stream. It falls as the batch grows.",
        PanelUnit.PER_SECOND,
        (per_engine(ratio(by(ENGINE_MODEL, rate(fact.OUTPUT_TOKENS)), _RUNNING)),),
    ),
)

_CACHE_USAGE = by(ENGINE_MODEL, gauge(fact.KV_CACHE_USAGE), "max")
_CACHE_CAPACITY = by(ENGINE_MODEL, gauge(fact.KV_CAPACITY_TOKENS))
_CACHE = (
    Panel(
        "KV cache held",
        "Share of the KV cache held by live requests, of the fullest rank.",
        PanelUnit.SHARE,
        (per_engine(_CACHE_USAGE),),
        thresholds=warn_above(FULL_CACHE),
        highest=1,
    ),
    Panel(
        "KV cache in tokens",
        "Tokens that the cache holds now, and at most.",
        PanelUnit.NUMBER,
        (
            per_engine(f"{_CACHE_USAGE}\n  * {_CACHE_CAPACITY}", "held"),
            per_engine(_CACHE_CAPACITY, "maximum"),
        ),
    ),
    Panel(
        "Blocks of the KV cache",
        "Number of blocks, tokens of one block, bytes of one value in it, tokens that one request "
        "may span, and ranks that share the work.",
        PanelUnit.NUMBER,
        (
            by_engine(fact.KV_BLOCKS, "blocks"),
            by_engine(fact.KV_BLOCK_TOKENS, "tokens of a block"),
            by_engine(fact.KV_VALUE_BYTES, "bytes of a value"),
            by_engine(fact.MAX_CONTEXT_TOKENS, "tokens of a request"),
            by_engine(fact.DATA_PARALLEL_RANKS, "ranks"),
        ),
        style=STAT,
    ),
)

_FREE = max_by(GPU, gpu_facts.MEMORY_FREE).expression
_MEMORY = max_by(GPU, gpu_facts.MEMORY_TOTAL).expression
_GPUS = (
    Panel(
        "Free memory of GPUs",
        "Share of the memory that can still be allocated.",
        PanelUnit.SHARE,
        (Query(f"{_FREE}\n  / {_MEMORY}", "{{gpu}}"),),
        highest=1,
    ),
    Panel(
        "GPUs busy",
        "Share of time in which any kernel ran. Below 80 % under load there is room; near 0 the "
        "GPU is paid for and not used.",
        PanelUnit.SHARE,
        (max_by(GPU, gpu_facts.UTILIZATION),),
        highest=1,
    ),
    Panel(
        "Power of all GPUs",
        "From their energy counters.",
        PanelUnit.WATTS,
        (Query(f"sum({by(GPU, rate(gpu_facts.ENERGY), 'max')})", "all GPUs"),),
    ),
)

CAPACITY_ROWS = (
    PanelRow("Is there room", _ROOM),
    PanelRow("Load", _LOAD),
    PanelRow("KV cache", _CACHE),
    PanelRow("GPUs", _GPUS),
    COST_ROW,
    LEDGER_ROW,
)
