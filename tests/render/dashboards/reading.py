"""Dashboards as Grafana reads them: panels, queries, and values of variables."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from urllib.parse import quote

from agent.catalog.metric import Kind
from agent.records.objective import Objective
from agent.render.dashboards import render_dashboards
from agent.render.promql import published_labels
from tests.published_metrics import METRICS
from tests.render.alerts.cases import OBJECTIVES

Json = dict[str, Any]


def dashboards(objectives: Sequence[Objective] = OBJECTIVES) -> list[Json]:
    """Every dashboard for a few objectives of different shapes, as read from its file."""
    return [json.loads(text) for text in _rendered(tuple(objectives))]


# Eight modules read them while tests are collected, in each process of the tests.
@cache
def _rendered(objectives: tuple[Objective, ...]) -> tuple[str, ...]:
    return tuple(render_dashboards(objectives).values())


def panels(dashboard: Json) -> Iterator[Json]:
    """The panels of a dashboard, those in closed rows too, and no rows."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel["panels"]
        else:
            yield panel


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a panel, named as a reader would."""

    name: str
    panel: Json
    target: Json

    @property
    def expression(self) -> str:
        """The expression with Grafana's variables in it."""
        return str(self.target.get("expr") or self.target["rawSql"])


def asked(dashboard: Json, datasource: str) -> Iterator[Asked]:
    """The questions of a dashboard to a kind of data source."""
    for panel in panels(dashboard):
        for target in panel["targets"]:
            if target["datasource"]["type"] == datasource:
                # In a table, queries after the first one have no legend.
                second = "" if target["refId"] == "A" else target["refId"]
                legend = target.get("legendFormat", second)
                yield Asked(f"{panel['title']} / {legend}".rstrip(" /"), panel, target)


def on_prometheus(dashboard: Json) -> list[Asked]:
    return list(asked(dashboard, "prometheus"))


def on_postgres(dashboard: Json) -> list[Asked]:
    return list(asked(dashboard, "grafana-postgresql-datasource"))


def on_api(dashboard: Json) -> list[Asked]:
    return list(asked(dashboard, "yesoreyeram-infinity-datasource"))


def filled(expression: str, values: Mapping[str, str]) -> str:
    """The expression with values for variables, `$name` or `${name}` or `${name:format}`."""

    def value(found: re.Match[str]) -> str:
        return values[found["plain"] or found["braced"]]

    return re.sub(r"\$(?:\{(?P<braced>\w+)(?::\w+)?\}|(?P<plain>\w+))", value, expression)


def clicked(url: str, row: Mapping[str, Any], column: str, chosen: Mapping[str, str]) -> str:
    """Where a link on a column of a table leads in this row, as Grafana fills it in.

    Values of the row are encoded as its `VariableFormatID.UriEncode` does it.
    """
    url = re.sub(r"\$\{__data\.fields\.(\w+)\}", lambda field: quote(str(row[field[1]])), url)
    return filled(url.replace("${__value.raw}", quote(str(row[column]))), chosen)


_ENDINGS = {
    Kind.COUNTER: ("_total",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_count", "_sum"),
}
SERIES = {
    metric.name + ending: published_labels(metric) | ({"le"} if ending == "_bucket" else set())
    for metric in METRICS
    for ending in _ENDINGS[metric.kind]
}
_SELECTOR = re.compile(r'([a-zA-Z_:][\w:]*)\{((?:[^}"]|"[^"]*")*)\}')
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """The series that an expression names, with label, operator and value of each condition."""
    for name, inside in _SELECTOR.findall(expression):
        yield name, _MATCHER.findall(inside)
