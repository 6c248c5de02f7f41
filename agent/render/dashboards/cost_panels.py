"""Panels on cost: dollars, joules, and the share of both that was wasted."""

from agent.catalog import efficiency_metrics as em
from agent.catalog.metric import Metric
from agent.catalog.time_units import HOUR_S
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query
from agent.render.dashboards.panel_queries import (
    ENGINE_MODEL,
    SHOWN,
    by_engine,
    increase,
    max_by,
    rate,
    ratio,
)
from agent.render.dashboards.panel_styles import SHARES, STACKED, STAT
from agent.render.promql import among, by

_BILL = by(ENGINE_MODEL, increase(em.COST, SHOWN))
# Of the values of the label `share`: GPUs that waited, and work without a response.
_SHARES_AS = {"idle": ("idle",), "wasted": ("aborted", "unseen")}


def _share_of_bill(shares: tuple[str, ...]) -> str:
    return ratio(by(ENGINE_MODEL, increase(em.COST, SHOWN, among("share", shares))), _BILL)


def _newest(metric: Metric, *more: str) -> tuple[Query, ...]:
    return (max_by((*ENGINE_MODEL, *more), metric),)


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
