"""Panels on engines: health, queue, batch, caches, throughput, speculative decoding, host."""

from collections.abc import Iterable
from dataclasses import replace

from agent.catalog import engine_facts as fact
from agent.catalog import host_facts, routers
from agent.catalog import metrics as m
from agent.catalog.definitions import FULL_CACHE, UNEVEN_RANKS
from agent.catalog.metric import Metric
from agent.render.dashboards.latency_panels import LATENCY_ROWS, OWN_LATENCY_ROW, P95_BY_ENGINE
from agent.render.dashboards.panel_parts import (
    ENGINE,
    ENGINE_MODEL,
    RATE,
    STACKED,
    STATES,
    Panel,
    PanelRow,
    PanelUnit,
    Query,
    by_engine,
    gauge,
    increase,
    legend,
    max_by,
    per_engine,
    percentiles,
    rate,
    ratio,
    sum_by,
    summed,
    total,
    warn_above,
)
from agent.render.dashboards.pool_panels import POOL_ROW
from agent.render.promql import by


def _rate(metric: Metric) -> str:
    return by(ENGINE_MODEL, rate(metric))


_OF_TIER = (*ENGINE_MODEL, "tier")
_COMPUTED = f"({_rate(fact.INPUT_TOKENS)} - {_rate(fact.CACHED_INPUT_TOKENS)})"
_PREFILL = by(ENGINE_MODEL, summed(fact.PREFILL_TIME))


def _prefill_saved(found: Metric) -> str:
    """Seconds of prefill in each second: these tokens at the prefill time of a computed token."""
    return f"{_rate(found)}\n  * {_PREFILL}\n  / ({_COMPUTED} > 0)"


_PANELS = (
    Panel(
        "Offload: prefill saved and time of loading",
        "Seconds of each second. Saved is an estimate: the tokens that were loaded, at the prefill "
        "time of a computed token. If loading takes longer than it saves, the tier does not pay.",
        PanelUnit.NUMBER,
        (
            per_engine(_prefill_saved(fact.EXTERNAL_CACHE_HIT_TOKENS), "saved"),
            by_engine(fact.KV_OFFLOAD_LOAD_TIME, "loading"),
            sum_by(_OF_TIER, fact.KV_OFFLOAD_TIER_READ_TIME, "reading"),
        ),
    ),
    Panel(
        "Hits outside the GPU",
        "Share of the tokens looked up in offload tiers, LMCache or other engines that were found, "
        "and of the chunks looked up in each slower tier.",
        PanelUnit.SHARE,
        (
            per_engine(
                ratio(
                    _rate(fact.EXTERNAL_CACHE_HIT_TOKENS), _rate(fact.EXTERNAL_CACHE_QUERY_TOKENS)
                ),
                "tokens",
            ),
            Query(
                ratio(
                    by(_OF_TIER, rate(fact.KV_OFFLOAD_TIER_HITS)),
                    by(_OF_TIER, rate(fact.KV_OFFLOAD_TIER_QUERIES)),
                ),
                legend(_OF_TIER),
            ),
        ),
        highest=1,
    ),
    Panel(
        "Offloaded KV values loaded",
        "Into the GPU. Over the time of loading this is the speed of the tier.",
        PanelUnit.BYTES_PER_S,
        (by_engine(fact.KV_OFFLOAD_LOAD_BYTES),),
    ),
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

KV_TRANSFER_ROW = PanelRow("KV transfer and offload", _PANELS)


RUNNING = by(ENGINE_MODEL, gauge(fact.REQUESTS_RUNNING))
MOST_RUNNING = by(ENGINE_MODEL, gauge(fact.MAX_RUNNING_REQUESTS))
_STEP_TOKENS = ratio(_rate(fact.STEP_TOKENS), _rate(fact.STEPS))
_MOST_STEP_TOKENS = by(ENGINE_MODEL, gauge(fact.MAX_STEP_TOKENS), "max")
RUNNING_AND_WAITING = Panel(
    "Requests running and waiting",
    "Requests in the batch, requests that wait for it, and the most that may run. If requests "
    "wait while the batch has room, the KV cache is too small.",
    PanelUnit.NUMBER,
    (
        by_engine(fact.REQUESTS_RUNNING, "running"),
        by_engine(fact.REQUESTS_WAITING, "waiting"),
        by_engine(fact.MAX_RUNNING_REQUESTS, "maximum"),
    ),
)
_QUEUE = (
    Panel(
        "Waiting by reason",
        "Requests that wait, by the engine's own reasons.",
        PanelUnit.NUMBER,
        (sum_by(("engine", "reason"), fact.REQUESTS_WAITING_BY_REASON),),
        style=STACKED,
    ),
    Panel(
        "Batch fill",
        "Requests in the batch over the most that may run, and tokens of a step over the most that "
        "it may compute. Full: limits hold requests back. Empty: the GPU has room. Only if the "
        "engine's limits are known.",
        PanelUnit.SHARE,
        (
            per_engine(ratio(RUNNING, MOST_RUNNING), "requests"),
            per_engine(f"{_STEP_TOKENS}\n  / {_MOST_STEP_TOKENS}", "tokens"),
        ),
        highest=1,
    ),
    Panel(
        "Tokens per step",
        "Tokens that one step computes, input and output together.",
        PanelUnit.NUMBER,
        (per_engine(_STEP_TOKENS),),
    ),
    Panel(
        "Steps",
        "Steps per second that gave output. None while requests run is a hang.",
        PanelUnit.OPERATIONS_PER_S,
        (by_engine(fact.STEPS),),
    ),
    Panel(
        "Preemptions",
        "Running requests that lost their place because the KV cache was full; each computes its "
        "prompt again. Now and then is harmless; a steady rate is a batch too large for the cache.",
        PanelUnit.PER_SECOND,
        (by_engine(fact.PREEMPTIONS),),
    ),
    Panel(
        "Time since the last step",
        "Since a step of the engine came from its plugin; it grows while the engine is idle.",
        PanelUnit.SECONDS,
        (Query(f"time() - {by(('engine',), gauge(m.PLUGIN_LAST_STEP), 'max')}", "{{engine}}"),),
    ),
    Panel(
        "Open requests of engines' fronts",
        "Requests that arrived and have not ended, and those of them whose response began and "
        "has had no event for 10 s. An engine whose plugin keeps none is not shown.",
        PanelUnit.NUMBER,
        (
            Query(by(("engine",), gauge(m.OPEN_REQUESTS)), "{{engine}} open"),
            Query(by(("engine",), gauge(m.STALLED_REQUESTS)), "{{engine}} stalled"),
        ),
    ),
)

_KV_IN_USE = Panel(
    "KV cache in use",
    "Share of the KV cache held by live requests, of the fullest rank. Full is normal under "
    "load; full with requests that wait or start over is too small.",
    PanelUnit.SHARE,
    (max_by(ENGINE_MODEL, fact.KV_CACHE_USAGE),),
    thresholds=warn_above(FULL_CACHE),
    highest=1,
)
_CACHES = (
    Panel(
        "Prefix cache hits",
        "Share of the tokens looked up in the prefix cache that were found. After a sudden fall "
        "every prompt is slower and costs more.",
        PanelUnit.SHARE,
        (
            per_engine(
                ratio(_rate(fact.PREFIX_CACHE_HIT_TOKENS), _rate(fact.PREFIX_CACHE_QUERY_TOKENS))
            ),
        ),
        highest=1,
    ),
    Panel(
        "Input tokens, computed and cached",
        "Prompt tokens by the origin of their KV values.",
        PanelUnit.PER_SECOND,
        (
            sum_by(("source",), fact.INPUT_TOKENS_BY_SOURCE),
            total(fact.CACHED_INPUT_TOKENS, "from a cache"),
        ),
    ),
    Panel(
        "Prefill saved by caches",
        "Seconds of each second. Saved is an estimate: the cached tokens at the prefill time of a "
        "computed token. Spent is the prefill that was left.",
        PanelUnit.NUMBER,
        (
            per_engine(_prefill_saved(fact.CACHED_INPUT_TOKENS), "saved"),
            per_engine(_PREFILL, "spent"),
        ),
    ),
)

_FAILED = Panel(
    "Requests that failed in the engine",
    "Failed, aborted and rejected requests, as far as the engine counts them.",
    PanelUnit.REQUESTS_PER_S,
    (
        Query(by(("reason",), rate(fact.REQUESTS_FAILED)), "failed {{reason}}"),
        total(fact.REQUESTS_ABORTED, "given up"),
        Query(by(("reason",), rate(fact.ADMISSION_REJECTIONS)), "turned away {{reason}}"),
    ),
)
_THROUGHPUT = (
    Panel(
        "Tokens in and out",
        "Tokens per second by the engine's own count. Input is cheap, output is not.",
        PanelUnit.PER_SECOND,
        (by_engine(fact.INPUT_TOKENS, "input"), by_engine(fact.OUTPUT_TOKENS, "output")),
    ),
    Panel(
        "Requests by finish reason",
        "Requests that the engine finished, by its own reason. Many of `length` are outputs cut "
        "off at a limit.",
        PanelUnit.REQUESTS_PER_S,
        (sum_by(("finish_reason",), fact.REQUESTS_FINISHED),),
        style=STACKED,
    ),
    Panel(
        "Responses of other routes",
        "Responses that have no row, such as embeddings, by class of status, as the engine's "
        "plugin and the proxy count them.",
        PanelUnit.PER_SECOND,
        (
            sum_by(("engine", "route", "status"), m.ENGINE_RESPONSES),
            sum_by(("engine", "route", "status"), m.PROXY_RESPONSES, "by the proxy"),
        ),
    ),
)

_ACCEPTED = _rate(fact.SPEC_DECODE_ACCEPTED_TOKENS)
_DRAFTED = _rate(fact.SPEC_DECODE_DRAFT_TOKENS)
# Tokens of a draft that were kept, and that were verified, with the one that the model adds.
_DRAFTS = _rate(fact.SPEC_DECODE_DRAFTS)
_ACCEPTED_LENGTH = f"(1 + {ratio(_ACCEPTED, _DRAFTS)})"
_VERIFIED = f"(1 + {ratio(_DRAFTED, _DRAFTS)})"
_OF_POSITION = (*ENGINE_MODEL, "position")
_SPECULATION = (
    Panel(
        "Draft tokens accepted",
        "Share of the drafted tokens that verification accepted. If it is low, speculation costs "
        "more than it saves.",
        PanelUnit.SHARE,
        (per_engine(ratio(_ACCEPTED, _DRAFTED)),),
        highest=1,
    ),
    Panel(
        "Accepted tokens per draft",
        "Accepted tokens of each draft; the model itself adds one more.",
        PanelUnit.NUMBER,
        (per_engine(ratio(_ACCEPTED, _DRAFTS)),),
    ),
    Panel(
        "Drafts accepted by position",
        "Share of the drafts whose token at this position was accepted, the first is 0. A position "
        "near 0 is computed in vain: set num_speculative_tokens to the number of those before it.",
        PanelUnit.SHARE,
        (
            Query(
                f"{by(_OF_POSITION, rate(fact.SPEC_DECODE_ACCEPTED_BY_POSITION))}\n"
                f"  / on (engine, model) group_left () ({_DRAFTS} > 0)",
                legend(_OF_POSITION),
            ),
        ),
        highest=1,
    ),
    Panel(
        "Tokens drafted and accepted",
        "Tokens per second in drafts, and those that verification accepted.",
        PanelUnit.PER_SECOND,
        (per_engine(_DRAFTED, "drafted"), per_engine(_ACCEPTED, "accepted")),
    ),
    Panel(
        "Speed by drafts, at least and at most",
        "Tokens per second with drafts over those without. At most: all steps take the same time, "
        "as while the GPU waits for memory. At least: a step takes as long as its tokens. Below 1 "
        "at most, drafts cost more than they save.",
        PanelUnit.NUMBER,
        (
            per_engine(f"{_ACCEPTED_LENGTH}\n  / {_VERIFIED}", "at least"),
            per_engine(_ACCEPTED_LENGTH, "at most"),
        ),
    ),
)

_RANKS = (
    Panel(
        "Skew of data-parallel ranks",
        "The highest of the ranks over their mean, each over 5 minutes. 1 is even; at 2 the "
        "busiest rank has twice its part, and requests wait there while others have room. With "
        "experts all ranks step together, at the pace of the slowest.",
        PanelUnit.NUMBER,
        (max_by((*ENGINE, "measure"), m.RANK_SKEW),),
        thresholds=warn_above(UNEVEN_RANKS),
    ),
    Panel(
        "Requests by rank",
        "Requests in the batch of each data-parallel rank, and those that wait for it.",
        PanelUnit.NUMBER,
        (
            max_by((*ENGINE, "rank"), m.RANK_REQUESTS_RUNNING, "running"),
            max_by((*ENGINE, "rank"), m.RANK_REQUESTS_WAITING, "waiting"),
        ),
    ),
    Panel(
        "KV cache in use by rank",
        "Share of each rank's KV cache held by live requests. One rank far above the others has "
        "the long prompts.",
        PanelUnit.SHARE,
        (max_by((*ENGINE, "rank"), m.RANK_KV_CACHE_USAGE),),
        thresholds=warn_above(FULL_CACHE),
        highest=1,
    ),
    Panel(
        "Time of a step by rank",
        "Mean time between two outputs of a request, over 5 minutes. One rank far above the others "
        "with no more requests has a slow GPU or a busy host.",
        PanelUnit.SECONDS,
        (max_by((*ENGINE, "rank"), m.RANK_STEP_TIME),),
    ),
    Panel(
        "Balance of experts",
        "Mean load of the ranks' experts over the highest, by the lines of vLLM's EPLB in its log. "
        "1 is even; at 0.5 each expert layer takes twice as long as it could.",
        PanelUnit.SHARE,
        (max_by(ENGINE, host_facts.EXPERT_BALANCE),),
        highest=1,
    ),
)

STATE_OF_ENGINES = Panel(
    "State of engines",
    "What the probes of each engine report. Not alive: stalled and dead. Alive and not ready: "
    "loading, paused and unreachable.",
    PanelUnit.NUMBER,
    (max_by((*ENGINE, "state"), m.ENGINE_STATE),),
    style=STATES,
    highest=1,
)
_HEALTH = (
    STATE_OF_ENGINES,
    Panel(
        "Engines up",
        "1 while scrapes of the engine succeed.",
        PanelUnit.NUMBER,
        (max_by(ENGINE, m.ENGINE_UP), max_by(ENGINE, fact.AWAKE, "awake")),
        style=STATES,
        highest=1,
        thresholds=warn_above(1, "green"),
    ),
    Panel(
        "Events",
        "Events of engines, by kind. Each is listed with its evidence at /api/v1/events of the "
        "agent.",
        PanelUnit.NUMBER,
        (Query(by((*ENGINE, "kind"), increase(m.ENGINE_EVENTS, RATE)), legend((*ENGINE, "kind"))),),
    ),
)

_HOST = (
    Panel(
        "Last start by phase",
        "Seconds of each phase of the last start that the agent saw, from the engine's spans. More "
        "weights: disk or hub. More compile: a cache that was lost.",
        PanelUnit.SECONDS,
        (max_by((*ENGINE, "phase"), m.ENGINE_START),),
        style=STACKED,
    ),
    Panel(
        "Time since the engine started",
        "A line that falls to 0 is a restart.",
        PanelUnit.SECONDS,
        (Query(f"time() - {by(ENGINE, gauge(fact.PROCESS_START_TIME), 'max')}", legend(ENGINE)),),
    ),
    Panel(
        "CPU of the engine's processes",
        "Cores in use, by the role of the process. A front near one core is a bottleneck that no "
        "GPU metric shows. Only if the agent sees the processes.",
        PanelUnit.NUMBER,
        (sum_by(("engine", "role"), host_facts.CPU),),
    ),
    Panel(
        "Host memory of the engine",
        "Memory in use in the engine's cgroup, page cache included, and its limit.",
        PanelUnit.BYTES,
        (
            max_by(ENGINE, host_facts.MEMORY_USAGE),
            max_by(ENGINE, host_facts.MEMORY_LIMIT, "limit"),
        ),
    ),
    Panel(
        "Processes killed as memory ran out",
        "By the kernel, in the engine's cgroup.",
        PanelUnit.PER_SECOND,
        (sum_by(ENGINE, host_facts.OOM_KILLS),),
    ),
    Panel(
        "Frontend",
        "The frontend of vLLM. Only the one in Rust counts requests that clients aborted.",
        PanelUnit.NUMBER,
        (max_by((*ENGINE, "frontend"), fact.FRONTEND),),
    ),
)

_PROXY = (
    Panel(
        "Rotation of the proxy",
        "Share of the proxy's workers that send new requests to the engine. 0 while it is ejected "
        "because its requests fail, or unhealthy.",
        PanelUnit.SHARE,
        (max_by(ENGINE, m.PROXY_IN_ROTATION),),
        highest=1,
    ),
    Panel(
        "Ejections and retries",
        "Ejections of engines by reason, requests that another engine got instead, and requests "
        "that went to a failing engine because no other one was left.",
        PanelUnit.PER_SECOND,
        (
            sum_by(("engine", "reason"), m.PROXY_EJECTIONS),
            sum_by(("engine",), m.PROXY_RETRIED, "retried"),
            total(m.PROXY_FORCED, "no engine left"),
        ),
    ),
)

_ROUTER = ("router",)
_ROUTER_REASON = ("router", "reason")
_ROUTERS = (
    Panel(
        "Requests in routers",
        "Requests that a router holds in its own queue, and those that it sent on. Only of routers "
        "in the agents' settings.",
        PanelUnit.NUMBER,
        (
            max_by(_ROUTER, routers.ROUTER_WAITING, "waiting"),
            max_by(_ROUTER, routers.ROUTER_RUNNING, "running"),
        ),
    ),
    Panel(
        "Ready engines of routers",
        "Engines that a router holds for ready, and 0 for a router that cannot be read.",
        PanelUnit.NUMBER,
        (
            max_by(_ROUTER, routers.ROUTER_ENDPOINTS, "ready"),
            max_by(_ROUTER, routers.ROUTER_UP, "up"),
        ),
    ),
    Panel(
        "Errors and rejections of routers",
        "Requests that a router counted, those that ended in an error, and those that it refused "
        "or dropped from its queue, by its own reason.",
        PanelUnit.REQUESTS_PER_S,
        (
            max_by(_ROUTER, routers.ROUTER_REQUESTS, "requests"),
            max_by(_ROUTER_REASON, routers.ROUTER_ERRORS, "errors"),
            max_by(_ROUTER_REASON, routers.ROUTER_REJECTIONS, "rejected"),
        ),
    ),
)

_WATCHING = (
    Panel(
        "Time of a scrape",
        "How long the agent waited for the engine's exposition.",
        PanelUnit.SECONDS,
        (max_by(ENGINE, fact.SCRAPE_DURATION),),
    ),
    Panel(
        "Facts that are gone",
        "The engine gave them before and gives them no more: an upgrade may have renamed them.",
        PanelUnit.NUMBER,
        (max_by((*ENGINE, "fact"), fact.FACT_MISSING),),
    ),
    Panel(
        "Plugins that are there",
        "1 for an engine whose plugin was heard of in the last 30 s. An engine without a "
        "`plugin_socket` is not shown before its plugin is heard of.",
        PanelUnit.NUMBER,
        (Query(by(("engine",), gauge(m.PLUGIN_UP), "max"), "{{engine}}"),),
    ),
)

_AT_FIRST = (*P95_BY_ENGINE, RUNNING_AND_WAITING, _KV_IN_USE, _FAILED)


def _low(panels: Iterable[Panel], height: int) -> tuple[Panel, ...]:
    """The panels so low that the first two rows fit on a screen."""
    return tuple(replace(panel, height=height) for panel in panels)


ENGINE_ROWS = (
    PanelRow("Health", _low(_HEALTH, 6)),
    PanelRow("Latency and load by engine", _low(_AT_FIRST, 7)),
    *LATENCY_ROWS,
    PanelRow("Queue and batch", _QUEUE),
    PanelRow("Prefix cache", _CACHES),
    PanelRow("Throughput", _THROUGHPUT),
    PanelRow("Starts, processes and host", _HOST),
    PanelRow("Proxy", _PROXY),
    PanelRow("Routers", _ROUTERS),
    PanelRow("Speculative decoding", _SPECULATION),
    PanelRow("Data-parallel ranks and experts", _RANKS),
    KV_TRANSFER_ROW,
    POOL_ROW,
    OWN_LATENCY_ROW,
    PanelRow("Scrapes and plugins", _WATCHING),
)
