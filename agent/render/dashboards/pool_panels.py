"""Panels on pools of prefill and decode engines: which one is short."""

from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.catalog.definitions import SHORT_POOL_QUEUE
from agent.catalog.metric import Metric
from agent.render.dashboards.panel_parts import (
    RATE,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    gauge,
    legend,
    rate,
    ratio,
    warn_above,
)
from agent.render.pool_queries import OF_POOL, by_pool, queue_by_pool
from agent.render.promql import eq

_ROLES = gauge(m.ENGINE_ROLE)


def _of_pool(values: str, what: str = "", how: str = "sum") -> Query:
    return Query(by_pool(values, _ROLES, how), legend(OF_POOL, what))


def _tokens(metric: Metric, what: str) -> Query:
    return _of_pool(rate(metric), what)


_RUNNING, _WAITING = (
    by_pool(f"avg_over_time({gauge(metric)}[{RATE}])", _ROLES)
    for metric in (fact.REQUESTS_RUNNING, fact.REQUESTS_WAITING)
)

POOL_ROW = PanelRow(
    "Prefill and decode pools",
    (
        Panel(
            "Engines of a pool",
            "That the agents can scrape.",
            PanelUnit.NUMBER,
            (_of_pool(gauge(fact.REQUESTS_RUNNING), how="count"),),
        ),
        Panel(
            "Load of a pool",
            "Requests that run and wait over those that run. 1 is a pool with room; far above the "
            "load of the other pool it is too small.",
            PanelUnit.NUMBER,
            (Query(ratio(f"({_RUNNING}\n  + {_WAITING})", _RUNNING), legend(OF_POOL)),),
        ),
        Panel(
            "Requests that wait in each engine of a pool",
            "For capacity, not for KV values. If they wait in one pool and not in the other one, "
            "that pool is too small.",
            PanelUnit.NUMBER,
            (
                Query(
                    queue_by_pool(
                        gauge(fact.REQUESTS_WAITING_BY_REASON, eq("reason", "capacity")),
                        gauge(fact.REQUESTS_WAITING),
                        _ROLES,
                        RATE,
                    ),
                    legend(OF_POOL),
                ),
            ),
            thresholds=warn_above(SHORT_POOL_QUEUE, "orange"),
        ),
        Panel(
            "Requests that run in a pool",
            "In the batches of all its engines.",
            PanelUnit.NUMBER,
            (_of_pool(gauge(fact.REQUESTS_RUNNING)),),
        ),
        Panel(
            "Tokens of a pool",
            "Prompts of the prefill pool, and output of the decode pool, per second.",
            PanelUnit.PER_SECOND,
            (_tokens(fact.INPUT_TOKENS, "input"), _tokens(fact.OUTPUT_TOKENS, "output")),
        ),
        Panel(
            "KV cache of a pool",
            "Of its fullest engine.",
            PanelUnit.SHARE,
            (_of_pool(gauge(fact.KV_CACHE_USAGE), how="max"),),
            highest=1,
        ),
        Panel(
            "KV values that a pool transfers",
            "By NIXL at the receiver, by Mooncake at the sender.",
            PanelUnit.BYTES_PER_S,
            (_of_pool(rate(fact.KV_TRANSFER_BYTES)),),
        ),
        Panel(
            "KV transfers of a pool that failed",
            "Their requests compute the prompt again or fail.",
            PanelUnit.PER_SECOND,
            (_of_pool(rate(fact.KV_TRANSFERS_FAILED)),),
        ),
    ),
)
