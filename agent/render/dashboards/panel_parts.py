"""The parts of a dashboard as plain data; `grafana_json` turns them into Grafana's JSON."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from typing import Any

from agent.render.dashboards.panel_styles import LINES, PanelStyle


class PanelUnit(StrEnum):
    """A unit as Grafana names it in `valueFormats/categories.ts`."""

    SECONDS = "s"
    SHARE = "percentunit"
    NUMBER = "short"
    REQUESTS_PER_S = "reqps"
    PER_SECOND = "cps"
    PER_MINUTE = "cpm"
    OPERATIONS_PER_S = "ops"
    BYTES = "bytes"
    BYTES_PER_S = "Bps"
    FLOPS = "flops"
    WATTS = "watt"
    JOULES = "joule"
    CELSIUS = "celsius"
    HERTZ = "hertz"
    DOLLARS = "currencyUSD"
    DATE = "dateTimeAsIso"
    TEXT = "string"


@dataclass(frozen=True, slots=True)
class Query:
    """A query to Prometheus. An `instant` one returns the value at the end of the time range."""

    expression: str
    legend: str
    _: KW_ONLY
    instant: bool = False
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Sql:
    """A query to PostgreSQL with Grafana's macros."""

    statement: str
    over_time: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """A link on a value."""

    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The colour of all values from `value` on; None stands below every number."""

    value: float | None
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Settings of one column or series that differ from its panel.

    A `coloured` column takes its colour from its own thresholds, or from the panel's. A `hidden`
    column only holds values for links.
    """

    name: str
    unit: PanelUnit | None = None
    links: tuple[Link, ...] = ()
    coloured: bool = False
    hidden: bool = False
    thresholds: tuple[Threshold, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel, `width` of the dashboard's 24 columns wide."""

    title: str
    description: str
    unit: PanelUnit
    queries: tuple[Query, ...] | tuple[Sql, ...]
    _: KW_ONLY
    style: PanelStyle = LINES
    width: int = 8
    height: int = 8
    thresholds: tuple[Threshold, ...] = ()
    lowest: float | None = 0
    highest: float | None = None
    links: tuple[Link, ...] = ()
    columns: tuple[Column, ...] = ()
    transformations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class PanelRow:
    """Panels under a heading. A `closed` row hides its panels until a click opens it."""

    title: str
    panels: tuple[Panel, ...]
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard. Its queries use its variables."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Mapping[str, Any], ...]
    annotations: tuple[Mapping[str, Any], ...] = field(default=())
    hours: int = 1


def warn_above(value: float, colour: str = "red") -> tuple[Threshold, ...]:
    """Green below a value, another colour from there on."""
    return Threshold(value=None, colour="green"), Threshold(value=value, colour=colour)


def good_above(value: float) -> tuple[Threshold, ...]:
    """Red below a value, green from there on."""
    return Threshold(value=None, colour="red"), Threshold(value=value, colour="green")
