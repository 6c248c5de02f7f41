"""A meter in a fixed state that covers all kinds of published metrics."""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from agent.analysis.quantiles import bin_of
from agent.catalog import engine_facts as facts
from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.causes import Cause
from agent.catalog.metric import Kind, Metric
from agent.catalog.reasons import (
    EjectionReason,
    ExportRefused,
    FiguresMissing,
    ForwardDropped,
    LostRows,
    StoreWrite,
)
from agent.outputs.prometheus.agent_exposition import AgentExposition, HostBoard
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import (
    CgroupMemory,
    EngineProcess,
    EngineSample,
    HistogramSnapshot,
    HostSample,
    LogSample,
    ProcessRole,
)
from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import CauseShare, ExplainedRequest, Explanation, Match
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.records.making import NOON, judged, objective, record

TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
INFO = ("agent-0", "1.2.3", "false")

OBJECTIVES = (
    objective("chat", ttft_s=0.2, tpot_s=0.12),
    objective("long", ttft_s=0.77, e2e_s=33.0, target=0.9, match=Match(min_input_tokens=1001)),
)

SAMPLE = EngineSample(
    engine="chat-0",
    at=NOON,
    dialect="vllm",
    model="llama",
    facts={
        (facts.REQUESTS_RUNNING.name, ()): 3.0,
        (facts.KV_CACHE_USAGE.name, ()): 0.25,
        (facts.REQUESTS_FINISHED.name, ("stop",)): 40.0,
        (facts.REQUESTS_FINISHED.name, ("length",)): 2.0,
        (facts.PROCESS_START_TIME.name, ()): 1790000000.5,
    },
    histograms={
        name: HistogramSnapshot((0.3, 1.0, inf), (40.0, 41.0, 42.0), 5.5)
        for name in (facts.QUEUE_TIME.name, facts.TIME_TO_FIRST_TOKEN.name)
    },
)

# Every fact of an engine; those without buckets have the values 1, 2, 3...
COUNTS = [fact for fact in facts.ENGINE_FACTS if fact.kind is not Kind.HISTOGRAM]
FULL_SAMPLE = replace(
    SAMPLE,
    facts={(fact.name, ("x",) * len(fact.labels)): float(n) for n, fact in enumerate(COUNTS, 1)},
    histograms={
        fact.name: SAMPLE.histograms[facts.QUEUE_TIME.name]
        for fact in facts.ENGINE_FACTS
        if fact.kind is Kind.HISTOGRAM
    },
)

JOINED = record(
    5,
    vantage=Vantage.JOINED,
    max_gap_s=0.2,
    proxied=ProxyView(first_visible_s=0.15, gaps={bin_of(0.01): 3, bin_of(0.2): 1}),
    engine_view=EngineView(holdback_s=0.004),
)
HOST_SAMPLE = HostSample(
    at=NOON,
    processes=(
        EngineProcess(
            pid=7,
            started_after_boot_s=1.0,
            role=ProcessRole.FRONT,
            name="VLLM::APIServer",
            state="S",
            cpu_s=12.5,
        ),
    ),
    cgroup=CgroupMemory(
        version=2, path="/engine", inode=1, usage_bytes=900, limit_bytes=1000, oom_kills=0
    ),
    log=LogSample(lines=1, expert_balance=0.75),
)


# Of values that other parts of the agent give the meter: the metric, its labels and the value.
Given = tuple[Metric, tuple[str, ...], float]
GAUGES: tuple[Given, ...] = (
    (m.ENGINE_STATE, ("chat-0", "ok"), 1),
    (m.ENGINE_ROLE, ("chat-0", "decode"), 1),
    (m.ENGINE_START, ("chat-0", "weights"), 12.5),
    (m.RANK_REQUESTS_RUNNING, ("chat-0", "llama", "0"), 4),
    (m.RANK_REQUESTS_WAITING, ("chat-0", "llama", "0"), 2),
    (m.RANK_KV_CACHE_USAGE, ("chat-0", "llama", "0"), 0.5),
    (m.RANK_STEP_TIME, ("chat-0", "llama", "0"), 0.25),
    (m.RANK_SKEW, ("chat-0", "llama", "requests"), 1.5),
    (m.PLUGIN_UP, ("chat-0",), 1),
    (m.PLUGIN_LAST_STEP, ("chat-0",), 1_790_000_000.5),
    (m.OPEN_REQUESTS, ("chat-0",), 12),
    (m.STALLED_REQUESTS, ("chat-0",), 2),
    (m.PROXY_OPEN, (), 3),
    (m.PROXY_WAITING, (), 0),
    (m.PROXY_IN_ROTATION, ("chat-0",), 0.5),
    (m.ARRIVAL_RATE, ("chat-0", "llama"), 2.5),
    (m.SLO_P90_TO_LIMIT, ("chat", "chat-0", "llama", "1m"), 0.75),
    (m.SLO_HELD_RATE, ("chat", "chat-0", "llama", m.LIMIT_FOUND), 4),
    (m.SLO_HELD_RATE_AGE, ("chat", "chat-0", "llama"), 90),
    (m.SLO_HELD_RATE_CONFIDENCE, ("chat", "chat-0", "llama"), 0.875),
    (m.SLO_REPLICAS_NEEDED, ("chat", "chat-0", "llama"), 0.625),
    (m.STORE_WAITING, (), 7),
    (m.FORWARD_QUEUE, (), 1024),
    (m.UNPUBLISHED_ROWS, (), 12),
    (m.PUBLISH_LAG, (), 0.25),
    (m.FILE_BYTES, (), 1_048_576),
    (own.STAGE_LAG, ("fold",), 12.5),
    (own.QUEUE_FILL, ("commit",), 0.75),
    (own.NEWEST_ROW, ("requests",), 1_790_000_001.5),
    (own.DATABASE_SIZE, (), 4096),
    (own.UNREADABLE_ROWS, ("rollups",), 9),
    (own.JOB_LATE, ("fold rollups",), 0.125),
    (own.DISCOVERED_ENGINES, ("llm",), 2),
    (own.DISCOVERY_FAILURES, ("llm", "watch", own.DiscoveryFailure.GONE), 11),
    (own.DISCOVERY_SUCCESS, ("llm",), 1_790_000_002.5),
)
COUNTERS: tuple[tuple[Metric, tuple[str, ...], int], ...] = (
    (m.PROXY_EJECTIONS, ("chat-0", EjectionReason.ERROR), 2),
    (m.PROXY_RETRIED, ("chat-0",), 3),
    (m.PROXY_FORCED, (), 0),
    (m.PROXY_RESPONSES, ("chat-0", "/v1/embeddings", "2xx"), 12),
    (m.PUBLISHED_ROWS, (), 4000),
    (m.LOST_ROWS, (LostRows.AGE,), 5),
    (own.JOB_MISSES, ("fold rollups", own.JobMiss.SKIPPED), 6),
    (own.METRICS_PUSHED, (), 40),
    (own.PUSH_DROPPED, (ForwardDropped.UNREACHABLE,), 8),
    (own.PUSH_POINTS_REJECTED, (), 10),
)


@dataclass(slots=True)
class Spans:
    """The counts of spans in one export."""

    passed: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    screened: Counter[tuple[str, str]] = field(default_factory=Counter)


def count(meter: Meter, *records: RequestRecord, sent: int | None = None) -> None:
    """Count these requests as new, of `sent` requests that were written."""
    new = judged(records, meter.objectives)
    meter.stored(new, sent=len(new) if sent is None else sent, new=len(new))


def exposition_of(meter: Meter, accept: str = TEXT) -> str:
    hosts = HostBoard()
    hosts.sample("chat-0", HOST_SAMPLE)
    body, _ = AgentExposition(meter, INFO, hosts=hosts).render(accept)
    return body.decode()


def filled_meter() -> Meter:
    """Return a meter after five requests, with one engine that is read and one that is not."""
    meter = Meter(OBJECTIVES, ["chat-0", "chat-1"])
    count(
        meter,
        record(1),
        record(2, ttft_s=0.3, input_tokens=2000, e2e_s=40.0),
        record(3, status=Status.ERROR, ttft_s=None, tpot_s=None, output_tokens=0),
        record(4, engine="chat-1", model=None, tpot_s=None, output_tokens=1),
        JOINED,
        sent=7,
    )
    slow = judged([record(2, ttft_s=0.3)], OBJECTIVES)[0]
    share = CauseShare("chat", "ttft", Cause.KV_PRESSURE, 0.1, ("the KV cache was full",))
    why = Explanation(slow.record.trace_id, slow.record.span_id, share.cause, (share,), ("span",))
    meter.explained([ExplainedRequest(slow, why)])
    meter.exported(
        Spans(2, Counter(id_length=1, span_times=2), Counter({("queue_s", "negative"): 3}))
    )
    meter.refused(ExportRefused.TOO_LARGE)
    meter.forwarded()
    meter.forward_dropped("queue_full")
    meter.store_failed(StoreWrite.REQUESTS)
    meter.gpu_failed("no_driver")
    meter.sample(SAMPLE)
    meter.scrape_failed("chat-1", "connection")
    meter.event(
        Event(at=NOON, engine="chat-1", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)
    )
    meter.proxy_failed("store_behind")
    meter.plugin_counted("chat-0", "/v1/embeddings", 2, 7)
    meter.figures_missing("chat-0", FiguresMissing.GPU_UNKNOWN)
    for gauge, labels, value in GAUGES:
        meter.gauge(gauge, partial(float, value), *labels)
    for counter, labels, value in COUNTERS:
        meter.count(counter, *labels, by=value)
    return meter
