"""Latency: what users got, engine by engine, phase by phase."""

from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.render.dashboards.panel_expressions import (
    ENGINE,
    ENGINE_MODEL,
    OBJECTIVE,
    buckets,
    gauge,
    quantile,
    summed,
)
from agent.render.dashboards.panel_parts import (
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
)
from agent.render.dashboards.panel_styles import HEATMAP, SHARES
from agent.render.dashboards.shared_queries import ENGINE_NAME, percentiles
from agent.render.promql import by, eq

_REQUESTS_BEHIND = Link(
    "The slowest requests of this engine",
    "/d/goodput-requests?${__url_time_range}&var-engine=${__field.labels.engine}",
)


def _limit(measure: str) -> Query:
    named = by(OBJECTIVE, gauge(m.SLO_LIMIT, eq("measure", measure)), "max")
    return Query(expression=named, legend="{{objective}} limit")


_LATENCY_TOLD = (
    ("Time to first token", m.TTFT, "ttft", "Arrival to the first token, queue included."),
    ("Time per output token", m.TPOT, "tpot", "The pace of the stream after its first token."),
    ("End-to-end time", m.DURATION, "e2e", "Arrival to the last token."),
)
_LATENCY = (
    *(
        Panel(
            title=title,
            description=f"{text} By where it was taken: a proxy sees what users see. The dashed "
            "line is the limit of an objective, the points are traces of single requests.",
            unit=PanelUnit.SECONDS,
            queries=(
                *percentiles(metric, ("vantage",), "{{vantage}} ", traces=True),
                _limit(measure),
            ),
        )
        for title, metric, measure, text in _LATENCY_TOLD
    ),
    Panel(
        title="Times to first token",
        description="How many requests took how long, in every bucket. Two bands are two kinds of "
        "requests, which no percentile shows.",
        unit=PanelUnit.SECONDS,
        queries=(Query(expression=by(("le",), buckets(m.TTFT)), legend="{{le}}", exemplars=True),),
        style=HEATMAP,
        width=12,
    ),
    Panel(
        title="Between tokens",
        description="Times between chunks with tokens, and the longest of each request. Seen "
        "through the proxy only; a chunk may hold several tokens.",
        unit=PanelUnit.SECONDS,
        queries=(
            *percentiles(m.CHUNK_GAP, (), "gap "),
            *percentiles(m.MAX_GAP, (), "longest of a request "),
        ),
        width=12,
    ),
)


_BY_ENGINE = (
    *(
        Panel(
            title=title,
            description="One line far above the others is one replica in trouble; all of them "
            "together are load.",
            unit=PanelUnit.SECONDS,
            queries=(Query(expression=quantile(0.95, metric, ENGINE_MODEL), legend=ENGINE_NAME),),
            links=(_REQUESTS_BEHIND,),
        )
        for title, metric in (
            ("p95 of time to first token by engine", m.TTFT),
            ("p95 of time per output token by engine", m.TPOT),
            ("p95 of end-to-end time by engine", m.DURATION),
        )
    ),
)


_PHASES = (
    Panel(
        title="Share of time by phase",
        description="Of all the time that requests spent in engines, the part in each phase. Queue "
        "is want of capacity, prefill is long prompts, decode is long answers and large batches.",
        unit=PanelUnit.SECONDS,
        queries=tuple(
            Query(expression=f"sum({summed(metric)})", legend=name)
            for name, metric in (
                ("queue", m.QUEUE),
                ("prefill", m.PREFILL),
                ("decode", m.DECODE),
            )
        ),
        style=SHARES,
    ),
    *(
        Panel(
            title=title,
            description=text,
            unit=PanelUnit.SECONDS,
            queries=percentiles(metric, ()),
        )
        for title, metric, text in (
            ("Time in the queue", m.QUEUE, "Arrival at the engine to its first scheduling."),
            ("Time in prefill", m.PREFILL, "First scheduling to the first token."),
            ("Time in decode", m.DECODE, "First token to the last one."),
            (
                "First token that is no reasoning",
                m.FIRST_VISIBLE,
                "What a user waits for who is shown no reasoning. Seen through the proxy only.",
            ),
            (
                "What the front adds",
                m.HOLDBACK,
                "The first token at the proxy after the engine's own: front, parsers and network. "
                "Needs the proxy and the engine's spans.",
            ),
        )
    ),
)


_OWN: tuple[tuple[str, Metric, str], ...] = (
    ("Engine's time to first token", fact.TIME_TO_FIRST_TOKEN, "Requests given up are in it too."),
    ("Engine's gap between outputs", fact.INTER_TOKEN_LATENCY, "One request's outputs."),
    ("Engine's time per output token", fact.TIME_PER_OUTPUT_TOKEN, "Mean of each request."),
    ("Engine's end-to-end time", fact.REQUEST_DURATION, "Of requests that finished."),
    ("Engine's time in the queue", fact.QUEUE_TIME, "Of requests that finished."),
    ("Engine's time in prefill", fact.PREFILL_TIME, "Of requests that finished."),
    ("Engine's time in decode", fact.DECODE_TIME, "Of requests that finished."),
)


_OWN_LATENCY = (
    *(
        Panel(
            title=title,
            description=f"{text} In the engine's own buckets, which are coarse: use it where no "
            "spans arrive.",
            unit=PanelUnit.SECONDS,
            queries=percentiles(metric, ENGINE, "{{engine}} "),
        )
        for title, metric, text in _OWN
    ),
)


LATENCY_ROWS = (
    PanelRow("Latency that users got", _LATENCY),
    PanelRow("By engine", _BY_ENGINE),
    PanelRow("Where a request's time goes", _PHASES),
)
OWN_LATENCY_ROW = PanelRow("Latency by the engine's own histograms", _OWN_LATENCY, closed=True)
