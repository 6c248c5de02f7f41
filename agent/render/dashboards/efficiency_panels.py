"""Panels on efficiency, capacity and cost."""

from agent.catalog import efficiency_metrics as em
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog import metrics as m
from agent.catalog.definitions import DEEP_QUEUE, FULL_CACHE
from agent.catalog.metric import Metric
from agent.catalog.time_units import HOUR_S
from agent.render.dashboards.engine_panels import MOST_RUNNING, RUNNING
from agent.render.dashboards.panel_parts import (
    ENGINE_MODEL,
    GPU,
    POINTS,
    SHARES,
    SHOWN,
    STACKED,
    STAT,
    STATES,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    by_engine,
    gauge,
    increase,
    legend,
    max_by,
    per_engine,
    quantile,
    rate,
    ratio,
    warn_above,
)
from agent.render.promql import Matcher, among, by, eq


def _share(part: Metric, whole: Metric, what: str) -> Query:
    found = ratio(by(ENGINE_MODEL, increase(part, SHOWN)), by(ENGINE_MODEL, increase(whole, SHOWN)))
    return Query(found, f"{{{{engine}}}} {{{{model}}}} {what}", instant=True)


LEDGER_ROW = PanelRow(
    "Vanished work",
    (
        Panel(
            "Tokens without a row",
            "Share of the tokens that engines counted in the time shown and that are in no row.",
            PanelUnit.SHARE,
            (
                _share(em.UNACCOUNTED_INPUT, fact.INPUT_TOKENS, "input"),
                _share(em.UNACCOUNTED_OUTPUT, fact.OUTPUT_TOKENS, "output"),
            ),
            style=STAT,
            highest=1,
        ),
        Panel(
            "Requests without a row",
            "By reason: aborted (the client left; vLLM sends no span), finished (its span was "
            "sampled out, lost, refused or dropped), died with the engine, or refused. Untold: "
            "there is a row without tokens.",
            PanelUnit.PER_SECOND,
            (
                Query(by(("reason",), rate(em.UNACCOUNTED_REQUESTS)), "{{reason}}"),
                by_engine(em.ROWS_WITHOUT_TOKENS),
            ),
            style=STACKED,
        ),
        Panel(
            "Dollars per hour without a row",
            "An estimate: busy time for work that is in no row. Only with a price.",
            PanelUnit.DOLLARS,
            (Query(f"{HOUR_S} * {by(ENGINE_MODEL, rate(em.UNACCOUNTED_COST))}", "{{engine}}"),),
        ),
    ),
)

_BILL = by(ENGINE_MODEL, increase(em.COST, SHOWN))
# Of the values of the label `share`: GPUs that waited, and work without a response.
_SHARES_AS = {"idle": ("idle",), "wasted": ("aborted", "unseen")}


def _share_of_bill(shares: tuple[str, ...]) -> str:
    return ratio(by(ENGINE_MODEL, increase(em.COST, SHOWN, among("share", shares))), _BILL)


def _newest(metric: Metric, *more: str) -> tuple[Query, ...]:
    return (max_by((*ENGINE_MODEL, *more), metric),)


_COMPUTED_PRICE = by(ENGINE_MODEL, gauge(em.COST_PER_MILLION, eq("kind", "computed_input")), "max")
_SAVED = (
    f"{HOUR_S} * {by(ENGINE_MODEL, rate(fact.CACHED_INPUT_TOKENS))}\n  * {_COMPUTED_PRICE}\n  / 1e6"
)

COST_ROW = PanelRow(
    "Cost",
    (
        Panel(
            "Bill of the time shown",
            "Price of the GPUs times the time that they were held, with and without requests. Only "
            "for engines with a price in the settings.",
            PanelUnit.DOLLARS,
            (Query(_BILL, "{{engine}} {{model}}", instant=True),),
            style=STAT,
            width=6,
        ),
        Panel(
            "Idle and wasted",
            "Shares of the bill of the time shown: GPUs that waited, and work for no response "
            "(aborted requests, or work that the agent did not see).",
            PanelUnit.SHARE,
            tuple(
                Query(_share_of_bill(shares), f"{{{{engine}}}} {{{{model}}}} {what}", instant=True)
                for what, shares in _SHARES_AS.items()
            ),
            style=STAT,
            width=6,
            highest=1,
        ),
        Panel(
            "Dollars per hour, by what they were for",
            "The shares add up to the bill.",
            PanelUnit.DOLLARS,
            (Query(f"{HOUR_S} * {by(('share',), rate(em.COST))}", "{{share}}"),),
            style=STACKED,
            width=12,
        ),
        Panel(
            "Dollars per million tokens",
            "Input and output: cost of busy time alone; input as a whole, and by computed or "
            "cached. Within objective: the whole bill over the output tokens of requests that met "
            "every objective.",
            PanelUnit.DOLLARS,
            _newest(em.COST_PER_MILLION, "kind"),
        ),
        Panel(
            "Dollars per million good tokens",
            "The whole bill over the output tokens of requests that met the objective. Far above "
            "the price of output tokens, many requests miss or much time is idle.",
            PanelUnit.DOLLARS,
            _newest(em.COST_PER_MILLION_GOOD, "objective"),
        ),
        Panel(
            "Dollars per request",
            "The whole bill, idle time included, over the requests that ended.",
            PanelUnit.DOLLARS,
            _newest(em.COST_PER_REQUEST),
        ),
        Panel(
            "Dollars per hour of each engine",
            "At the rate of the newest minute.",
            PanelUnit.DOLLARS,
            _newest(em.COST_PER_HOUR),
        ),
        Panel(
            "Dollars per hour that caches save",
            "An estimate: the cached tokens at the price of computed ones in the newest minute. "
            "What reading them from the cache costs is not subtracted; it is little.",
            PanelUnit.DOLLARS,
            (per_engine(_SAVED),),
        ),
        Panel(
            "Busy and idle time",
            "Share of an engine's time by state; it is unknown while its scrapes fail.",
            PanelUnit.SECONDS,
            (Query(by(("state",), rate(em.TIME)), "{{state}}"),),
            style=SHARES,
        ),
        Panel(
            "Energy per output token",
            "Joules of the engine's GPUs over its output tokens, from their energy counters. It "
            "falls as batches grow.",
            PanelUnit.JOULES,
            _newest(em.ENERGY_PER_TOKEN),
        ),
        Panel(
            "Power of each engine",
            "Energy that the engine's GPUs used, per second.",
            PanelUnit.WATTS,
            (by_engine(em.ENERGY),),
        ),
    ),
)

_PHASE = (*ENGINE_MODEL, "phase")
_FROM_REQUESTS = eq("source", "requests")
# The value `all` of the label covers both phases, idle time included.
_SINGLE_PHASE = Matcher("phase", 'phase!="all"')
_WHOLE = eq("phase", "all")


def _by_phase(metric: Metric) -> Query:
    return max_by(_PHASE, metric, "", _FROM_REQUESTS, _SINGLE_PHASE)


def _roofline(
    title: str, description: str, unit: PanelUnit, labels: tuple[str, ...], axes: dict[str, str]
) -> Panel:
    """A point for each value of the labels, at the expressions of `axes`: name to expression."""
    quoted = ", ".join(f'"{label}"' for label in labels)
    return Panel(
        title,
        description,
        unit,
        tuple(
            # One label that identifies the series, as Grafana joins the axes by one field.
            Query(f'label_join({expression}, "point", " ", {quoted})', name, instant=True)
            for name, expression in axes.items()
        ),
        style=POINTS,
        lowest=None,
        transformations=(
            {"id": "joinByField", "options": {"byField": "point", "mode": "inner"}},
            {
                "id": "filterFieldsByName",
                "options": {"include": {"names": ["point", "Value #A", "Value #B"]}},
            },
        ),
    )


_INTENSITY = max_by(_PHASE, em.INTENSITY)
_DISAGREEMENT_LABELS = (*ENGINE_MODEL, "figure", "higher", "lower", "cause")

EFFICIENCY_ROW = PanelRow(
    "Efficiency of engines",
    (
        Panel(
            "MFU by phase",
            "FLOP/s that requests needed over the GPUs' dense peak, for prefill and decode. "
            "Prefill near 0.5 is good; decode is low by nature, its MBU says more.",
            PanelUnit.SHARE,
            (_by_phase(em.MFU),),
        ),
        Panel(
            "MBU by phase",
            "Bytes that requests needed to move over the memory bandwidth, for prefill and decode. "
            "Decode near 0.7 is as fast as this model can be on this GPU.",
            PanelUnit.SHARE,
            (_by_phase(em.MBU),),
        ),
        Panel(
            "MFU and MBU by source",
            "The agent's estimate from requests, the engine's own estimate, and the hardware's "
            "counters, over the whole minute with its idle time.",
            PanelUnit.SHARE,
            tuple(
                Query(
                    by((*ENGINE_MODEL, "source"), gauge(metric, _WHOLE), "max"),
                    f"{legend(ENGINE_MODEL)} {name} {{{{source}}}}",
                )
                for metric, name in ((em.MFU, "MFU"), (em.MBU, "MBU"))
            ),
        ),
        _roofline(
            "Roofline",
            "MFU over operations per byte, a point for each engine and phase. Points far left are "
            "bound by bandwidth, far right by compute. Low and left: larger batches help; low and "
            "right: a faster kernel or another GPU.",
            PanelUnit.SHARE,
            _PHASE,
            {"intensity": _INTENSITY.expression, "MFU": _by_phase(em.MFU).expression},
        ),
        Panel(
            "Arithmetic intensity",
            "Operations for each byte that had to move, with the ridge: below it, memory bandwidth "
            "is the bound; above it, compute.",
            PanelUnit.NUMBER,
            (_INTENSITY, max_by(ENGINE_MODEL, em.RIDGE, "ridge")),
        ),
        Panel(
            "Share of what the roofline allows",
            "FLOP/s over the most that is possible at this intensity. If it is low under load, "
            "neither compute nor bandwidth is the bound: check the front's CPU, the batch and the "
            "traffic.",
            PanelUnit.SHARE,
            (max_by(_PHASE, em.ROOF_SHARE),),
            highest=1,
        ),
        Panel(
            "What bounds each phase",
            "Compute-bound: more or faster GPUs, a smaller type. Bandwidth-bound: larger batches, "
            "quantised weights. Memory-capacity-bound: more KV cache.",
            PanelUnit.NUMBER,
            (max_by((*_PHASE, "bound"), em.BOUND),),
            style=STATES,
            thresholds=warn_above(1, "blue"),
            highest=1,
        ),
        Panel(
            "Sources that disagree",
            "The ratio of two sources, if it is beyond the margin, with the likely cause. One "
            "of them is wrong: the model's config, the GPU's data, or requests that the agent did "
            "not see.",
            PanelUnit.NUMBER,
            (
                Query(
                    by(_DISAGREEMENT_LABELS, gauge(em.DISAGREEMENT), "max"),
                    f"{legend(ENGINE_MODEL)} {{{{figure}}}}: {{{{higher}}}} over {{{{lower}}}}, "
                    "{{cause}}",
                ),
            ),
        ),
    ),
)

# Only engines that estimate their own work have these: vLLM with --enable-mfu-metrics, SGLang.
_FLOPS = by_engine(fact.ESTIMATED_GPU_FLOPS)
_READ = by_engine(fact.ESTIMATED_GPU_READ_BYTES, "read")
_WRITTEN = by_engine(fact.ESTIMATED_GPU_WRITE_BYTES, "written")

ESTIMATES_ROW = PanelRow(
    "Work by the engine's own estimate",
    (
        Panel(
            "FLOP/s of a GPU, estimated by the engine",
            "Operations per second, summed over ranks. Over the GPU's peak this is MFU by the "
            "engine's estimate. Only for engines that are started with the estimate on.",
            PanelUnit.FLOPS,
            (_FLOPS,),
        ),
        Panel(
            "Memory traffic of a GPU, estimated by the engine",
            "Bytes per second read and written, summed over ranks. Over the GPU's bandwidth this "
            "is MBU. Only for engines that are started with the estimate on.",
            PanelUnit.BYTES_PER_S,
            (_READ, _WRITTEN),
        ),
        _roofline(
            "Roofline by the engine's estimate",
            "FLOP/s over operations per byte moved, a point for each engine. Far left and low is "
            "bound by bandwidth: larger batches help. Far right and high is bound by compute. Only "
            "for engines that are started with the estimate on.",
            PanelUnit.FLOPS,
            ENGINE_MODEL,
            {
                "intensity": ratio(
                    _FLOPS.expression, f"({_READ.expression}\n  + {_WRITTEN.expression})"
                ),
                "FLOP/s": _FLOPS.expression,
            },
        ),
    ),
)

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
        "Requests that run over the most that may run. Only if the engine's limit is known.",
        PanelUnit.SHARE,
        (per_engine(ratio(RUNNING, MOST_RUNNING)),),
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
        (per_engine(ratio(by(ENGINE_MODEL, rate(fact.OUTPUT_TOKENS)), RUNNING)),),
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
