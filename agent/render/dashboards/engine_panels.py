"""Panels on engines: queue, batch, caches, throughput, speculative decoding, health."""

from agent.catalog import engine_facts as fact
from agent.catalog import host_facts
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.catalog.thresholds import FULL_CACHE
from agent.render.dashboards.kv_transfer_panels import KV_TRANSFER_ROW
from agent.render.dashboards.latency_panels import LATENCY_ROWS, OWN_LATENCY_ROW
from agent.render.dashboards.panel_parts import Panel, PanelRow, PanelUnit, Query, warn_above
from agent.render.dashboards.panel_queries import (
    ENGINE,
    ENGINE_MODEL,
    RATE,
    by_engine,
    gauge,
    increase,
    legend,
    max_by,
    per_engine,
    rate,
    ratio,
    sum_by,
    total,
)
from agent.render.dashboards.panel_styles import STACKED, STATES
from agent.render.promql import by


def _rate(metric: Metric) -> str:
    return by(ENGINE_MODEL, rate(metric))


_RUNNING = by(ENGINE_MODEL, gauge(fact.REQUESTS_RUNNING))
_MOST_RUNNING = by(ENGINE_MODEL, gauge(fact.MAX_RUNNING_REQUESTS))
_STEP_TOKENS = ratio(_rate(fact.STEP_TOKENS), _rate(fact.STEPS))
_MOST_STEP_TOKENS = by(ENGINE_MODEL, gauge(fact.MAX_STEP_TOKENS), "max")
_QUEUE = (
    Panel(
        "Requests running and waiting",
        "Requests in the batch, requests that wait for it, and the most that may run. If requests "
        "wait while the batch has room, the KV cache is too small.",
        PanelUnit.NUMBER,
        (
            by_engine(fact.REQUESTS_RUNNING, "running"),
            by_engine(fact.REQUESTS_WAITING, "waiting"),
            by_engine(fact.MAX_RUNNING_REQUESTS, "maximum"),
        ),
    ),
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
        "it may compute. Full: limits hold requests back. Empty: the GPU has room. Only where the "
        "engine's limits are known.",
        PanelUnit.SHARE,
        (
            per_engine(ratio(_RUNNING, _MOST_RUNNING), "requests"),
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
)

_CACHES = (
    Panel(
        "KV cache in use",
        "Share of the KV cache held by live requests, of the fullest rank. Full is normal under "
        "load; full with requests that wait or start over is too small.",
        PanelUnit.SHARE,
        (max_by(ENGINE_MODEL, fact.KV_CACHE_USAGE),),
        thresholds=warn_above(FULL_CACHE),
        highest=1,
    ),
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
        "Requests that failed in the engine",
        "Failed, aborted and rejected requests, as far as the engine counts them.",
        PanelUnit.REQUESTS_PER_S,
        (
            Query(by(("reason",), rate(fact.REQUESTS_FAILED)), "failed {{reason}}"),
            total(fact.REQUESTS_ABORTED, "given up"),
            Query(by(("reason",), rate(fact.ADMISSION_REJECTIONS)), "turned away {{reason}}"),
        ),
    ),
)

_ACCEPTED = _rate(fact.SPEC_DECODE_ACCEPTED_TOKENS)
_DRAFTED = _rate(fact.SPEC_DECODE_DRAFT_TOKENS)
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
        (per_engine(ratio(_ACCEPTED, _rate(fact.SPEC_DECODE_DRAFTS))),),
    ),
    Panel(
        "Tokens drafted and accepted",
        "Tokens per second in drafts, and those that verification accepted.",
        PanelUnit.PER_SECOND,
        (per_engine(_DRAFTED, "drafted"), per_engine(_ACCEPTED, "accepted")),
    ),
)

_HEALTH = (
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
    Panel(
        "Time since the engine started",
        "A line that falls to 0 is a restart.",
        PanelUnit.SECONDS,
        (Query(f"time() - {by(ENGINE, gauge(fact.PROCESS_START_TIME), 'max')}", legend(ENGINE)),),
    ),
    Panel(
        "CPU of the engine's processes",
        "Cores in use, by the role of the process. A front near one core is a bottleneck that no "
        "GPU metric shows. Only where the agent sees the processes.",
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
)

ENGINE_ROWS = (
    *LATENCY_ROWS,
    PanelRow("Queue and batch", _QUEUE),
    PanelRow("KV cache and prefix cache", _CACHES),
    PanelRow("Throughput", _THROUGHPUT),
    PanelRow("Speculative decoding", _SPECULATION, closed=True),
    KV_TRANSFER_ROW,
    OWN_LATENCY_ROW,
    PanelRow("Health", _HEALTH),
)
