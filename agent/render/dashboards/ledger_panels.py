"""Panels on the ledger: work that engines counted and that is in no row of a request."""

from agent.catalog import efficiency_metrics as em
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.catalog.time_units import HOUR_S
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query
from agent.render.dashboards.panel_queries import (
    ENGINE_MODEL,
    SHOWN,
    by_engine,
    increase,
    rate,
    ratio,
)
from agent.render.dashboards.panel_styles import STACKED, STAT
from agent.render.promql import by


def _share(part: Metric, whole: Metric, what: str) -> Query:
    found = ratio(by(ENGINE_MODEL, increase(part, SHOWN)), by(ENGINE_MODEL, increase(whole, SHOWN)))
    return Query(found, f"{{{{engine}}}} {{{{model}}}} {what}", instant=True)


LEDGER_ROW = PanelRow(
    "Vanished work",
    (
        Panel(
            "Tokens without a row",
            "Share of the tokens that engines counted in the time shown and that are in no row.",
            PanelUnit.SHARE,
            (
                _share(em.UNACCOUNTED_INPUT, fact.INPUT_TOKENS, "input"),
                _share(em.UNACCOUNTED_OUTPUT, fact.OUTPUT_TOKENS, "output"),
            ),
            style=STAT,
            highest=1,
        ),
        Panel(
            "Requests without a row",
            "By reason: aborted (the client left; vLLM sends no span), finished (its span was "
            "sampled out, lost, refused or dropped), died with the engine, or refused. Untold: "
            "there is a row without tokens.",
            PanelUnit.PER_SECOND,
            (
                Query(by(("reason",), rate(em.UNACCOUNTED_REQUESTS)), "{{reason}}"),
                by_engine(em.UNTOLD_ROWS),
            ),
            style=STACKED,
        ),
        Panel(
            "Dollars per hour without a row",
            "An estimate: busy time for work that is in no row. Only with a price.",
            PanelUnit.DOLLARS,
            (Query(f"{HOUR_S} * {by(ENGINE_MODEL, rate(em.UNACCOUNTED_COST))}", "{{engine}}"),),
        ),
    ),
)
