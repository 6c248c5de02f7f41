"""Counters of the meter, also before the first event."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as read_text

from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.causes import Cause
from agent.catalog.gpu_facts import XID_ERRORS
from agent.catalog.metric import Kind, Metric
from agent.catalog.metrics import OTHER, UNKNOWN
from agent.catalog.reasons import (
    FORWARDS_DROPPED,
    PUSHES_DROPPED,
    SCRAPES_FAILED,
    VALUES_DROPPED,
    ExportRefused,
    FiguresMissing,
    LostRows,
    ProxyFailure,
    SpanRejected,
    StoreWrite,
)
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import (
    FORGOTTEN_AFTER_S,
    FULL_FORGOTTEN_AFTER_S,
    MAX_SERVED,
    MAX_UNCONFIGURED,
    Meter,
    MeterSnapshot,
)
from agent.records.engine import EngineSample
from agent.records.event import EventKind
from agent.records.gpu import Facts, GpuSample
from agent.records.objective import CauseShare, ExplainedRequest, Explanation, Match
from agent.records.request import Status
from agent.sources.dcgm.exporter_gpus import XidCounts, XidSeries
from agent.sources.nvml.xid_events import XidErrors
from tests.outputs.prometheus.filled import INFO, OBJECTIVES, SAMPLE, count
from tests.records.making import NOON, judged, objective, record
from tests.render.alerts.cases import expressions, selects, series_of

VERDICTS = ("met", "missed", "undetermined")
AT_ENGINE = ("chat-0", "llama", "engine")
CHAT = objective("chat", ttft_s=0.2)
LONG = objective("long", ttft_s=1.0, match=Match(min_input_tokens=1000))


def slo(snapshot: MeterSnapshot, name: str = "chat") -> Mapping[str, float]:
    counted = dict.fromkeys(VERDICTS, 0.0)
    for (of, _, _, verdict), requests in snapshot.counters[m.SLO_REQUESTS].items():
        counted[verdict] += requests if of == name else 0
    return counted


def test_counters_of_every_verdict_objective_and_engine_start_at_zero() -> None:
    counters = Meter((CHAT, LONG), ["a", "b"]).snapshot().counters
    expected = set(product(("chat", "long"), ("a", "b"), (UNKNOWN,), VERDICTS))
    assert counters[m.SLO_REQUESTS] == dict.fromkeys(expected, 0)
    assert counters[m.SLO_OUTPUT_TOKENS] == dict.fromkeys(expected, 0)
    assert counters[m.REQUESTS] == dict.fromkeys(product("ab", (UNKNOWN,), Status), 0)
    of_no_engine = product((UNKNOWN,), (EventKind.GPU_FAULT, EventKind.PROXY_WORKER_DIED))
    expected_events = [*product("ab", EventKind), *of_no_engine]
    assert counters[m.ENGINE_EVENTS] == dict.fromkeys(expected_events, 0)
    scrapes = ("ok", *SCRAPES_FAILED)
    assert counters[m.SCRAPES] == dict.fromkeys(product("ab", scrapes), 0)
    outcomes = ("stored", "duplicate", "passed", "rejected")
    assert counters[m.SPANS] == {(outcome,): 0 for outcome in outcomes}


def test_counters_of_every_loss_start_at_zero() -> None:
    counters = Meter((), ["a", "b"]).snapshot().counters
    for metric, reasons in (
        (m.EXPORTS_REFUSED, ExportRefused),
        (m.SPANS_REJECTED, SpanRejected),
        (m.FORWARD_DROPPED, FORWARDS_DROPPED),
        (m.PROXY_FAILURES, ProxyFailure),
        (m.STORE_FAILURES, StoreWrite),
    ):
        assert counters[metric] == {(reason,): 0 for reason in reasons}
    assert counters[m.VALUES_DROPPED] == dict.fromkeys(VALUES_DROPPED, 0)
    assert counters[m.FIGURES_MISSING] == dict.fromkeys(product("ab", FiguresMissing), 0)


def test_each_request_counts_once_for_each_objective_that_covers_it() -> None:
    meter = Meter((CHAT, LONG), ["chat-0"])
    count(
        meter,
        record(1),
        record(2, ttft_s=0.5),
        record(3, ttft_s=0.5, input_tokens=1000),
        record(4, ttft_s=None),
        record(5, status=Status.TIMEOUT),
    )
    snapshot = meter.snapshot()
    assert slo(snapshot) == {"met": 1, "missed": 3, "undetermined": 1}
    assert slo(snapshot, "long") == {"met": 1, "missed": 0, "undetermined": 0}
    tokens = snapshot.counters[m.SLO_OUTPUT_TOKENS]
    assert tokens["chat", "chat-0", "llama", "missed"] == 63
    assert snapshot.counters[m.REQUESTS]["chat-0", "llama", Status.TIMEOUT] == 1
    assert snapshot.counters[m.REQUESTS]["chat-0", "llama", Status.OK] == 4
    assert snapshot.counters[m.INPUT_TOKENS]["chat-0", "llama"] == 1400
    assert snapshot.counters[m.OUTPUT_TOKENS]["chat-0", "llama"] == 105


def test_an_objective_of_other_models_has_no_series_of_an_engines_model() -> None:
    """Ten objectives of ten models on ten engines would else be 6,000 series of verdicts."""
    llamas = objective("llamas", ttft_s=0.2, match=Match(model="lla*"))
    geese = objective("geese", ttft_s=0.2, match=Match(model="goose"))
    meter = Meter((llamas, geese), ["chat-0"])
    meter.sample(SAMPLE)
    counters = meter.snapshot().counters
    assert counters[m.SLO_MISSED_SECONDS] == {}
    for metric in (m.SLO_REQUESTS, m.SLO_OUTPUT_TOKENS):
        shown = {(name, model) for name, _, model, _ in counters[metric]}
        # Of requests without a model in their answer, what was asked for decides.
        assert shown == {("llamas", "llama"), ("llamas", UNKNOWN), ("geese", UNKNOWN)}


def test_excess_seconds_are_counted_by_cause_for_each_objective_and_limit() -> None:
    meter = Meter((CHAT, LONG), ["chat-0"])
    kv, burst = Cause.KV_PRESSURE, Cause.BURST
    shares = (
        CauseShare("chat", "ttft", kv, 0.5, ()),
        CauseShare("chat", "ttft", burst, 0.25, ()),
        CauseShare("long", "e2e", kv, 2.0, ()),
        CauseShare("long", "failure", kv, None, ()),
    )
    for item in judged([record(1), record(2)]):
        meter.explained([ExplainedRequest(item, Explanation("", "", kv, shares, ("span",)))])
    at = ("chat-0", "llama")
    assert meter.snapshot().counters[m.SLO_MISSED_SECONDS] == {
        ("chat", *at, "ttft", kv): 1.0,
        ("chat", *at, "ttft", burst): 0.5,
        ("long", *at, "e2e", kv): 4.0,
    }


def test_a_request_stored_before_is_counted_only_as_a_duplicate() -> None:
    meter = Meter((CHAT,), ["chat-0"])
    count(meter, record(1), sent=3)
    count(meter, sent=2)
    snapshot = meter.snapshot()
    assert snapshot.counters[m.SPANS]["stored",] == 1
    assert snapshot.counters[m.SPANS]["duplicate",] == 4
    assert sum(slo(snapshot).values()) == 1
    buckets = snapshot.histograms[m.DURATION, AT_ENGINE].buckets
    assert buckets[-1][1] == 1


@pytest.mark.parametrize(
    ("engine", "model", "labels"),
    [
        (None, "llama", (UNKNOWN, "llama")),
        (None, None, (UNKNOWN, UNKNOWN)),
        ("chat-0", "", ("chat-0", UNKNOWN)),
    ],
)
def test_an_unknown_engine_or_model_has_the_label_unknown(
    engine: str | None, model: str | None, labels: tuple[str, str]
) -> None:
    meter = Meter((CHAT,), [])
    count(meter, record(1, engine=engine, model=model))
    assert meter.snapshot().counters[m.SLO_REQUESTS]["chat", *labels, "met"] == 1


# Bounds and threads


SERVED = frozenset({"llama", "sql-adapter", "loaded-later"})


def test_invented_model_names_do_not_grow_the_exposition_without_limit() -> None:
    sent = 1500
    meter = Meter((CHAT,), ["chat-0"], SERVED.__contains__)
    for number in range(sent):
        count(meter, record(number, model=f"made-up-{number}"))
    count(meter, record(sent, engine="stranger", model="stray"))
    snapshot = meter.snapshot()
    shown = {(engine, model) for _, engine, model, _ in snapshot.counters[m.SLO_REQUESTS]}
    of_chat = {("chat-0", UNKNOWN), ("chat-0", OTHER)}
    assert {(OTHER, OTHER)} | of_chat < shown
    assert len(shown) == MAX_UNCONFIGURED + 3
    met = snapshot.counters[m.SLO_REQUESTS]["chat", "chat-0", OTHER, "met"]
    assert met == sent - MAX_UNCONFIGURED
    assert snapshot.counters[m.LABELS_REPLACED]["model",] == met + 1
    assert sum(slo(snapshot).values()) == sent + 1
    assert len({labels[:2] for _, labels in snapshot.histograms}) == MAX_UNCONFIGURED + 2
    # Served models never lose their labels to invented ones, nor do those that have some.
    for model in (*SERVED, "made-up-0"):
        count(meter, record(1, model=model))
    requests = meter.snapshot().counters[m.REQUESTS]
    assert {model: requests["chat-0", model, Status.OK] for model in SERVED} == dict.fromkeys(
        SERVED, 1
    )
    assert requests["chat-0", "made-up-0", Status.OK] == 2


@dataclass
class Clock:
    at_s: float = 0.0

    def __call__(self) -> float:
        return self.at_s


def models_of(meter: Meter, metric: Metric = m.REQUESTS) -> set[tuple[str, str]]:
    place = metric.labels.index("engine")
    pairs = {labels[place : place + 2] for labels in meter.snapshot().counters[metric]}
    return {(engine, model) for engine, model in pairs if model not in (UNKNOWN, OTHER)}


def test_a_thousand_served_models_share_the_labels_of_a_limit_and_no_count_is_lost() -> None:
    fine = objective("fine", ttft_s=0.2, match=Match(model="adapter-999"))
    meter = Meter((CHAT, fine), ["chat-0", "chat-1"], lambda _: True)
    for number in range(1000):
        count(meter, record(number, model=f"adapter-{number}"))
    meter.sample(replace(SAMPLE, engine="chat-1"))
    served = [f"adapter-{number}" for number in (*range(MAX_SERVED), 999)]
    # A model that an objective names has its label, and an engine that comes late has its own.
    assert models_of(meter) == {("chat-0", name) for name in served} | {("chat-1", "llama")}
    counters = meter.snapshot().counters
    assert counters[m.REQUESTS]["chat-0", OTHER, Status.OK] == 999 - MAX_SERVED
    assert sum(counters[m.REQUESTS].values()) == 1000
    assert counters[m.SLO_REQUESTS]["chat", "chat-0", OTHER, "met"] == 999 - MAX_SERVED
    assert counters[m.LABELS_REPLACED]["model",] == 999 - MAX_SERVED


def test_model_names_that_an_engine_gives_no_more_are_forgotten() -> None:
    clock = Clock()
    meter = Meter((CHAT,), ["chat-0"], monotonic=clock)
    for number in range(604):
        clock.at_s += 0.2
        meter.sample(replace(SAMPLE, model=f"name-{number}"))
        count(meter, record(number, model=f"name-{number}", ttft_s=0.1))
    snapshot = meter.snapshot()
    assert len(models_of(meter)) == MAX_SERVED + MAX_UNCONFIGURED
    shown = snapshot.samples["chat-0"]
    assert shown is not None
    assert shown.model == OTHER
    # The limits are reached, so an hour is enough.
    clock.at_s += FULL_FORGOTTEN_AFTER_S
    meter.sample(SAMPLE)
    assert models_of(meter) == models_of(meter, m.SLO_REQUESTS) == {("chat-0", "llama")}
    kept = {labels[:2] for _, labels in meter.snapshot().histograms}
    assert kept == {("chat-0", OTHER)}
    count(meter, record(700, model="name-0"))
    clock.at_s += FORGOTTEN_AFTER_S - 1
    meter.sample(SAMPLE)
    assert models_of(meter) == {("chat-0", "llama"), ("chat-0", "name-0")}
    clock.at_s += 1
    assert models_of(meter) == {("chat-0", "llama")}


def test_counts_are_exact_under_many_threads_and_each_snapshot_is_consistent() -> None:
    threads, batches, batch = 8, 25, 20
    meter = Meter((CHAT,), ["chat-0"])
    go = threading.Barrier(threads + 1)
    inconsistent: list[MeterSnapshot] = []

    def send(number: int) -> None:
        records = [
            record(n, ttft_s=0.1 if n % 2 else 0.3, engine=f"chat-{number % 2}")
            for n in range(batch)
        ]
        new = judged(records, (CHAT,))
        go.wait()
        for _ in range(batches):
            meter.stored(new, sent=batch + 1, new=batch)

    senders = [threading.Thread(target=send, args=(number,)) for number in range(threads)]
    for sender in senders:
        sender.start()
    go.wait()
    while any(sender.is_alive() for sender in senders):
        snapshot = meter.snapshot()
        ttfts = [each for (of, _), each in snapshot.histograms.items() if of is m.TTFT]
        observed = sum(each.buckets[-1][1] for each in ttfts)
        if not observed == sum(slo(snapshot).values()) == snapshot.counters[m.SPANS]["stored",]:
            inconsistent.append(snapshot)
    for sender in senders:
        sender.join()
    half = threads * batches * batch / 2
    assert inconsistent == []
    assert slo(meter.snapshot()) == {"met": half, "missed": half, "undetermined": 0}
    assert meter.snapshot().counters[m.SPANS]["duplicate",] == threads * batches


RULES = Path(__file__).parents[3] / "alerts" / "goodput-agent.yml"
GPU = "GPU-0"

_COUNTED = re.compile(r"\b(?:increase|rate)\(([\w:]+(?:\{(?:[^}\"]|\"[^\"]*\")*\})?)\[")
# Counters of the agent itself, not copied from an engine or a driver.
OWN = {f"{metric.name}_total" for metric in m.AGENT_METRICS if metric.kind is Kind.COUNTER}
OWN |= {f"{XID_ERRORS.name}_total"}
# An alert only names the cause with the most seconds: 48 zeros of each model are not worth its
# first increment.
OWN -= {f"{m.SLO_MISSED_SECONDS.name}_total"}
# As an engine's histograms, from which it comes, it begins when the engine has them.
OWN -= {f"{m.SLO_ENGINE_REQUESTS.name}_total"}


def counted() -> set[str]:
    selectors = {
        selector
        for expression in expressions(yaml.safe_load(RULES.read_text()))
        for inside in _COUNTED.findall(expression)
        for selector in series_of(inside)
    }
    return {selector for selector in selectors if selector.partition("{")[0] in OWN}


def at_start(xids: Facts) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield each counter after the first scrape of an engine, of an agent with it and one GPU."""
    gpu = GpuSample(gpu=GPU, index=0, name="NVIDIA H200", at=NOON, facts=xids)
    meter = Meter(OBJECTIVES, ["chat-0"])
    for reason in LostRows:
        # As an agent that publishes begins.
        meter.count(m.LOST_ROWS, reason, by=0)
    for dropped in PUSHES_DROPPED:
        # As one begins that pushes its metrics.
        meter.count(own.PUSH_DROPPED, dropped, by=0)
    # As one begins with a proxy before several engines.
    meter.count(m.PROXY_FORCED, by=0)
    for failure in product(own.DiscoveryCall, own.DiscoveryFailure):
        # As one begins that finds its engines in a cluster: see tests/test_app_discovery.py.
        meter.gauge(own.DISCOVERY_FAILURES, lambda: 0, "llm", *failure)
    meter.sample(EngineSample(engine="chat-0", at=NOON, dialect="vllm", model="llama", facts={}))
    body, _ = AgentExposition(meter, INFO, lambda: [gpu]).render("text/plain")
    for family in read_text(body.decode()):
        for sample in family.samples:
            if family.type == "counter":
                yield sample.name, sample.labels, sample.value


def counted_by_nvml() -> Facts:
    errors = XidErrors(lambda: NOON)
    errors.count([GPU])
    return errors.facts(GPU)


def counted_from_dcgm() -> Facts:
    counts = XidCounts()
    counts.read(GPU, {XidSeries.LAST: {}}, NOON)
    return counts.facts(GPU)


@pytest.mark.parametrize("xids", [counted_by_nvml, counted_from_dcgm])
def test_every_counter_of_an_alert_starts_at_zero(xids: Callable[[], Facts]) -> None:
    counters = list(at_start(xids()))
    assert {name for name, _, value in counters if value} == {f"{m.SCRAPES.name}_total"}
    missing = {
        selector
        for selector in counted()
        if not any(selects(selector, name, labels) for name, labels, _ in counters)
    }
    assert missing == set()
    assert len(counted()) > 15


@pytest.mark.parametrize("xids", [counted_by_nvml, counted_from_dcgm])
def test_each_xid_of_an_alert_is_published_from_the_start(xids: Callable[[], Facts]) -> None:
    shown = {labels["xid"] for name, labels, _ in at_start(xids()) if name.startswith("gpu_xid")}
    assert {"13", "31", "43", "48", "79"} <= shown


def test_the_routes_of_a_front_that_are_a_label_are_bounded() -> None:
    meter = Meter((), ["chat-0"])
    for number in range(200):
        meter.plugin_counted("chat-0", f"/route/{number}", 4, 1)
    meter.plugin_counted("chat-0", "/route/0", 4, 1)
    counted = meter.snapshot().counters[m.ENGINE_RESPONSES]
    assert len(counted) == 128 + 1
    assert counted["chat-0", "/route/0", "4xx"] == 2
    assert counted["chat-0", "other", "4xx"] == 200 - 128
