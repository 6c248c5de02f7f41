"""What a dashboard is made of, as plain data; `drawing` turns it into Grafana's JSON."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agent.render.dashboards.panel_styles import LINES, PanelStyle


class PanelUnit(StrEnum):
    """How Grafana writes a figure (its `valueFormats/categories.ts`)."""

    SECONDS = "s"
    SHARE = "percentunit"
    NUMBER = "short"
    PLAIN = "none"
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
    YES_NO = "bool_yes_no"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A question to Prometheus. `instant` asks for the value at the end of the time shown."""

    expression: str
    legend: str
    instant: bool = False
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Sql:
    """A question to PostgreSQL, with Grafana's macros in it."""

    statement: str
    over_time: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """Where a click on a value leads."""

    title: str
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """From this value on a figure has this colour; None is where every figure begins."""

    value: float | None
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """How a column of a table or a series is shown, where it differs from the panel.

    It is `coloured` by thresholds, its own or the panel's. A `hidden` one is for links alone.
    """

    name: str
    unit: PanelUnit | None = None
    links: tuple[Link, ...] = ()
    coloured: bool = False
    hidden: bool = False
    thresholds: tuple[Threshold, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel, `width` of the dashboard's 24 columns wide.

    The thresholds are drawn as lines where figures are.
    """

    title: str
    description: str
    unit: PanelUnit
    queries: tuple[Query, ...] | tuple[Sql, ...]
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
    """Panels under a heading; `closed` until somebody opens it."""

    title: str
    panels: tuple[Panel, ...]
    closed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard; its variables are those that its questions ask for."""

    uid: str
    title: str
    description: str
    rows: tuple[PanelRow, ...]
    variables: tuple[Mapping[str, Any], ...]
    annotations: tuple[Mapping[str, Any], ...] = field(default=())
    hours: int = 1


def warn_above(value: float, colour: str = "red") -> tuple[Threshold, ...]:
    """Green up to a value, then another colour."""
    return Threshold(value=None, colour="green"), Threshold(value=value, colour=colour)


def good_above(value: float) -> tuple[Threshold, ...]:
    """Red up to a value, then green."""
    return Threshold(value=None, colour="red"), Threshold(value=value, colour="green")
