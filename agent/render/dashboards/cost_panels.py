"""What the work costs, in dollars and joules, and how much of it was for nothing."""

from agent.catalog import efficiency_metrics as em
from agent.render.dashboards.panel_expressions import (
    ENGINE_MODEL,
    SHOWN,
    gauge,
    increase,
    rate,
    ratio,
)
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query
from agent.render.dashboards.panel_styles import SHARES, STACKED, STAT
from agent.render.dashboards.shared_queries import ENGINE_NAME
from agent.render.promql import among, by

_SHARE = ("share",)
# What nobody got anything of.
_IDLE = ("idle",)
_WASTED = ("aborted", "unseen")


def _share_of(shares: tuple[str, ...]) -> str:
    """The part of the bill of the time shown that these shares are."""
    return ratio(
        by(ENGINE_MODEL, increase(em.COST, SHOWN, among("share", shares))),
        by(ENGINE_MODEL, increase(em.COST, SHOWN)),
    )


COST_ROW = PanelRow(
    "Cost",
    (
        Panel(
            title="Bill of the time shown",
            description="Price of the GPUs times the time that they were held. It grows whether "
            "anybody asks or not. Only for engines with a price in the settings.",
            unit=PanelUnit.DOLLARS,
            queries=(
                Query(
                    expression=by(ENGINE_MODEL, increase(em.COST, SHOWN)),
                    legend=ENGINE_NAME,
                    instant=True,
                ),
            ),
            style=STAT,
            width=6,
        ),
        Panel(
            title="Idle and wasted",
            description="Shares of the bill of the time shown for GPUs that waited, and for work "
            "that nobody got: given up, or computed unseen.",
            unit=PanelUnit.SHARE,
            queries=tuple(
                Query(expression=_share_of(shares), legend=f"{ENGINE_NAME} {what}", instant=True)
                for shares, what in ((_IDLE, "idle"), (_WASTED, "wasted"))
            ),
            style=STAT,
            width=6,
            highest=1,
        ),
        Panel(
            title="Dollars per hour, by what they were for",
            description="The shares add up to the bill.",
            unit=PanelUnit.DOLLARS,
            queries=(Query(expression=f"3600 * {by(_SHARE, rate(em.COST))}", legend="{{share}}"),),
            style=STACKED,
            width=12,
        ),
        Panel(
            title="Dollars per million tokens",
            description="Input and output: of busy time alone, what the work itself needs; input "
            "as a whole, and by whether it was computed or came from a cache. Within objective: "
            "the whole bill over the output tokens of requests that met every objective.",
            unit=PanelUnit.DOLLARS,
            queries=(
                Query(
                    expression=by((*ENGINE_MODEL, "kind"), gauge(em.COST_PER_MILLION), "max"),
                    legend=f"{ENGINE_NAME} {{{{kind}}}}",
                ),
            ),
        ),
        Panel(
            title="Dollars per million good tokens",
            description="The whole bill over the output tokens of requests that met the objective: "
            "what a kept promise costs. Far above the output's own price, many are broken or "
            "much time is idle.",
            unit=PanelUnit.DOLLARS,
            queries=(
                Query(
                    expression=by(
                        (*ENGINE_MODEL, "objective"), gauge(em.COST_PER_MILLION_GOOD), "max"
                    ),
                    legend=f"{ENGINE_NAME} {{{{objective}}}}",
                ),
            ),
        ),
        Panel(
            title="Dollars per request",
            description="The whole bill, idle time included, over the requests that ended.",
            unit=PanelUnit.DOLLARS,
            queries=(
                Query(
                    expression=by(ENGINE_MODEL, gauge(em.COST_PER_REQUEST), "max"),
                    legend=ENGINE_NAME,
                ),
            ),
        ),
        Panel(
            title="Dollars per hour of each engine",
            description="At the pace of the newest minute.",
            unit=PanelUnit.DOLLARS,
            queries=(
                Query(
                    expression=by(ENGINE_MODEL, gauge(em.COST_PER_HOUR), "max"),
                    legend=ENGINE_NAME,
                ),
            ),
        ),
        Panel(
            title="Busy and idle time",
            description="Share of an engine's time by state; unknown is when its page could not be "
            "read.",
            unit=PanelUnit.SECONDS,
            queries=(Query(expression=by(("state",), rate(em.TIME)), legend="{{state}}"),),
            style=SHARES,
        ),
        Panel(
            title="Energy per output token",
            description="Joules of the engine's GPUs over its output tokens, by their energy "
            "counters. It falls as batches grow.",
            unit=PanelUnit.JOULES,
            queries=(
                Query(
                    expression=by(ENGINE_MODEL, gauge(em.ENERGY_PER_TOKEN), "max"),
                    legend=ENGINE_NAME,
                ),
            ),
        ),
        Panel(
            title="Power of each engine",
            description="Energy that the engine's GPUs drew, per second.",
            unit=PanelUnit.WATTS,
            queries=(Query(expression=by(ENGINE_MODEL, rate(em.ENERGY)), legend=ENGINE_NAME),),
        ),
    ),
)
