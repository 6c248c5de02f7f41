"""Capacity: how much room is left, and what the work needs."""

from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.render.dashboards.cost_panels import COST_ROW
from agent.render.dashboards.panel_expressions import ENGINE_MODEL, gauge, quantile, rate, ratio
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query, warn_above
from agent.render.dashboards.panel_styles import STAT
from agent.render.dashboards.shared_queries import ENGINE_NAME, by_engine
from agent.render.promql import by

# Of requests that wait all the time: the sign to add a replica.
DEEP_QUEUE = 10


_ROOM_RUNNING = by(ENGINE_MODEL, gauge(fact.REQUESTS_RUNNING))
_ROOM = (
    Panel(
        title="Queue depth",
        description=f"Requests that wait for a place. More than {DEEP_QUEUE} all the time is the "
        "sign to add a replica.",
        unit=PanelUnit.NUMBER,
        queries=(by_engine(fact.REQUESTS_WAITING, ""),),
        thresholds=warn_above(DEEP_QUEUE),
    ),
    Panel(
        title="p95 of the time in the queue",
        description="What waiting costs each request. Near the limit on the first token there is "
        "no room for peaks.",
        unit=PanelUnit.SECONDS,
        queries=(Query(expression=quantile(0.95, m.QUEUE, ENGINE_MODEL), legend=ENGINE_NAME),),
    ),
    Panel(
        title="Batch in use",
        description="Requests that run over the most that may. Only where the engine tells its "
        "limit.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(
                expression=ratio(_ROOM_RUNNING, by(ENGINE_MODEL, gauge(fact.MAX_RUNNING_REQUESTS))),
                legend=ENGINE_NAME,
            ),
        ),
        highest=1,
    ),
)


_LOAD_ENDED = by(ENGINE_MODEL, rate(m.REQUESTS))
_LOAD = (
    Panel(
        title="Requests per minute",
        description="Requests that ended, whatever became of them.",
        unit=PanelUnit.PER_MINUTE,
        queries=(
            Query(expression=f"60 * {by(ENGINE_MODEL, rate(m.REQUESTS))}", legend=ENGINE_NAME),
        ),
    ),
    Panel(
        title="Tokens of a request",
        description="Mean input and output. When latency grows, look here first: longer prompts "
        "or answers are more load with as many requests.",
        unit=PanelUnit.NUMBER,
        queries=tuple(
            Query(
                expression=ratio(by(ENGINE_MODEL, rate(metric)), _LOAD_ENDED),
                legend=f"{ENGINE_NAME} {what}",
            )
            for metric, what in ((m.INPUT_TOKENS, "input"), (m.OUTPUT_TOKENS, "output"))
        ),
    ),
    Panel(
        title="Output tokens per second of a running request",
        description="How fast one user's answer grows. It falls as the batch grows.",
        unit=PanelUnit.PER_SECOND,
        queries=(
            Query(
                expression=ratio(
                    by(ENGINE_MODEL, rate(fact.OUTPUT_TOKENS)),
                    by(ENGINE_MODEL, gauge(fact.REQUESTS_RUNNING)),
                ),
                legend=ENGINE_NAME,
            ),
        ),
    ),
)


_CACHE_USAGE = by(ENGINE_MODEL, gauge(fact.KV_CACHE_USAGE), "max")
_CACHE_CAPACITY = by(ENGINE_MODEL, gauge(fact.KV_CAPACITY_TOKENS))
_CACHE = (
    Panel(
        title="KV cache held",
        description="Share of the KV cache held by live requests, of the fullest rank.",
        unit=PanelUnit.SHARE,
        queries=(Query(expression=_CACHE_USAGE, legend=ENGINE_NAME),),
        thresholds=warn_above(0.95),
        highest=1,
    ),
    Panel(
        title="KV cache in tokens",
        description="Tokens that the cache holds now, and at most.",
        unit=PanelUnit.NUMBER,
        queries=(
            Query(
                expression=f"{_CACHE_USAGE}\n  * {_CACHE_CAPACITY}", legend=f"{ENGINE_NAME} held"
            ),
            Query(expression=_CACHE_CAPACITY, legend=f"{ENGINE_NAME} maximum"),
        ),
    ),
    Panel(
        title="Blocks of the KV cache",
        description="How many blocks there are, tokens of one block, bytes of one value in it, "
        "tokens that one request may span, and ranks that share the work.",
        unit=PanelUnit.NUMBER,
        queries=(
            by_engine(fact.KV_BLOCKS, "blocks"),
            by_engine(fact.KV_BLOCK_TOKENS, "tokens of a block"),
            by_engine(fact.KV_VALUE_BYTES, "bytes of a value"),
            by_engine(fact.MAX_CONTEXT_TOKENS, "tokens of a request"),
            by_engine(fact.DATA_PARALLEL_RANKS, "ranks"),
        ),
        style=STAT,
    ),
)


_GPUS = (
    Panel(
        title="Free memory of GPUs",
        description="Share of the memory that can still be allocated.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(
                expression=f"{by(('gpu',), gauge(gpu_facts.MEMORY_FREE), 'max')}\n"
                f"  / {by(('gpu',), gauge(gpu_facts.MEMORY_TOTAL), 'max')}",
                legend="{{gpu}}",
            ),
        ),
        highest=1,
    ),
    Panel(
        title="GPUs busy",
        description="Share of time in which any kernel ran; below 80 % under load there is room, "
        "near 0 the GPU is paid for and not used.",
        unit=PanelUnit.SHARE,
        queries=(
            Query(expression=by(("gpu",), gauge(gpu_facts.UTILIZATION), "max"), legend="{{gpu}}"),
        ),
        highest=1,
    ),
    Panel(
        title="Power of all GPUs",
        description="By their energy counters: what the machine costs in electricity.",
        unit=PanelUnit.WATTS,
        queries=(
            Query(
                expression=f"sum({by(('gpu',), rate(gpu_facts.ENERGY), 'max')})", legend="all GPUs"
            ),
        ),
    ),
)


CAPACITY_ROWS = (
    PanelRow("Is there room", _ROOM),
    PanelRow("Load", _LOAD),
    PanelRow("KV cache", _CACHE),
    PanelRow("GPUs", _GPUS),
    COST_ROW,
)
