"""Panels on latency: that of users, that of each engine, and that of the engines' histograms."""

from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.render.dashboards.panel_parts import (
    ENGINE,
    ENGINE_MODEL,
    HEATMAP,
    OBJECTIVE,
    SHARES,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    buckets,
    max_by,
    per_engine,
    percentiles,
    quantile,
    summed,
)
from agent.render.links import REQUEST_DASHBOARDS
from agent.render.promql import by, eq

_SLOWEST_REQUESTS = tuple(
    Link(
        f"The slowest requests of this engine ({each.source})",
        each.url(engine="${__field.labels.engine}"),
    )
    for each in REQUEST_DASHBOARDS
)

_LIMITED = (
    ("Time to first token", m.TTFT, "ttft", "Arrival to the first token, queue included."),
    ("Time per output token", m.TPOT, "tpot", "The pace of the stream after its first token."),
    ("End-to-end time", m.DURATION, "e2e", "Arrival to the last token."),
)
_SPEED = Panel(
    "Speed of a stream",
    "Output tokens per second that one user sees after the first token. 95 % of the streams are at "
    "least as fast as p5.",
    PanelUnit.PER_SECOND,
    tuple(
        Query(f"1 / ({quantile(share, m.TPOT, ())} > 0)", name)
        for share, name in ((0.5, "p50"), (0.95, "p5"), (0.99, "p1"))
    ),
)
_LATENCY = (
    *(
        Panel(
            title,
            f"{text} By vantage: `proxy` is what users get, by the agent's proxy or vLLM's plugin. "
            "The dashed line is the limit of an objective, the points are traces of single "
            "requests.",
            PanelUnit.SECONDS,
            (
                *percentiles(metric, ("vantage",), "{{vantage}} ", traces=True),
                max_by(OBJECTIVE, m.SLO_LIMIT, "limit", eq("measure", measure)),
            ),
        )
        for title, metric, measure, text in _LIMITED
    ),
    Panel(
        "Times to first token",
        "Number of requests in every bucket. Two bands are two kinds of requests, which no "
        "percentile shows.",
        PanelUnit.SECONDS,
        (Query(by(("le",), buckets(m.TTFT)), "{{le}}", exemplars=True),),
        style=HEATMAP,
    ),
    Panel(
        "Between tokens",
        "Gaps between chunks with tokens, and the longest gap of each request. Only by the "
        "plugin or the proxy; a chunk may hold several tokens.",
        PanelUnit.SECONDS,
        (
            *percentiles(m.CHUNK_GAP, (), "gap "),
            *percentiles(m.MAX_GAP, (), "longest of a request "),
        ),
    ),
    _SPEED,
)

P95_BY_ENGINE = tuple(
    Panel(
        f"p95 of {name} by engine",
        "One line far above the others is one replica in trouble; all lines together are load.",
        PanelUnit.SECONDS,
        (per_engine(quantile(0.95, metric, ENGINE_MODEL)),),
        links=_SLOWEST_REQUESTS,
    )
    for name, metric in (
        ("time to first token", m.TTFT),
        ("time per output token", m.TPOT),
        ("end-to-end time", m.DURATION),
    )
)

_PHASES = (
    Panel(
        "Share of time by phase",
        "The share of each phase in the time that requests spent in engines. Queue is a lack of "
        "capacity, prefill is long prompts, decode is long outputs and large batches.",
        PanelUnit.SECONDS,
        tuple(
            Query(f"sum({summed(metric)})", name)
            for name, metric in (("queue", m.QUEUE), ("prefill", m.PREFILL), ("decode", m.DECODE))
        ),
        style=SHARES,
    ),
    *(
        Panel(title, text, PanelUnit.SECONDS, percentiles(metric, ()))
        for title, metric, text in (
            ("Time in the queue", m.QUEUE, "Arrival at the engine to its first scheduling."),
            ("Time in prefill", m.PREFILL, "First scheduling to the first token."),
            ("Time in decode", m.DECODE, "First token to the last one."),
            (
                "First token that is not reasoning",
                m.FIRST_VISIBLE,
                "The wait of a user who sees no reasoning. Only by the plugin or the proxy.",
            ),
            (
                "What the front adds",
                m.HOLDBACK,
                "Time from the engine's first token to the user's: front, parsers and, by a proxy, "
                "network. Needs the plugin, or the proxy and the engine's spans.",
            ),
        )
    ),
)

_OWN_LATENCY = tuple(
    Panel(
        f"Engine's {name}",
        f"{text} In the engine's own buckets, which are coarse: use it if no spans arrive.",
        PanelUnit.SECONDS,
        percentiles(metric, ENGINE, "{{engine}} "),
    )
    for name, metric, text in (
        ("time to first token", fact.TIME_TO_FIRST_TOKEN, "Aborted requests are included."),
        ("gap between outputs", fact.INTER_TOKEN_LATENCY, "Between outputs of one request."),
        ("time per output token", fact.TIME_PER_OUTPUT_TOKEN, "Mean of each request."),
        ("end-to-end time", fact.REQUEST_DURATION, "Of requests that finished."),
        ("time in the queue", fact.QUEUE_TIME, "Of requests that finished."),
        ("time in prefill", fact.PREFILL_TIME, "Of requests that finished."),
        ("time in decode", fact.DECODE_TIME, "Of requests that finished."),
    )
)

LATENCY_ROWS = (
    PanelRow("Latency that users got", _LATENCY),
    PanelRow("Where a request's time goes", _PHASES),
)
OWN_LATENCY_ROW = PanelRow("Latency by the engine's own histograms", _OWN_LATENCY)
