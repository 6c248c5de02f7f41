"""Requests: the worst ones, where attainment is lost, and one request in full."""

from urllib.parse import quote

from agent.render.dashboards import statements as sql
from agent.render.dashboards.looks import BARS, STACKED, TABLE
from agent.render.dashboards.parts import Column, Link, Panel, Row, Sql, Unit, good_above


def _trace(name: str, kind: str, asked: str) -> Link:
    """Grafana's Explore page with the trace of the clicked id, from the chosen data source."""
    source = f"${{{kind}_datasource}}"
    panes = (
        f'{{"trace":{{"datasource":"{source}","queries":[{{"refId":"A","datasource":'
        f'{{"type":"{kind}","uid":"{source}"}},{asked}"query":"${{__value.raw}}"}}],'
        '"range":{"from":"${__from}","to":"${__to}"}}}'
    )
    # What Grafana fills in must stay as it is.
    return Link(
        f"The trace in {name}", f"/explore?schemaVersion=1&panes={quote(panes, safe='${}._')}"
    )


_TRACES = (
    _trace("Jaeger", "jaeger", ""),
    _trace("Tempo", "tempo", '"queryType":"traceql",'),
)
_IN_FULL = Link(
    "This request in full", "/d/goodput-requests?${__url_time_range}&var-request=${__value.raw}"
)
_ENGINE_THEN = Link(
    "The engine at that time",
    "/d/goodput-operations?${__url_time_range}&var-engine=${__value.raw}",
)
_LINKED = (
    Column(name="request", links=(_IN_FULL,)),
    Column(name="trace", links=(*_TRACES, _IN_FULL)),
    Column(name="engine", links=(_ENGINE_THEN,)),
    Column(name="began", unit=Unit.DATE),
)
_SECONDS = tuple(
    Column(name=name, unit=Unit.SECONDS)
    for name in ("ttft", "tpot", "e2e", "queue", "prefill", "decode", "max gap", "hold-back")
)


_WORST = (
    Panel(
        title="Worst requests",
        description="The slowest by the measure chosen above, of those that began in the time "
        "shown. A click on a request shows it in full, on a trace its spans, on an engine what it "
        "was doing.",
        unit=Unit.NUMBER,
        queries=(Sql(sql.WORST),),
        look=TABLE,
        width=24,
        height=11,
        columns=(*_LINKED, *_SECONDS),
    ),
)


_LOST = (
    Panel(
        title="Attainment by input and output length",
        description="Share of the judged requests that met the objective, by input tokens (lines) "
        "and output tokens (columns). A red line is prompts too long for the promise, a red column "
        "answers; red all over is load.",
        unit=Unit.SHARE,
        queries=(Sql(sql.ATTAINMENT_BY_LENGTH),),
        look=TABLE,
        width=14,
        thresholds=good_above(0.95),
        columns=(
            Column(name="judged", unit=Unit.NUMBER),
            *(Column(name=f"out {name}", coloured=True) for name in sql.OUTPUT_LENGTHS),
        ),
    ),
    Panel(
        title="Attainment by tenant",
        description="Who gets what was promised. Tenants are known where the proxy sees them.",
        unit=Unit.SHARE,
        queries=(Sql(sql.ATTAINMENT_BY_TENANT),),
        look=TABLE,
        width=10,
        thresholds=good_above(0.95),
        columns=(
            Column(name="judged", unit=Unit.NUMBER),
            Column(name="attainment", coloured=True),
        ),
    ),
    Panel(
        title="Requests by verdict",
        description="Requests by when they began and the verdict of the objective chosen above.",
        unit=Unit.NUMBER,
        queries=(Sql(sql.VERDICTS_OVER_TIME, over_time=True),),
        look=STACKED,
        width=10,
    ),
    Panel(
        title="Time by phase and verdict",
        description="Share of the time of requests in each phase, by verdict. The phase that is "
        "much larger where the objective was missed is the one to work on.",
        unit=Unit.SHARE,
        queries=(Sql(sql.PHASES_BY_VERDICT),),
        look=TABLE,
        width=7,
        columns=(Column(name="requests", unit=Unit.NUMBER),),
    ),
    Panel(
        title="Causes of misses",
        description="Requests that missed by the cause that was found, or by how they ended where "
        "none was.",
        unit=Unit.NUMBER,
        queries=(Sql(sql.CAUSES),),
        look=TABLE,
        width=7,
        columns=(Column(name="share", unit=Unit.SHARE),),
    ),
)


_ONE = (
    Panel(
        title="Phases of the request",
        description="Where the time of the request chosen above went. Write a request id or a "
        "trace id, or click on one further up. One id may stand for several requests.",
        unit=Unit.SECONDS,
        queries=(Sql(sql.PHASES_OF_ONE),),
        look=BARS,
        width=10,
        height=12,
    ),
    Panel(
        title="Everything known of the request",
        description="Every figure of the request chosen above. What is not known is left out.",
        unit=Unit.NUMBER,
        queries=(Sql(sql.ONE),),
        look=TABLE,
        width=14,
        height=12,
    ),
)


REQUEST_ROWS = (
    Row("The worst requests", _WORST),
    Row("Where attainment is lost", _LOST),
    Row("One request", _ONE),
)
