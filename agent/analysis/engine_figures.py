"""Figures of a window from what engines counted themselves, without any single request.

Percentiles and attainment are bounds: a histogram says in which bucket a value lies, not where.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import fsum, inf
from typing import NamedTuple

from agent.analysis.engine_counts import added_histograms, total_counts
from agent.analysis.histogram_bounds import Bounds, all_within, quantile_bounds, share_bounds
from agent.analysis.summary import QUANTILES
from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.records.engine import HistogramSnapshot
from agent.records.engine_counts import CountsRow, EngineCounts
from agent.records.objective import Objective

LATENCIES: Mapping[str, Metric] = {
    "ttft": fact.TIME_TO_FIRST_TOKEN,
    "tpot": fact.TIME_PER_OUTPUT_TOKEN,
    "itl": fact.INTER_TOKEN_LATENCY,
    "e2e": fact.REQUEST_DURATION,
    "queue": fact.QUEUE_TIME,
    "prefill": fact.PREFILL_TIME,
    "decode": fact.DECODE_TIME,
}
# Finish reasons of requests that have no complete response.
_ABORTED = ("abort",)
_FAILED = ("error",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyBounds:
    """A latency that engines measured, in milliseconds: how often, its mean, its percentiles."""

    count: float
    mean_ms: float
    quantiles_ms: Mapping[str, Bounds]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttainmentBounds:
    """Between which shares the attainment of an objective lies."""

    objective: str
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What engines counted in a window. Rates are per second; what no engine counts is None.

    `covered_s` are the seconds in which any engine was seen: rates and means are over these, so
    that an engine and the one that replaced it are not added up.
    `requests` ended, whatever their outcome; `completed` and `failed` are parts of them by the
    engine's words. `cached_ratio` is the share of prompt tokens that a cache served.
    """

    covered_s: float
    requests: float | None
    completed: float | None
    failed: float | None
    aborted: float | None
    throughput_rps: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    cached_ratio: float | None
    preemptions: float | None
    running: float | None
    waiting: float | None
    kv_cache_usage: float | None
    kv_cache_usage_max: float | None
    batch_fill: float | None
    latencies: Mapping[str, LatencyBounds]
    attainment: Sequence[AttainmentBounds]
    goodput_rps: Bounds | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedEngine:
    """The counts of one engine in a window, and its model."""

    model: str | None
    counts: EngineCounts

    def counter(self, metric: Metric) -> float | None:
        """The increase of a counter, over all its labels; None if the engine does not count it."""
        found = [value for (name, _), value in self.counts.counters.items() if name == metric.name]
        return fsum(found) if found else None

    def finished(self, reasons: Sequence[str]) -> float:
        """The requests that ended with one of these finish reasons."""
        return fsum(
            value
            for (name, labels), value in self.counts.counters.items()
            if name == fact.REQUESTS_FINISHED.name and labels and labels[0] in reasons
        )

    def mean(self, metric: Metric) -> float | None:
        """The mean of a gauge."""
        found = self.counts.gauges.get((metric.name, ()))
        return None if found is None or not found.known_s else found.mean


def engine_figures(
    engines: Sequence[CountedEngine],
    objectives: Sequence[Objective],
    covered_s: float | None = None,
) -> EngineFigures | None:
    """The figures of these engines together; None without any count.

    Without `covered_s` they were seen side by side.
    """
    if not engines:
        return None
    if covered_s is None:
        covered_s = max(engine.counts.covered_s for engine in engines)
    outcomes = [*map(_outcomes, engines)]
    bounds = [each for each in (_attainment(one, engines) for one in objectives) if each]
    return EngineFigures(
        covered_s=covered_s,
        requests=_total(each.requests for each in outcomes),
        completed=_total(each.completed for each in outcomes),
        failed=_total(each.failed for each in outcomes),
        aborted=_total(each.aborted for each in outcomes),
        throughput_rps=_rate(engines, _completed, covered_s),
        input_tokens_per_s=_rate(engines, _counter_of(fact.INPUT_TOKENS), covered_s),
        output_tokens_per_s=_rate(engines, _counter_of(fact.OUTPUT_TOKENS), covered_s),
        cached_ratio=_cached_ratio(engines),
        preemptions=_total(one.counter(fact.PREEMPTIONS) for one in engines),
        running=_mean(engines, fact.REQUESTS_RUNNING, covered_s),
        waiting=_mean(engines, fact.REQUESTS_WAITING, covered_s),
        kv_cache_usage=_highest(one.mean(fact.KV_CACHE_USAGE) for one in engines),
        kv_cache_usage_max=_highest(map(_fullest, engines)),
        batch_fill=_batch_fill(engines),
        latencies=_latencies(engines),
        attainment=bounds,
        goodput_rps=_goodput(objectives, engines, bounds, covered_s),
    )


def figures_of_rows(
    rows: Sequence[CountsRow], objectives: Sequence[tuple[str, Objective]]
) -> EngineFigures | None:
    """The figures of stored counts by the objectives of their agents; None without any count."""
    return engine_figures(_engines(rows), _of_all_agents(rows, objectives), _covered_s(rows))


def _covered_s(rows: Iterable[CountsRow]) -> float:
    """The seconds in which at least one engine was seen.

    A row is taken as seen without a gap until its newest sample. Rows of hours and days may have
    gaps, but no engine was seen for longer than all together.
    """
    covered_s, seen_until = 0.0, -inf
    of_engine: defaultdict[tuple[str, str], float] = defaultdict(float)
    for row in sorted(rows, key=lambda row: row.until - row.counts.covered_s):
        of_engine[row.agent, row.engine] += row.counts.covered_s
        covered_s += max(row.until - max(row.until - row.counts.covered_s, seen_until), 0.0)
        seen_until = max(row.until, seen_until)
    return max([covered_s, *of_engine.values()])


def _engines(rows: Iterable[CountsRow]) -> list[CountedEngine]:
    by_engine: defaultdict[tuple[str, str], list[CountsRow]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.starts_at):
        by_engine[row.agent, row.engine].append(row)
    return [
        CountedEngine(model=each[-1].model, counts=total)
        for each in by_engine.values()
        if (total := total_counts(row.counts for row in each)) is not None
    ]


def _of_all_agents(
    rows: Iterable[CountsRow], objectives: Sequence[tuple[str, Objective]]
) -> list[Objective]:
    """The objectives that every agent of these rows has in the same words."""
    agents = {row.agent for row in rows}
    mine = [(agent, each) for agent, each in objectives if agent in agents]
    by_name = {each.name: each for _, each in mine}
    return [one for one in by_name.values() if sum(each == one for _, each in mine) == len(agents)]


class _Outcomes(NamedTuple):
    requests: float | None
    completed: float | None
    failed: float | None
    aborted: float | None


def _outcomes(engine: CountedEngine) -> _Outcomes:
    """How the requests of an engine ended, by its finish reasons and by its own counters.

    A request that ended with an error may be in both, so the larger count is taken. Requests that
    SGLang counts as aborted were finished if they ran, and not if they waited: they are in no sum.
    """
    finished = engine.counter(fact.REQUESTS_FINISHED)
    failed = engine.counter(fact.REQUESTS_FAILED)
    aborted = engine.counter(fact.REQUESTS_ABORTED)
    if finished is None:
        # An engine that counts no finish reasons may measure how long requests took.
        durations = engine.counts.histograms.get(fact.REQUEST_DURATION.name)
        finished = None if durations is None else durations.counts[-1]
    if finished is None:
        return _Outcomes(None, None, failed, aborted)
    with_error, with_abort = engine.finished(_FAILED), engine.finished(_ABORTED)
    all_failed = max(with_error, failed or 0.0)
    return _Outcomes(
        requests=finished + all_failed - with_error,
        completed=finished - with_error - with_abort,
        failed=all_failed,
        aborted=with_abort if aborted is None else max(with_abort, aborted),
    )


def _completed(engine: CountedEngine) -> float | None:
    return _outcomes(engine).completed


def _failed(engine: CountedEngine) -> float | None:
    return _outcomes(engine).failed


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fsum(known) if known else None


def _highest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


Count = Callable[[CountedEngine], float | None]


def _counter_of(metric: Metric) -> Count:
    return lambda engine: engine.counter(metric)


def _rate(engines: Sequence[CountedEngine], count: Count, covered_s: float) -> float | None:
    total = _total(map(count, engines))
    return None if total is None else total / covered_s


def _mean(engines: Sequence[CountedEngine], metric: Metric, covered_s: float) -> float | None:
    """The sum of a gauge over all engines, as a mean over the covered time."""
    means = [(one.mean(metric), one.counts.covered_s / covered_s) for one in engines]
    return _total(None if mean is None else mean * part for mean, part in means)


def _cached_ratio(engines: Sequence[CountedEngine]) -> float | None:
    counting = [one for one in engines if one.counter(fact.CACHED_INPUT_TOKENS) is not None]
    cached = _total(one.counter(fact.CACHED_INPUT_TOKENS) for one in counting)
    prompts = _total(one.counter(fact.INPUT_TOKENS) for one in counting)
    return cached / prompts if prompts and cached is not None else None


def _fullest(engine: CountedEngine) -> float | None:
    found = engine.counts.gauges.get((fact.KV_CACHE_USAGE.name, ()))
    return None if found is None else found.maximum


def _batch_fill(engines: Sequence[CountedEngine]) -> float | None:
    """Running requests over the most that may run."""
    means = [
        (one.mean(fact.REQUESTS_RUNNING), one.mean(fact.MAX_RUNNING_REQUESTS), one.counts.covered_s)
        for one in engines
    ]
    known = [(running, most, s) for running, most, s in means if running is not None and most]
    most_running_s = fsum(most * seconds for _, most, seconds in known)
    running_s = fsum(running * seconds for running, _, seconds in known)
    return running_s / most_running_s if most_running_s else None


def _histogram(engines: Iterable[CountedEngine], metric: Metric) -> HistogramSnapshot | None:
    """The counts of these engines together; None if any of them measures no such latency."""
    found = [one.counts.histograms.get(metric.name) for one in engines]
    known = [each for each in found if each is not None]
    return reduce(added_histograms, known) if known and len(known) == len(found) else None


def _latencies(engines: Sequence[CountedEngine]) -> dict[str, LatencyBounds]:
    found = {}
    for name, metric in LATENCIES.items():
        measuring = [one for one in engines if metric.name in one.counts.histograms]
        histogram = _histogram(measuring, metric)
        if histogram is not None and histogram.counts[-1] > 0:
            found[name] = _latency(histogram)
    return found


def _latency(histogram: HistogramSnapshot) -> LatencyBounds:
    count = histogram.counts[-1]
    bounds = {name: quantile_bounds(histogram, q) for name, q in QUANTILES.items()}
    return LatencyBounds(
        count=count,
        mean_ms=1000.0 * histogram.sum / count,
        quantiles_ms={name: each.times(1000.0) for name, each in bounds.items() if each},
    )


def _attainment(objective: Objective, engines: Sequence[CountedEngine]) -> AttainmentBounds | None:
    """The bounds of an objective; None if it covers only some requests of an engine's model.

    A request that failed is missed. What a histogram counts has begun or ended in the window, so a
    few requests at the window's edges are in one and not in another.
    """
    if not by_model_alone(objective):
        return None
    covered = [one for one in engines if objective.match.covers_model(one.model)]
    shares = [
        _share(covered, LATENCIES[name], getattr(objective, f"{name}_s"))
        for name in objective.limits
    ]
    known = [each for each in shares if each is not None]
    within = all_within(known) if len(known) == len(shares) else None
    if within is None or within.upper is None:
        return None
    ended = _total(map(_completed, covered)) or 0.0
    failed = _total(map(_failed, covered)) or 0.0
    answered = ended / (ended + failed) if ended + failed else 1.0
    return AttainmentBounds(
        objective=objective.name, lower=within.lower * answered, upper=within.upper * answered
    )


def by_model_alone(objective: Objective) -> bool:
    """Whether it is for all requests of its models: engines count no others apart."""
    match = objective.match
    conditions = (match.tenant, match.route, match.min_input_tokens, match.max_input_tokens)
    return all(each is None for each in conditions)


def _share(engines: Sequence[CountedEngine], metric: Metric, limit_s: float) -> Bounds | None:
    histogram = _histogram(engines, metric)
    return None if histogram is None else share_bounds(histogram, limit_s)


def _goodput(
    objectives: Sequence[Objective],
    engines: Sequence[CountedEngine],
    bounds: Sequence[AttainmentBounds],
    covered_s: float,
) -> Bounds | None:
    """Requests per second that met the only objective; None unless it covers all engines."""
    completed = _rate(engines, _completed, covered_s)
    if completed is None or len(objectives) != 1 or not bounds:
        return None
    if not all(objectives[0].match.covers_model(one.model) for one in engines):
        return None
    judged = completed + (_rate(engines, _failed, covered_s) or 0.0)
    return Bounds(bounds[0].lower * judged, bounds[0].upper * judged)
