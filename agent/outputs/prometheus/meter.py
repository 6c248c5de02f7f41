"""Counts requests, spans, events and the agent's own failures for its exposition."""

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agent.catalog import metrics as m
from agent.catalog.definitions import Verdict
from agent.catalog.gpu_problems import UNSEEN
from agent.catalog.metric import Kind, Metric
from agent.catalog.metrics import OTHER, UNKNOWN
from agent.catalog.reasons import (
    FORWARDS_DROPPED,
    SCRAPES_FAILED,
    SOCKETS,
    VALUES_DROPPED,
    ClientCut,
    ExportRefused,
    FiguresMissing,
    PluginDropped,
    ProxyFailure,
    SpanRejected,
    StoreWrite,
)
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.outputs.prometheus.latency_histograms import CountedValues, LatencyHistograms
from agent.outputs.prometheus.rank_gauges import RankGauges
from agent.outputs.prometheus.scaling_gauges import ScalingGauges
from agent.records.engine import EngineSample
from agent.records.event import Event, EventKind
from agent.records.held_rate import HeldRates
from agent.records.objective import ExplainedRequest, JudgedRequest, Objective
from agent.records.request import Status

Labels = tuple[str, ...]

# Pairs of engine and model, of some 200 series each: an exposition without a limit would bring
# Prometheus down. The first limit is of models that configured engines serve, the second one of
# all other names, which senders of spans invent.
MAX_SERVED = 200
MAX_UNCONFIGURED = 100
# A pair without a request or sample for so long loses its series; the second time is for pairs
# whose limit is reached.
FORGOTTEN_AFTER_S = float(DAY_S)
FULL_FORGOTTEN_AFTER_S = float(HOUR_S)

_WILDCARDS = frozenset("*?[")

_MAX_ROUTES = 128
_PROXY_FAILURES = frozenset(ProxyFailure)

_READ, _STEP, _REQUEST = "ok", "step", "request"

# All labels of the counters; for counters of an engine, the label behind the engine's name.
_KNOWN: Mapping[Metric, Sequence[Labels]] = {
    m.SPANS: [("stored",), ("duplicate",), ("passed",), ("rejected",)],
    m.SPANS_REJECTED: [(reason,) for reason in SpanRejected],
    m.EXPORTS_REFUSED: [(reason,) for reason in ExportRefused],
    m.VALUES_DROPPED: VALUES_DROPPED,
    m.FORWARDED: [()],
    m.FORWARD_DROPPED: [(reason,) for reason in FORWARDS_DROPPED],
    m.LABELS_REPLACED: [("model",), ("tenant",), ("series",)],
    m.PROXY_FAILURES: [(reason,) for reason in ProxyFailure],
    m.CLIENTS_CUT: [(setting, reason) for setting in SOCKETS for reason in ClientCut],
    m.STORE_FAILURES: [(what,) for what in StoreWrite],
    m.GPU_FAILURES: [(reason,) for reason in UNSEEN],
    # The events without an engine.
    m.ENGINE_EVENTS: [
        (UNKNOWN, kind) for kind in (EventKind.GPU_FAULT, EventKind.PROXY_WORKER_DIED)
    ],
}
_KNOWN_OF_ENGINE: Mapping[Metric, Sequence[str]] = {
    m.SCRAPES: (_READ, *SCRAPES_FAILED),
    m.ENGINE_EVENTS: tuple(EventKind),
    m.FIGURES_MISSING: tuple(FiguresMissing),
    m.PLUGIN_RECORDS: (_STEP, _REQUEST),
    m.PLUGIN_DROPPED: tuple(PluginDropped),
}

# Where the labels of a counter have the engine, with the model behind it.
_PAIR_AT: Mapping[Metric, int] = {
    metric: metric.labels.index("engine")
    for metric in m.AGENT_METRICS
    if metric.kind is Kind.COUNTER and {"engine", "model"} <= {*metric.labels}
}


class ReadSpans(Protocol):
    """The counts of one export. Outputs do not import the sources' own class."""

    passed: int
    rejected: Counter[str]
    screened: Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class MeterSnapshot:
    """The meter's values at one moment."""

    counters: Mapping[Metric, Mapping[Labels, float]]
    histograms: Mapping[tuple[Metric, Labels], CountedValues]
    samples: Mapping[str, EngineSample | None]
    gauges: Mapping[Metric, Mapping[Labels, float]]


class LabelledPairs:
    """The pairs of engine and model that have labels of their own. Not for several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        # When each pair was last seen, by a clock that is never set, in this order.
        self._seen_at: OrderedDict[Labels, float] = OrderedDict()

    def __contains__(self, pair: Labels) -> bool:
        return pair in self._seen_at

    def see(self, pair: Labels, now_s: float, *, always: bool = False) -> bool:
        """Whether the pair has labels of its own; with `always` it also has beyond the limit."""
        if not (always or pair in self._seen_at or len(self._seen_at) < self._most):
            return False
        self._seen_at[pair] = now_s
        self._seen_at.move_to_end(pair)
        return True

    def has_engine(self, engine: str) -> bool:
        """Whether any pair is of this engine."""
        return any(pair[0] == engine for pair in self._seen_at)

    def forget(self, now_s: float) -> Iterator[Labels]:
        """Forget the pairs that were not seen for too long, and return each."""
        is_full = len(self._seen_at) >= self._most
        before_s = now_s - (FULL_FORGOTTEN_AFTER_S if is_full else FORGOTTEN_AFTER_S)
        while self._seen_at and next(iter(self._seen_at.values())) <= before_s:
            yield self._seen_at.popitem(last=False)[0]


class Meter:
    """Counts; safe to use from several threads. Known series are exposed at zero from the start."""

    def __init__(
        self,
        objectives: Sequence[Objective],
        engines: Sequence[str],
        is_served: Callable[[str], bool] | None = None,
        *,
        with_bins: bool = False,
        with_genai: bool = False,
        now: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_served`: whether any engine serves a model; `with_bins`, `with_genai`: for a push.

        `now` gives Unix time, and `monotonic` is a clock in seconds that is never set.
        """
        self.objectives = tuple(objectives)
        models = {objective.match.model for objective in objectives}
        self._named = {model for model in models if not _WILDCARDS & set(model)}
        self._is_served = is_served
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._scaling = ScalingGauges(self.objectives, engines, now)
        self._ranks = RankGauges(engines)
        # The routes of each engine that are a label.
        self._routes: defaultdict[str, set[str]] = defaultdict(set)
        self._counters: dict[Metric, defaultdict[Labels, float]] = {
            metric: defaultdict(float) for metric in m.AGENT_METRICS
        }
        self._latencies = LatencyHistograms(objectives, with_bins=with_bins, with_genai=with_genai)
        self._exposed: set[Labels] = set()
        self._served = LabelledPairs(MAX_SERVED)
        self._unconfigured = LabelledPairs(MAX_UNCONFIGURED)
        self._samples: dict[str, EngineSample | None] = dict.fromkeys(engines)
        self._published = self._samples.copy()  # with the labels of the exposition
        self._gauges: dict[Metric, dict[Labels, Callable[[], float | None]]] = {}
        self._expose_known(engines)

    def _expose_known(self, engines: Sequence[str]) -> None:
        for engine in engines:
            self._expose((engine, UNKNOWN))
            for metric, labels in _KNOWN_OF_ENGINE.items():
                self._counters[metric] |= {(engine, label): 0.0 for label in labels}
        for metric, all_labels in _KNOWN.items():
            self._counters[metric] |= dict.fromkeys(all_labels, 0.0)

    def gauge(self, metric: Metric, value: Callable[[], float | None], *labels: str) -> None:
        """Expose a metric whose value is read at each scrape; None if it is unknown."""
        self._gauges.setdefault(metric, {})[labels] = value

    def stored(
        self,
        counted: Sequence[JudgedRequest],
        sent: int,
        new: int,
        *,
        final: Sequence[JudgedRequest] | None = None,
    ) -> None:
        """Count requests, and of `sent` spans the `new` ones and the duplicates.

        A request with two views is counted once, when both are stored or the wait is over. Its
        verdict is counted when it is `final`: with the request, unless it is given.
        """
        with self._lock:
            self._add(m.SPANS, ("stored",), new)
            self._add(m.SPANS, ("duplicate",), sent - new)
            groups = self._groups(counted)
            for labels, model, items in groups:
                if labels[1] == OTHER != model:
                    self._add(m.LABELS_REPLACED, ("model",), len(items))
                self._count_requests(labels, items)
            if final is not None and final != counted:
                groups = self._groups(final)
            for labels, _, items in groups:
                self._count_verdicts(labels, items)
                self._scaling.ended(labels[0], items)

    def _groups(
        self, judged: Sequence[JudgedRequest]
    ) -> list[tuple[Labels, str | None, list[JudgedRequest]]]:
        groups: dict[tuple[str | None, str | None], list[JudgedRequest]] = defaultdict(list)
        for item in judged:
            groups[item.record.engine, item.record.model].append(item)
        return [
            (self._labels(engine, model), model, items) for (engine, model), items in groups.items()
        ]

    def _labels(self, engine: str | None, model: str | None, *, serves: bool = False) -> Labels:
        """The labels of a pair, `other` beyond the limit; `serves` is of a model served now.

        Models that an objective names have no limit, and each engine has at least one of its own.
        """
        pair = (engine or UNKNOWN, model or UNKNOWN)
        configured = engine in self._samples
        if configured and (pair[1] in (UNKNOWN, OTHER) or pair[1] in self._named):
            return self._expose(pair)
        asks = self._is_served
        is_served = configured and (serves or (asks is not None and asks(pair[1])))
        pairs, now_s = self._pairs_with(pair, is_served=is_served), self._monotonic()
        always = pairs is self._served and not pairs.has_engine(pair[0])
        has_labels = pairs.see(pair, now_s, always=always)
        if not has_labels:
            self._forget(pairs, now_s)
            has_labels = pairs.see(pair, now_s)
        return self._expose(pair if has_labels else (pair[0] if configured else OTHER, OTHER))

    def _pairs_with(self, pair: Labels, *, is_served: bool) -> LabelledPairs:
        known = (pairs for pairs in (self._served, self._unconfigured) if pair in pairs)
        return next(known, self._served if is_served else self._unconfigured)

    def _forget(self, pairs: LabelledPairs, now_s: float) -> None:
        """Remove the series of pairs that were not seen for too long."""
        gone = set(pairs.forget(now_s))
        if not gone:
            return
        self._exposed -= gone
        for metric, first in _PAIR_AT.items():
            counter = self._counters[metric]
            for labels in [each for each in counter if each[first : first + 2] in gone]:
                del counter[labels]
        self._latencies.forget(gone)

    def _expose(self, labels: Labels) -> Labels:
        """Expose every verdict of an engine and a model at zero from the first time."""
        if labels in self._exposed:
            return labels
        self._exposed.add(labels)
        for objective in self._objectives_of(labels[1]):
            for verdict in Verdict:
                self._add(m.SLO_REQUESTS, (objective.name, *labels, verdict), 0)
                self._add(m.SLO_OUTPUT_TOKENS, (objective.name, *labels, verdict), 0)
        for status in Status:
            self._add(m.REQUESTS, (*labels, status), 0)
        self._add(m.INPUT_TOKENS, labels, 0)
        self._add(m.OUTPUT_TOKENS, labels, 0)
        return labels

    def _objectives_of(self, model: str) -> Sequence[Objective]:
        """Those that requests with this label may have, some of which were asked for by name."""
        if model in (UNKNOWN, OTHER):
            return self.objectives
        return [each for each in self.objectives if each.match.covers_model(model)]

    def _count_requests(self, labels: Labels, items: Sequence[JudgedRequest]) -> None:
        records = [item.record for item in items]
        for status, count in Counter([record.status for record in records]).items():
            self._add(m.REQUESTS, (*labels, status), count)
        self._add(m.INPUT_TOKENS, labels, sum([record.input_tokens or 0 for record in records]))
        self._add(m.OUTPUT_TOKENS, labels, sum([record.output_tokens or 0 for record in records]))
        self._latencies.count(labels, records)

    def _count_verdicts(self, labels: Labels, items: Sequence[JudgedRequest]) -> None:
        tokens_by_judgement = defaultdict(list)
        for item in items:
            tokens_by_judgement[item.judgement].append(item.record.output_tokens or 0)
        for judgement, tokens in tokens_by_judgement.items():
            for objective, verdict in judgement.by_objective:
                self._add(m.SLO_REQUESTS, (objective, *labels, verdict), len(tokens))
                self._add(m.SLO_OUTPUT_TOKENS, (objective, *labels, verdict), sum(tokens))

    def explained(self, items: Sequence[ExplainedRequest]) -> None:
        """Count the seconds of missed requests by cause. The caller gives each request once."""
        with self._lock:
            for judged, explanation in items:
                labels = self._labels(judged.record.engine, judged.record.model)
                for share in explanation.shares:
                    if share.excess_s is not None:
                        labels_of_share = (share.objective, *labels, share.limit, share.cause)
                        self._add(m.SLO_MISSED_SECONDS, labels_of_share, share.excess_s)

    def _add(self, metric: Metric, labels: Labels, amount: float) -> None:
        self._counters[metric][labels] += amount

    def exported(self, intake: ReadSpans) -> None:
        """Count the spans and values of one export, apart from its requests."""
        with self._lock:
            self._add(m.SPANS, ("passed",), intake.passed)
            for reason, count in intake.rejected.items():
                self._add(m.SPANS, ("rejected",), count)
                self._add(m.SPANS_REJECTED, (reason,), count)
            for (field, reason), count in intake.screened.items():
                self._add(m.VALUES_DROPPED, (field, reason), count)

    def count(self, metric: Metric, *labels: str, by: int = 1) -> None:
        """Count by a counter that has no words of its own below."""
        with self._lock:
            self._add(metric, labels, by)

    def refused(self, reason: ExportRefused) -> None:
        """Count an OTLP body that was refused."""
        self.count(m.EXPORTS_REFUSED, reason)

    def forwarded(self) -> None:
        """Count an OTLP body that was forwarded."""
        self.count(m.FORWARDED)

    def forward_dropped(self, reason: str) -> None:
        """Count an OTLP body that was not forwarded."""
        self.count(m.FORWARD_DROPPED, reason)

    def proxy_failed(self, reason: str) -> None:
        """Count a failure of the agent for a proxied request."""
        self.count(m.PROXY_FAILURES, reason)

    def client_cut(self, setting: str, reason: str) -> None:
        """Count a client of a listening socket that was cut off or refused."""
        self.count(m.CLIENTS_CUT, setting, reason)

    def label_replaced(self, label: str, requests: int = 1) -> None:
        """Count requests with a client-made value that figures are not grouped by."""
        self.count(m.LABELS_REPLACED, label, by=requests)

    def gpu_failed(self, reason: str) -> None:
        """Count a failed read of GPUs."""
        self.count(m.GPU_FAILURES, reason)

    def figures_missing(self, engine: str, reason: FiguresMissing) -> None:
        """Count unknown figures of an engine."""
        self.count(m.FIGURES_MISSING, engine, reason)

    def plugin_received(self, engine: str, steps: int, requests: int) -> None:
        """Count records of an engine's plugin."""
        with self._lock:
            self._add(m.PLUGIN_RECORDS, (engine, _STEP), steps)
            self._add(m.PLUGIN_RECORDS, (engine, _REQUEST), requests)

    def plugin_dropped(self, engine: str, reason: PluginDropped, count: int) -> None:
        """Count records of an engine's plugin that were dropped."""
        with self._lock:
            self._add(m.PLUGIN_DROPPED, (engine, reason), count)

    def plugin_counted(self, engine: str, name: str, status_class: int, count: int) -> None:
        """Count responses of a route of a front; without a class, failures of its measuring."""
        if status_class:
            with self._lock:
                routes = self._routes[engine]
                if name not in routes and len(routes) >= _MAX_ROUTES:
                    name = OTHER
                routes.add(name)
                self._add(m.ENGINE_RESPONSES, (engine, name, f"{status_class}xx"), count)
        elif name in _PROXY_FAILURES:
            self.count(m.PROXY_FAILURES, name, by=count)

    def store_failed(self, what: StoreWrite) -> None:
        """Count a write that the database did not take."""
        self.count(m.STORE_FAILURES, what)

    def event(self, event: Event) -> None:
        """Count an event of an engine."""
        self.count(m.ENGINE_EVENTS, event.engine or UNKNOWN, event.kind)

    def sample(self, sample: EngineSample) -> None:
        """Expose the newest sample of an engine."""
        with self._lock:
            _, model = self._labels(sample.engine, sample.model, serves=True)
            self._samples[sample.engine] = sample
            shown = replace(sample, model=OTHER) if model == OTHER else sample
            self._published[sample.engine] = shown
            self._scaling.sample(sample, shown)
            self._ranks.sample(sample)
            self._add(m.SCRAPES, (sample.engine, _READ), 1)

    def held_rates(self) -> HeldRates:
        """What was learnt of the rates that engines hold within objectives."""
        with self._lock:
            return self._scaling.held_rates()

    def remember(self, held_rates: HeldRates) -> None:
        """Take what an earlier run of the agent learnt, where this one has learnt nothing."""
        with self._lock:
            self._scaling.remember(held_rates)

    def samples(self) -> Mapping[str, EngineSample | None]:
        """The newest sample of each engine, None while it cannot be read."""
        with self._lock:
            return dict(self._samples)

    def rank_skew(self, engine: str) -> Mapping[str, float] | None:
        """How uneven the ranks of an engine are, by measure; None with one rank, or while down."""
        with self._lock:
            is_up = self._samples.get(engine) is not None
            return self._ranks.skews(engine) or None if is_up else None

    def is_up(self, engine: str) -> bool:
        """Whether the last scrape of the engine succeeded."""
        with self._lock:
            return self._samples.get(engine) is not None

    def scrape_failed(self, engine: str, reason: str) -> None:
        """Count a failed scrape and hide the engine's facts: old ones would seem new."""
        with self._lock:
            self._samples[engine] = self._published[engine] = None
            self._add(m.SCRAPES, (engine, reason), 1)

    def snapshot(self) -> MeterSnapshot:
        """All values now."""
        with self._lock:
            now_s = self._monotonic()
            for pairs in (self._served, self._unconfigured):
                self._forget(pairs, now_s)
            counters = {metric: dict(values) for metric, values in self._counters.items()}
            histograms, samples = self._latencies.snapshot(), dict(self._published)
            computed = self._scaling.gauges() | self._ranks.gauges(samples)
        gauges = computed | {
            metric: {labels: value for labels, read in of.items() if (value := read()) is not None}
            for metric, of in self._gauges.items()
        }
        return MeterSnapshot(counters, histograms, samples, gauges)
