"""Panels on single requests: the worst, where attainment is lost, and one request in full."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from agent.render.dashboards import request_sql as sql
from agent.render.dashboards.panel_parts import (
    BARS,
    STACKED,
    TABLE,
    Column,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Sql,
    Threshold,
)


def _same_row(column: str) -> str:
    """The value of another column in the row of the click."""
    return f"${{__data.fields.{column}}}"


def _trace() -> Link:
    """Grafana's Explore page with the trace of the clicked id, from Tempo or Jaeger.

    A query to Tempo needs the type of a trace query, a query to Jaeger needs no type.
    """
    source = {"uid": _same_row("trace_source")}
    query = {"refId": "A", "datasource": source, "queryType": _same_row("trace_query")}
    pane = {
        "datasource": source["uid"],
        "queries": [{**query, "query": "${__value.raw}"}],
        "range": {"from": _same_row("shown_from"), "to": _same_row("shown_until")},
    }
    # Grafana's variables must stay as they are.
    panes = quote(json.dumps({"trace": pane}), safe="${}._")
    return Link("The trace", f"/explore?schemaVersion=1&panes={panes}")


_IN_FULL = Link(
    "This request in full", "/d/goodput-requests?${__url_time_range}&var-request=${__value.raw}"
)
_ENGINE_THEN = Link(
    "The engine at that time",
    f"/d/goodput-operations?from={_same_row('shown_from')}&to={_same_row('shown_until')}"
    "&var-engine=${__value.raw}",
)
# Ids are texts, so that Grafana does not show an id of digits as a number.
_COLUMNS = (
    Column(name="request", unit=PanelUnit.TEXT, links=(_IN_FULL,)),
    Column(name="trace", unit=PanelUnit.TEXT, links=(_trace(), _IN_FULL)),
    Column(name="engine", unit=PanelUnit.TEXT, links=(_ENGINE_THEN,)),
    Column(name="model", unit=PanelUnit.TEXT),
    Column(name="tenant", unit=PanelUnit.TEXT),
    Column(name="began", unit=PanelUnit.DATE),
    *(
        Column(name=name, unit=PanelUnit.SECONDS)
        for name in ("ttft", "tpot", "e2e", "queue", "prefill", "decode", "max gap", "hold-back")
    ),
    *(Column(name=name, unit=PanelUnit.TEXT, hidden=True) for name in sql.FOR_LINKS),
)
# An unknown share, a share below the target, and one from the target on. The query of the colours
# replaces the value of the last one.
_COLOURS = (
    Threshold(value=None, colour="transparent"),
    Threshold(value=0, colour="red"),
    Threshold(value=0.95, colour="green"),
)


def _coloured(names: str) -> tuple[Mapping[str, Any], ...]:
    """The columns of these names take their thresholds from the row that query B returns."""
    thresholds = zip(("unknown", "below", "target"), _COLOURS, strict=True)
    return (
        {
            "id": "configFromData",
            "options": {
                "configRefId": "B",
                "applyTo": {"id": "byRegexp", "options": f"/^({names})$/"},
                "mappings": [
                    {
                        "fieldName": name,
                        "handlerKey": "threshold1",
                        "handlerArguments": {"threshold": {"color": threshold.colour}},
                    }
                    for name, threshold in thresholds
                ],
            },
        },
    )


_WORST = (
    Panel(
        "Worst requests",
        "The slowest requests of the time shown, by the measure chosen above. A click on a request "
        "shows it in full, on a trace its spans, on an engine its dashboard at that time.",
        PanelUnit.NUMBER,
        (Sql(sql.WORST),),
        style=TABLE,
        width=24,
        height=11,
        columns=_COLUMNS,
    ),
)

_LOST = (
    Panel(
        "Attainment by input and output length",
        "Share of the judged requests that met the objective, by input tokens (lines) and output "
        "tokens (columns). A red line: prompts are too long for the objective. A red column: "
        "outputs are. Red all over: too much load. Green starts at the objective's target.",
        PanelUnit.SHARE,
        (Sql(sql.ATTAINMENT_BY_LENGTH), Sql(sql.COLOURS)),
        style=TABLE,
        width=14,
        thresholds=_COLOURS,
        transformations=_coloured("out .+"),
        columns=(
            Column(name="judged", unit=PanelUnit.NUMBER),
            *(Column(name=f"out {name}", coloured=True) for name in sql.OUTPUT_LENGTHS),
        ),
    ),
    Panel(
        "Attainment by tenant",
        "Tenants are known by the plugin or the proxy. Green starts at the objective's target.",
        PanelUnit.SHARE,
        (Sql(sql.ATTAINMENT_BY_TENANT), Sql(sql.COLOURS)),
        style=TABLE,
        width=10,
        thresholds=_COLOURS,
        transformations=_coloured("attainment"),
        columns=(
            Column(name="tenant", unit=PanelUnit.TEXT),
            Column(name="judged", unit=PanelUnit.NUMBER),
            Column(name="attainment", coloured=True),
        ),
    ),
    Panel(
        "Prompts from the cache by tenant",
        "Share of a tenant's prompt tokens that the prefix cache served. A tenant with many tokens "
        "and a low share gains most from a shared system prompt or from routing by prefix.",
        PanelUnit.SHARE,
        (Sql(sql.CACHED_BY_TENANT),),
        style=TABLE,
        width=10,
        columns=(
            Column(name="tenant", unit=PanelUnit.TEXT),
            Column(name="requests", unit=PanelUnit.NUMBER),
            Column(name="input", unit=PanelUnit.NUMBER),
        ),
    ),
    Panel(
        "Requests by verdict",
        "Requests by start time and by their verdict for the objective chosen above.",
        PanelUnit.NUMBER,
        (Sql(sql.VERDICTS_OVER_TIME, over_time=True),),
        style=STACKED,
        width=10,
    ),
    Panel(
        "Time by phase and verdict",
        "Share of the time of requests in each phase, by verdict. Improve the phase that is much "
        "larger for missed requests.",
        PanelUnit.SHARE,
        (Sql(sql.PHASES_BY_VERDICT),),
        style=TABLE,
        width=7,
        columns=(Column(name="requests", unit=PanelUnit.NUMBER),),
    ),
    Panel(
        "Causes of misses",
        "Seconds beyond the limits of the objective, by cause, and the requests that lost some of "
        "them; by status if the causes are not known. What to change is in the dashboard of "
        "objectives, under the causes over time.",
        PanelUnit.NUMBER,
        (Sql(sql.CAUSES),),
        style=TABLE,
        width=7,
        columns=(
            Column(name="excess", unit=PanelUnit.SECONDS),
            Column(name="share", unit=PanelUnit.SHARE),
        ),
    ),
)

_CONVERSATIONS = (
    Panel(
        "Conversations by turn",
        "Turns of sessions that began in the time shown, numbered from its begin: how long the "
        "first token took, the share of the prompt that a cache served, the time between a turn's "
        "end and the next one (tools and users), and tokens of the prompt before that were "
        "computed again. Sessions are known by the plugin or the proxy.",
        PanelUnit.NUMBER,
        (Sql(sql.TURNS),),
        style=TABLE,
        width=24,
        columns=(
            Column(name="turn", unit=PanelUnit.TEXT),
            *(
                Column(name=name, unit=PanelUnit.SECONDS)
                for name in ("TTFT p50", "TTFT p95", "gap p50")
            ),
            Column(name="cached", unit=PanelUnit.SHARE),
        ),
    ),
)

_ONE = (
    Panel(
        "The request and its trace",
        "The request chosen above: write one of its ids or its trace id, or click on one in a "
        "table. Several requests may have one id. A click on its trace shows the spans, on its "
        "engine the engine's dashboard at that time.",
        PanelUnit.NUMBER,
        (Sql(sql.ONE_AT_A_GLANCE),),
        style=TABLE,
        width=24,
        height=5,
        columns=_COLUMNS,
    ),
    Panel(
        "Phases of the request",
        "The time of the request chosen above, by phase.",
        PanelUnit.SECONDS,
        (Sql(sql.PHASES_OF_ONE),),
        style=BARS,
        width=10,
        height=12,
    ),
    Panel(
        "Everything known of the request",
        "Every known column of the request chosen above.",
        PanelUnit.TEXT,
        (Sql(sql.ONE),),
        style=TABLE,
        width=14,
        height=12,
    ),
)

REQUEST_ROWS = (
    PanelRow("The worst requests", _WORST),
    PanelRow("One request", _ONE),
    PanelRow("Where attainment is lost", _LOST),
    PanelRow("Conversations", _CONVERSATIONS),
)
