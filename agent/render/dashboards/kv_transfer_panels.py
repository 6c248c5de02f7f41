"""Panels on KV values that leave an engine: transfers between engines, and offloading."""

from agent.catalog import engine_facts as fact
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit
from agent.render.dashboards.panel_queries import ENGINE, by_engine, percentiles

_PANELS = (
    Panel(
        "Time of a KV transfer",
        "One transfer between engines, by NIXL or Mooncake.",
        PanelUnit.SECONDS,
        percentiles(fact.KV_TRANSFER_TIME, ENGINE, "{{engine}} "),
    ),
    Panel(
        "KV values transferred",
        "Between engines.",
        PanelUnit.BYTES_PER_S,
        (by_engine(fact.KV_TRANSFER_BYTES),),
    ),
    Panel(
        "KV transfers that failed",
        "Their requests compute the prompt again or fail.",
        PanelUnit.PER_SECOND,
        (by_engine(fact.KV_TRANSFERS_FAILED),),
    ),
    Panel(
        "Tokens in the memory for offloaded KV values",
        "The most that the host memory of all ranks holds.",
        PanelUnit.NUMBER,
        (by_engine(fact.KV_OFFLOAD_CAPACITY_TOKENS),),
    ),
    Panel(
        "Memory for offloaded KV values",
        "Host memory of all ranks.",
        PanelUnit.BYTES,
        (by_engine(fact.KV_OFFLOAD_CAPACITY_BYTES),),
    ),
    Panel(
        "Time to fetch offloaded KV values",
        "From a slower tier into host memory, failed attempts included.",
        PanelUnit.SECONDS,
        percentiles(fact.KV_OFFLOAD_PROMOTION_TIME, ENGINE, "{{engine}} "),
    ),
)

KV_TRANSFER_ROW = PanelRow("KV transfer and offload", _PANELS, closed=True)
