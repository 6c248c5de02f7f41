"""Requests: the worst ones, where attainment is lost, and one request in full."""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from agent.render.dashboards import request_sql as sql
from agent.render.dashboards.panel_parts import (
    Column,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
    Sql,
    Threshold,
)
from agent.render.dashboards.panel_styles import BARS, STACKED, TABLE


def _of_row(column: str) -> str:
    """What another column says in the row that was clicked."""
    return f"${{__data.fields.{column}}}"


def _trace() -> Link:
    """Grafana's Explore page with the trace of the clicked id, from whichever store there is.

    Tempo must be told that it is asked for a trace, Jaeger that it is asked nothing else.
    """
    source = {"uid": _of_row("trace_source")}
    asked = {"refId": "A", "datasource": source, "queryType": _of_row("trace_query")}
    pane = {
        "datasource": source["uid"],
        "queries": [{**asked, "query": "${__value.raw}"}],
        "range": {"from": _of_row("shown_from"), "to": _of_row("shown_until")},
    }
    # What Grafana fills in must stay as it is.
    panes = quote(json.dumps({"trace": pane}), safe="${}._")
    return Link("The trace", f"/explore?schemaVersion=1&panes={panes}")


_IN_FULL = Link(
    "This request in full", "/d/goodput-requests?${__url_time_range}&var-request=${__value.raw}"
)
_ENGINE_THEN = Link(
    "The engine at that time",
    f"/d/goodput-operations?from={_of_row('shown_from')}&to={_of_row('shown_until')}"
    "&var-engine=${__value.raw}",
)
# Texts, so that an id of digits alone is not shown as a number.
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
# Of a share that is not known, of one below the target, and from the target on: what the colours'
# own question answers takes the place of the last one's.
_COLOURS = (
    Threshold(value=None, colour="transparent"),
    Threshold(value=0, colour="red"),
    Threshold(value=0.95, colour="green"),
)


def _coloured(names: str) -> Mapping[str, Any]:
    """Columns of these names have their colours from the question B: a row of where each begins."""
    begin = zip(("unknown", "below", "target"), _COLOURS, strict=True)
    return {
        "id": "configFromData",
        "options": {
            "configRefId": "B",
            "applyTo": {"id": "byRegexp", "options": f"/^({names})$/"},
            "mappings": [
                {
                    "fieldName": name,
                    "handlerKey": "threshold1",
                    "handlerArguments": {"threshold": {"color": step.colour}},
                }
                for name, step in begin
            ],
        },
    }


_WORST = (
    Panel(
        title="Worst requests",
        description="The slowest by the measure chosen above, of those that began in the time "
        "shown. A click on a request shows it in full, on a trace its spans, on an engine what it "
        "was doing.",
        unit=PanelUnit.NUMBER,
        queries=(Sql(sql.WORST),),
        style=TABLE,
        width=24,
        height=11,
        columns=_COLUMNS,
    ),
)


_LOST = (
    Panel(
        title="Attainment by input and output length",
        description="Share of the judged requests that met the objective, by input tokens (lines) "
        "and output tokens (columns). A red line is prompts too long for the promise, a red column "
        "answers; red all over is load. Green begins at the objective's target.",
        unit=PanelUnit.SHARE,
        queries=(Sql(sql.ATTAINMENT_BY_LENGTH), Sql(sql.COLOURS)),
        style=TABLE,
        width=14,
        thresholds=_COLOURS,
        transformations=(_coloured("out .+"),),
        columns=(
            Column(name="judged", unit=PanelUnit.NUMBER),
            *(Column(name=f"out {name}", coloured=True) for name in sql.OUTPUT_LENGTHS),
        ),
    ),
    Panel(
        title="Attainment by tenant",
        description="Who gets what was promised. Tenants are known where the proxy sees them. "
        "Green begins at the objective's target.",
        unit=PanelUnit.SHARE,
        queries=(Sql(sql.ATTAINMENT_BY_TENANT), Sql(sql.COLOURS)),
        style=TABLE,
        width=10,
        thresholds=_COLOURS,
        transformations=(_coloured("attainment"),),
        columns=(
            Column(name="tenant", unit=PanelUnit.TEXT),
            Column(name="judged", unit=PanelUnit.NUMBER),
            Column(name="attainment", coloured=True),
        ),
    ),
    Panel(
        title="Requests by verdict",
        description="Requests by when they began and the verdict of the objective chosen above.",
        unit=PanelUnit.NUMBER,
        queries=(Sql(sql.VERDICTS_OVER_TIME, over_time=True),),
        style=STACKED,
        width=10,
    ),
    Panel(
        title="Time by phase and verdict",
        description="Share of the time of requests in each phase, by verdict. The phase that is "
        "much larger where the objective was missed is the one to work on.",
        unit=PanelUnit.SHARE,
        queries=(Sql(sql.PHASES_BY_VERDICT),),
        style=TABLE,
        width=7,
        columns=(Column(name="requests", unit=PanelUnit.NUMBER),),
    ),
    Panel(
        title="Causes of misses",
        description="Requests that missed by the cause that was found, or by how they ended where "
        "none was.",
        unit=PanelUnit.NUMBER,
        queries=(Sql(sql.CAUSES),),
        style=TABLE,
        width=7,
        columns=(Column(name="share", unit=PanelUnit.SHARE),),
    ),
)


_ONE = (
    Panel(
        title="The request and its trace",
        description="The request chosen above. Write a request id or a trace id, or click on one "
        "further up. One id may stand for several requests. A click on its trace shows the spans, "
        "on its engine what that was doing then.",
        unit=PanelUnit.NUMBER,
        queries=(Sql(sql.ONE_AT_A_GLANCE),),
        style=TABLE,
        width=24,
        height=5,
        columns=_COLUMNS,
    ),
    Panel(
        title="Phases of the request",
        description="Where the time of the request chosen above went.",
        unit=PanelUnit.SECONDS,
        queries=(Sql(sql.PHASES_OF_ONE),),
        style=BARS,
        width=10,
        height=12,
    ),
    Panel(
        title="Everything known of the request",
        description="Every figure of the request chosen above. What is not known is left out.",
        unit=PanelUnit.TEXT,
        queries=(Sql(sql.ONE),),
        style=TABLE,
        width=14,
        height=12,
    ),
)


REQUEST_ROWS = (
    PanelRow("The worst requests", _WORST),
    PanelRow("Where attainment is lost", _LOST),
    PanelRow("One request", _ONE),
)
