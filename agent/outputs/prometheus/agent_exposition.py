"""The agent's exposition, made anew at every scrape, with the values of GPUs, hosts and costs."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import fsum, inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8, UNDERSCORES
from prometheus_client.registry import Collector, CollectorRegistry

from agent.analysis.cost.bill import spending, usd_per_million_by_objective
from agent.analysis.efficiency.window_efficiency import Utilisation, window_efficiency
from agent.analysis.engine_figures import LATENCIES, by_model_alone
from agent.analysis.histogram_bounds import counts_within
from agent.analysis.ledger import unaccounted_requests
from agent.catalog import efficiency_metrics as em
from agent.catalog import metrics as m
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import (
    CPU,
    EXPERT_BALANCE,
    HOST_FACTS,
    MEMORY_LIMIT,
    MEMORY_USAGE,
    OOM_KILLS,
)
from agent.catalog.metric import Kind, Metric
from agent.catalog.metrics import UNKNOWN
from agent.catalog.routers import ROUTER_FACTS
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.outputs.prometheus.latency_histograms import bound_text
from agent.outputs.prometheus.meter import Meter, MeterSnapshot
from agent.records.engine import (
    EngineProcess,
    EngineSample,
    HistogramSnapshot,
    HostSample,
    ProcessRole,
)
from agent.records.gpu import Facts, GpuSample
from agent.records.minute import Cost, Ledger, MinuteRow
from agent.records.objective import Objective

__all__ = ["Family", "family_of"]

_FAMILIES = {Kind.COUNTER: CounterMetricFamily, Kind.GAUGE: GaugeMetricFamily}


def family_of(
    metric: Metric, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], float]]
) -> Family:
    """The family of a counter or a gauge with these labels and values."""
    family: Family = _FAMILIES[metric.kind](metric.name, metric.help, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)  # type: ignore[attr-defined]
    return family


def gpu_families(samples: Iterable[GpuSample]) -> Iterator[Family]:
    """Every fact of these samples, with the UUID as `gpu`; a MIG instance has its own UUID."""
    facts: list[tuple[str, Facts]] = []
    for sample in samples:
        facts.append((sample.gpu, sample.facts))
        facts += [(instance.uuid, instance.facts) for instance in sample.mig_instances]
    yield from _fact_families("gpu", GPU_FACTS, facts)


def router_families(facts: Collection[tuple[str, Facts]]) -> Iterator[Family]:
    """Every fact of these routers."""
    yield from _fact_families("router", ROUTER_FACTS, facts)


def _fact_families(
    label: str, catalogue: Iterable[Metric], facts: Collection[tuple[str, Facts]]
) -> Iterator[Family]:
    for fact in catalogue:
        family = family_of(fact, (label, *fact.labels), _values(fact, facts))
        if family.samples:
            yield family


def _values(
    fact: Metric, facts: Iterable[tuple[str, Facts]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for of, values in facts:
        for (name, labels), value in values.items():
            if name == fact.name:
                yield (of, *labels), value


Labels = tuple[str, ...]
Values = Iterator[tuple[Metric, Labels, float | None]]

# Of each engine, the counters of the models that it served last.
MODELS_KEPT = 10


class EfficiencyBoard:
    """Holds the newest minute of each engine and the sums of all. Thread-safe."""

    def __init__(self) -> None:
        self._newest: dict[str, MinuteRow] = {}
        self._counters: defaultdict[tuple[Metric, Labels], float] = defaultdict(float)
        self._sums: defaultdict[tuple[Metric, Labels], float] = defaultdict(float)
        # The start of the newest minute of each engine and model.
        self._starts_at: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, minute: MinuteRow, before: MinuteRow | None) -> None:
        """Add a minute. `before` is the same minute as it was added earlier; it is replaced."""
        with self._lock:
            for metric, labels, value in _sums(minute):
                self._sums[metric, labels] += value
            for metric, labels, value in () if before is None else _sums(before):
                self._sums[metric, labels] -= value
            for metric, of in {(metric, labels[:2]) for metric, labels in self._sums}:
                self._raise_counters(metric, of)
            self._forget_models(minute)
            newest = self._newest.get(minute.engine)
            if newest is None or minute.starts_at >= newest.starts_at:
                self._newest[minute.engine] = minute

    def _forget_models(self, minute: MinuteRow) -> None:
        """Keep the counters of an engine's last models of a day."""
        pair = _pair(minute)
        self._starts_at[pair] = max(minute.starts_at, self._starts_at.get(pair, -inf))
        of_engine = [each for each in self._starts_at if each[0] == minute.engine]
        of_engine.sort(key=lambda each: self._starts_at[each], reverse=True)
        oldest = self._starts_at[of_engine[0]] - DAY_S
        for index, each in enumerate(of_engine):
            if index >= MODELS_KEPT or self._starts_at[each] < oldest:
                del self._starts_at[each]
                for values in (self._sums, self._counters):
                    for key in [key for key in values if key[1][:2] == each]:
                        del values[key]

    def _raise_counters(self, metric: Metric, of: Labels) -> None:
        """Raise the counters of one engine to their sums.

        Counters never go down. When a share was published too high, the next increments of the
        other shares are held back until the total matches.
        """
        keys = [key for key in self._sums if key[0] is metric and key[1][:2] == of]
        apart = {key: self._sums[key] - self._counters[key] for key in keys}
        more = max(fsum(apart.values()), 0.0)
        behind = {key: amount for key, amount in apart.items() if amount > 0}
        share = min(more / fsum(behind.values()), 1.0) if behind else 0.0
        for key in keys:
            self._counters[key] += behind.get(key, 0.0) * share

    def stored_until(self) -> list[float]:
        """The end of each engine's newest minute, in Unix time."""
        with self._lock:
            return [minute.until for minute in self._newest.values()]

    def families(self) -> Iterator[Family]:
        """The metric families of all known figures."""
        with self._lock:
            counters = list(self._counters.items())
            newest = list(self._newest.values())
        shown: defaultdict[Metric, dict[Labels, float]] = defaultdict(dict)
        for minute in newest:
            for metric, labels, known in _gauges(minute):
                if known is not None:
                    shown[metric][labels] = known
        for (metric, labels), value in counters:
            shown[metric][labels] = value
        yield from _families(shown)


def _families(shown: Mapping[Metric, Mapping[Labels, float]]) -> Iterator[Family]:
    for metric in em.EFFICIENCY_METRICS:
        if metric in shown:
            yield family_of(metric, metric.labels, shown[metric].items())


def _pair(minute: MinuteRow) -> Labels:
    return minute.engine, minute.model or UNKNOWN


def _sums(minute: MinuteRow) -> Iterator[tuple[Metric, Labels, float]]:
    """The counters' values of one minute, without unknown ones."""
    of = _pair(minute)
    for state in ("busy", "idle", "unknown"):
        yield em.TIME, (*of, state), getattr(minute.work, f"{state}_s")
    if minute.joules is not None:
        yield em.ENERGY, of, minute.joules
    if minute.cost is not None:
        for share, usd in _shares(minute.cost):
            yield em.COST, (*of, share), usd
    if minute.ledger is not None and minute.ledger_closed:
        yield from _unaccounted(minute.ledger, of)
        if minute.cost is not None:
            yield em.UNACCOUNTED_COST, of, minute.cost.unseen


def _unaccounted(ledger: Ledger, of: Labels) -> Iterator[tuple[Metric, Labels, float]]:
    if ledger.input_tokens is not None:
        yield em.UNACCOUNTED_INPUT, of, ledger.input_tokens - ledger.row_input_tokens
    if ledger.output_tokens is not None:
        yield em.UNACCOUNTED_OUTPUT, of, ledger.output_tokens - ledger.row_output_tokens
    for reason, requests in unaccounted_requests(ledger).items():
        yield em.UNACCOUNTED_REQUESTS, (*of, reason), requests
    yield em.ROWS_WITHOUT_TOKENS, of, ledger.rows_without_tokens


def _shares(cost: Cost) -> Iterator[tuple[str, float]]:
    """The parts of a bill, which add up to it."""
    yield "prefill", cost.prefill - cost.aborted_prefill
    yield "decode", cost.decode - (cost.aborted - cost.aborted_prefill)
    for share in ("aborted", "unseen", "idle", "unknown"):
        yield share, getattr(cost, share)


def _gauges(minute: MinuteRow) -> Values:
    of = _pair(minute)
    yield from _efficiency(minute, of)
    spent = spending([minute])
    per = spent.ratios
    if per is not None and minute.bill_usd is not None:
        yield em.COST_PER_MILLION, (*of, "input"), per.per_million_input
        yield em.COST_PER_MILLION, (*of, "computed_input"), per.per_million_computed_input
        yield em.COST_PER_MILLION, (*of, "cached_input"), per.per_million_cached_input
        yield em.COST_PER_MILLION, (*of, "output"), per.per_million_output
        yield em.COST_PER_MILLION, (*of, "counted_output"), per.allocated_per_million_output
        good = per.allocated_per_million_good_tokens
        yield em.COST_PER_MILLION, (*of, "within_objective"), good
        for objective, usd in usd_per_million_by_objective([minute]).items():
            yield em.COST_PER_MILLION_GOOD, (*of, objective), usd
        yield em.COST_PER_REQUEST, of, per.allocated_per_request
        yield em.COST_PER_HOUR, of, minute.bill_usd / minute.length_s * HOUR_S
    yield em.ENERGY_PER_TOKEN, of, spent.joules_per_output_token


def _efficiency(minute: MinuteRow, of: Labels) -> Values:
    found = window_efficiency([minute])
    assert found is not None, "there is one minute"
    for source, (mfu, mbu) in (
        ("requests", (found.mfu, found.mbu)),
        ("counters", found.counters),
        ("engine", found.engine),
        ("hardware", found.hardware),
    ):
        yield em.MFU, (*of, "all", source), mfu
        yield em.MBU, (*of, "all", source), mbu
    for phase, use in (("prefill", found.prefill), ("decode", found.decode), ("all", found.busy)):
        if use is not None:
            yield from _use(use, (*of, phase))
    for each in found.disagreements:
        labels = (*of, each["figure"], each["higher"], each["lower"], each.get("cause", UNKNOWN))
        yield em.DISAGREEMENT, labels, inf if each["times"] is None else each["times"]


def _use(use: Utilisation, labels: Labels) -> Values:
    engine, model, phase = labels
    if phase != "all":
        yield em.MFU, (*labels, "requests"), use.mfu
        yield em.MBU, (*labels, "requests"), use.mbu
    if use.position is not None:
        yield em.INTENSITY, labels, use.position.intensity
        yield em.RIDGE, (engine, model), use.position.ridge
        yield em.ROOF_SHARE, labels, use.position.share
    if use.bound is not None:
        yield em.BOUND, (*labels, use.bound.value), 1.0


# By label values.
_OfEngines = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class CpuTime:
    """CPU seconds by role of processes that come and go, as counters that never fall.

    They include what each process used before it was first sampled.

    `by_process` is what each living process, by its identity, had used at the last sample.
    """

    by_role: Mapping[ProcessRole, float] = field(default_factory=dict)
    by_process: Mapping[tuple[int, float], float] = field(default_factory=dict)

    def after(self, processes: Iterable[EngineProcess]) -> "CpuTime":
        """The sums after another sample. What a process used after its last sample is lost."""
        living = list(processes)
        by_role = dict(self.by_role)
        for process in living:
            used_s = process.cpu_s - self.by_process.get(process.identity, 0.0)
            by_role[process.role] = by_role.get(process.role, 0.0) + max(used_s, 0.0)
        return CpuTime(by_role, {process.identity: process.cpu_s for process in living})


# An engine may log the balance of its experts only every some hundred steps.
_BALANCE_KNOWN_S = 300.0


class HostBoard:
    """Holds the newest host sample of each engine. Several threads may call it."""

    def __init__(self) -> None:
        # When the log gave the balance of an engine's experts, and the balance.
        self._balance: dict[str, tuple[float, float]] = {}
        self._cpu: dict[str, CpuTime] = {}
        self._samples: dict[str, HostSample] = {}
        self._lock = threading.Lock()

    def sample(self, engine: str, sample: HostSample) -> None:
        """Publish this sample of an engine's machine from now on."""
        with self._lock:
            self._samples[engine] = sample
            if sample.processes is not None:
                before = self._cpu.get(engine, CpuTime())
                self._cpu[engine] = before.after(sample.processes)
            if sample.log is not None and sample.log.expert_balance is not None:
                self._balance[engine] = (sample.at, sample.log.expert_balance)

    def newest(self, engine: str) -> HostSample | None:
        """The newest sample of an engine's machine; None before the first."""
        with self._lock:
            return self._samples.get(engine)

    def families(self) -> Iterator[Family]:
        """Every fact that is known of an engine's machine."""
        with self._lock:
            values = self._values()
        for fact in HOST_FACTS:
            if values[fact]:
                yield family_of(fact, fact.labels, values[fact].items())

    def _values(self) -> Mapping[Metric, _OfEngines]:
        cgroups = {name: sample.cgroup for name, sample in self._samples.items() if sample.cgroup}
        return {
            CPU: {
                (engine, role.value): seconds
                for engine, time in self._cpu.items()
                for role, seconds in time.by_role.items()
            },
            MEMORY_USAGE: _known((name, cgroup.usage_bytes) for name, cgroup in cgroups.items()),
            MEMORY_LIMIT: _known((name, cgroup.limit_bytes) for name, cgroup in cgroups.items()),
            OOM_KILLS: _known((name, cgroup.oom_kills) for name, cgroup in cgroups.items()),
            EXPERT_BALANCE: {
                (engine,): balance
                for engine, (at, balance) in self._balance.items()
                if self._samples[engine].at - at <= _BALANCE_KNOWN_S
            },
        }


def _known(values: Iterable[tuple[str, int | None]]) -> _OfEngines:
    return {(engine,): float(value) for engine, value in values if value is not None}


_NAMES_LOOKED_THROUGH = f"escaping={UNDERSCORES}"
_LIMITS = (("ttft", "ttft_s"), ("tpot", "tpot_s"), ("e2e", "e2e_s"))
# The engine's histogram of each measure.
_OF = {measure: LATENCIES[measure].name for measure, _ in _LIMITS}


class AgentExposition(Collector):
    """Collects the families of a meter and encodes them in the format that a scraper accepts."""

    def __init__(
        self,
        meter: Meter,
        info: tuple[str, str, str],
        gpus: Callable[[], Iterable[GpuSample]] = tuple,
        hosts: HostBoard | None = None,
        efficiency: EfficiencyBoard | None = None,
        *,
        routers: Callable[[], Collection[tuple[str, Facts]]] = tuple,
    ) -> None:
        self._meter = meter
        self._gpus = gpus
        self._hosts = hosts or HostBoard()
        self._efficiency = efficiency or EfficiencyBoard()
        self._routers = routers
        self._info = info
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def describe(self) -> Iterable[Family]:
        """No families: registering must not collect."""
        return ()

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type; OpenMetrics with exemplars if it is accepted."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):
            # prometheus_client 0.26 fails on a version that is not a number.
            encode, content_type = choose_encoder("")
        if content_type.endswith(_NAMES_LOOKED_THROUGH):
            # All names here are plain, and looking at each of their letters took most of the time.
            encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        """Every family that has a value now."""
        return self.families(self._meter.snapshot())

    def families(self, snapshot: MeterSnapshot) -> Iterator[Family]:
        """Every family that has a value, those of the meter at the time of its snapshot."""
        yield from self._own(snapshot)
        yield from self._efficiency.families()
        samples = [sample for sample in snapshot.samples.values() if sample is not None]
        for fact in ENGINE_FACTS:
            yield from _engine_family(fact, samples)
        yield from self._hosts.families()
        yield from gpu_families(self._gpus())
        yield from router_families(self._routers())

    def _own(self, snapshot: MeterSnapshot) -> Iterator[Family]:
        values = dict(snapshot.counters)
        values[m.AGENT_INFO] = {self._info: 1.0}
        values[m.ENGINE_UP] = {
            (engine,): float(sample is not None) for engine, sample in snapshot.samples.items()
        }
        values[m.SLO_TARGET] = {
            (objective.name,): objective.target for objective in self._meter.objectives
        }
        values[m.SLO_CONFIGURED] = {
            (objective.name,): float(not objective.is_preset)
            for objective in self._meter.objectives
        }
        values[m.SLO_LIMIT] = {
            (objective.name, measure): getattr(objective, field)
            for objective in self._meter.objectives
            for measure, field in _LIMITS
            if getattr(objective, field) is not None
        }
        values[m.SLO_ENGINE_REQUESTS] = dict(_within_limits(self._meter.objectives, snapshot))
        values |= snapshot.gauges
        for metric in m.AGENT_METRICS:
            if metric.kind is Kind.HISTOGRAM:
                yield from _histogram_family(metric, snapshot)
            elif values.get(metric):
                yield family_of(metric, metric.labels, values[metric].items())


def _within_limits(
    objectives: Iterable[Objective], snapshot: MeterSnapshot
) -> Iterator[tuple[Labels, float]]:
    """What each engine's newest histograms say of each limit, since the engine started."""
    samples = [sample for sample in snapshot.samples.values() if sample is not None]
    for objective, sample in product(filter(by_model_alone, objectives), samples):
        if not objective.match.covers_model(sample.model):
            continue
        for measure, limit in _LIMITS:
            limit_s, histogram = getattr(objective, limit), sample.histograms.get(_OF[measure])
            if limit_s is not None and histogram is not None:
                of = (objective.name, sample.engine, sample.model or UNKNOWN, measure)
                surely, possibly, measured = counts_within(histogram, limit_s)
                yield (*of, m.WITHIN), surely
                yield (*of, m.PERHAPS), possibly - surely
                yield (*of, m.ABOVE), measured - possibly


def _histogram_family(metric: Metric, snapshot: MeterSnapshot) -> Iterator[Family]:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
    for (counted, labels), values in snapshot.histograms.items():
        if counted is metric:
            family.add_metric(labels, values.buckets, values.sum)  # type: ignore[arg-type]
    if family.samples:
        yield family


def _engine_family(fact: Metric, samples: Iterable[EngineSample]) -> Iterator[Family]:
    labels = ("engine", "model", *fact.labels)
    family: Family
    if fact.kind is Kind.HISTOGRAM:
        histogram_family = HistogramMetricFamily(fact.name, fact.help, labels=labels)
        for sample in samples:
            histogram = sample.histograms.get(fact.name)
            if histogram is not None:
                of = (sample.engine, sample.model or UNKNOWN)
                histogram_family.add_metric(of, _buckets(histogram), histogram.sum)
        family = histogram_family
    else:
        family = family_of(
            fact,
            labels,
            (
                ((sample.engine, sample.model or UNKNOWN, *own), value)
                for sample in samples
                for (name, own), value in sample.facts.items()
                if name == fact.name
            ),
        )
    if family.samples:
        yield family


def _buckets(histogram: HistogramSnapshot) -> list[tuple[str, float]]:
    return [
        (bound_text(bound), count)
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True)
    ]
