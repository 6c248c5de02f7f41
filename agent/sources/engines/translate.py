"""Translates a parsed exposition to our facts, by the dialect of the engine.

Merges the ranks of a data-parallel engine, and detects facts that an engine no longer gives.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf, isfinite, isnan

from agent.analysis.failures.progress import PROGRESS_FACTS
from agent.analysis.rank_skew import GAP_COUNT, GAP_SUM
from agent.catalog.engine_facts import (
    DATA_PARALLEL_RANKS,
    ENGINE_FACTS,
    FACT_MISSING,
    INTER_TOKEN_LATENCY,
    OUTPUT_TOKENS,
    PROCESS_START_TIME,
    REQUEST_DURATION,
    REQUESTS_FINISHED,
    REQUESTS_RUNNING,
)
from agent.catalog.engine_flags import LIMIT_FLAGS
from agent.catalog.engines import DIALECTS, Dialect, Spelling
from agent.catalog.metric import Kind, Merge, Metric
from agent.catalog.metrics import OTHER
from agent.catalog.reasons import ExpositionFault
from agent.errors import ExpositionUnreadable
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.gpu import FactKey, Facts
from agent.sources.engines.exposition import Exposition, SeriesValue


def merged_histogram(
    buckets: Collection[SeriesValue], sums: Collection[SeriesValue]
) -> HistogramSnapshot | None:
    """The counts of all ranks added, at the bounds that all ranks have.

    None when a rank's last bucket, the sum, or the number of a bound is missing.
    """
    try:
        ranks = _by_rank(buckets)
    except (KeyError, ValueError):
        return None
    if not sums or any(inf not in counts for counts in ranks):
        return None
    bounds = sorted(frozenset.intersection(*(frozenset(counts) for counts in ranks)))
    counts = [sum(rank[bound] for rank in ranks) for bound in bounds]
    # In an exposition written while requests finish, a bucket can lag one behind a lower bucket.
    return HistogramSnapshot(
        tuple(bounds), tuple(accumulate(counts, max)), sum(sample.value for sample in sums)
    )


def _by_rank(buckets: Collection[SeriesValue]) -> list[Mapping[float, float]]:
    ranks: defaultdict[frozenset[tuple[str, str]], dict[float, float]] = defaultdict(dict)
    for bucket in buckets:
        rank = frozenset((k, v) for k, v in bucket.labels.items() if k != "le")
        ranks[rank][_bound(bucket.labels["le"])] = bucket.value
    return list(ranks.values())


def _bound(le: str) -> float:
    # As a number: "1" and "1.0" are one bound.
    bound = float(le)
    if isnan(bound):
        raise ValueError
    return bound


AUTO = "auto"

_COUNTERS = frozenset(fact.name for fact in ENGINE_FACTS if fact.kind is Kind.COUNTER)

# Of each fact; the rest of them, which no engine has, is one more.
MAX_LABEL_SETS = 100

_MERGED: Mapping[Merge, Callable[[Sequence[float]], float]] = {Merge.SUM: sum, Merge.MAX: max}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedExposition:
    """The facts of one exposition, merged over ranks. `model` is None unless it names exactly one.

    `ranks` holds the heartbeat facts of each rank, if there are several, and the sum and the
    count of its gaps between outputs. `families` are the counters and histograms that the
    exposition has, also those without a series yet.
    """

    dialect: Dialect
    model: str | None
    facts: Facts
    ranks: Mapping[str, Facts]
    histograms: Mapping[str, HistogramSnapshot]
    process_started_at: float | None
    dropped: Mapping[str, int]
    families: frozenset[str] = frozenset()
    kept: Facts = field(default_factory=dict)

    def counted_as(self, other: "TranslatedExposition") -> "TranslatedExposition":
        """The same with the counters and histograms of another one, which has more."""
        counters = {key: value for key, value in other.facts.items() if key[0] in _COUNTERS}
        return replace(
            self,
            facts={**self.facts, **counters},
            histograms={**self.histograms, **other.histograms},
            kept={key: value - self.facts.get(key, 0.0) for key, value in counters.items()},
        )


def dialects_of(kind: str) -> tuple[Dialect, ...]:
    """The dialects to try for an engine of this kind; all of them for `auto`."""
    if kind == AUTO:
        return tuple(DIALECTS.values())
    if kind not in DIALECTS:
        raise ValueError(f"engine kind {kind!r} is unknown: use one of {[AUTO, *DIALECTS]}")
    return (DIALECTS[kind],)


def wanted_series(dialects: Collection[Dialect]) -> frozenset[str]:
    """Every series name that these dialects read."""
    return series_of_facts(dialects, tuple(Kind))


def series_of_facts(dialects: Collection[Dialect], kinds: Collection[Kind]) -> frozenset[str]:
    """Every series name that these dialects read for facts of some kinds."""
    return frozenset(
        name
        for dialect in dialects
        for prefix in dialect.prefixes
        for metric, spellings in dialect.facts.items()
        if metric.kind in kinds
        for spelling in spellings
        for series in (spelling.series, *spelling.also)
        for name in _series_names(metric, _respelled(series, dialect, prefix))
    )


def translate(exposition: Exposition, dialects: Collection[Dialect]) -> TranslatedExposition:
    """The facts of an exposition in the dialect that knows the most of its series.

    Raises ExpositionUnreadable when none of its series is an engine's own in any of these dialects.
    """
    readers = [
        _DialectReader(exposition, dialect, prefix)
        for dialect in dialects
        for prefix in dialect.prefixes
    ]
    best = max(readers, key=lambda reader: len(reader.own))
    if not best.own:
        names = [dialect.engine for dialect in dialects]
        engine = names[0] if len(names) == 1 else f"a known engine ({', '.join(names)})"
        raise ExpositionUnreadable(
            ExpositionFault.NO_KNOWN_SERIES,
            f"has no series of {engine}: are its statistics switched on?",
        )
    return best.translated()


def _respelled(series: str, dialect: Dialect, prefix: str) -> str:
    written = dialect.prefixes[0]
    return prefix + series.removeprefix(written) if series.startswith(written) else series


def _series_names(metric: Metric, series: str) -> tuple[str, ...]:
    return tuple(series + suffix for suffix in _suffixes(metric))


def _suffixes(metric: Metric) -> tuple[str, ...]:
    return ("_bucket", "_sum") if metric.kind is Kind.HISTOGRAM else ("",)


class _DialectReader:
    """Reads an exposition in one dialect with one prefix."""

    def __init__(self, exposition: Exposition, dialect: Dialect, prefix: str) -> None:
        self._exposition = exposition
        self._dialect = dialect
        self._prefix = prefix
        self._found: dict[Metric, tuple[Spelling, list[SeriesValue]]] = {}
        for metric in dialect.facts:
            if newest := self._newest(metric):
                self._found[metric] = newest
        self.own = [metric for metric, (spelling, _) in self._found.items() if not spelling.shared]

    def _newest(self, metric: Metric) -> tuple[Spelling, list[SeriesValue]] | None:
        """The newest spelling in the exposition: an engine in transition has two."""
        for spelling in self._dialect.facts[metric]:
            series = self._counted(spelling, _suffixes(metric)[0])
            if metric.kind is Kind.GAUGE:
                series = _totals(series, self._dialect.totals)
            if series:
                return spelling, series
        return None

    def _counted(self, spelling: Spelling, suffix: str) -> list[SeriesValue]:
        values = self._values(spelling, suffix)
        if not values:
            return []
        own = [
            each
            for each in values
            if _is_own(each, self._dialect)
            and all(each.labels.get(label) in values for label, values in spelling.only.items())
        ]
        return _lowest_ranks(own, self._dialect.mirrored_ranks)

    def _values(self, spelling: Spelling, suffix: str) -> Sequence[SeriesValue]:
        if not spelling.also:
            return self._named(spelling.series, suffix)
        # Histograms that are added are distinguished like those of ranks.
        return [
            SeriesValue({**each.labels, "series": series}, each.value)
            for series in (spelling.series, *spelling.also)
            for each in self._named(series, suffix)
        ]

    def _named(self, series: str, suffix: str) -> Sequence[SeriesValue]:
        name = _respelled(series, self._dialect, self._prefix) + suffix
        return self._exposition.series.get(name, ())

    def translated(self) -> TranslatedExposition:
        dropped: Counter[str] = Counter(self._exposition.dropped)
        ranks = self._ranks()
        running = (REQUESTS_RUNNING.name, ())
        facts: dict[FactKey, float] = {}
        if count := sum(running in known for known in ranks.values()):
            facts[DATA_PARALLEL_RANKS.name, ()] = float(count)
        histograms: dict[str, HistogramSnapshot] = {}
        for metric, (spelling, series) in self._found.items():
            if metric.kind is Kind.HISTOGRAM:
                merged = self._histogram(spelling, series)
                if isinstance(merged, ExpositionFault):
                    dropped[merged] += 1
                else:
                    histograms[metric.name] = merged
            else:
                known = [each for each in series if each.value >= 0]
                dropped[ExpositionFault.VALUE_NEGATIVE] += len(series) - len(known)
                facts.update(_scalars(metric, spelling, known, self._dialect.replicas))
        return TranslatedExposition(
            dialect=self._dialect,
            model=self._model(),
            facts=facts,
            ranks=ranks if len(ranks) > 1 else {},
            histograms=histograms,
            process_started_at=facts.get((PROCESS_START_TIME.name, ())),
            dropped=+dropped,
            families=frozenset(self._families()),
        )

    def _families(self) -> Iterator[str]:
        for metric, spellings in self._dialect.facts.items():
            if metric.kind is not Kind.GAUGE and any(map(self._has_family, spellings)):
                yield metric.name

    def _has_family(self, spelling: Spelling) -> bool:
        name = _respelled(spelling.series, self._dialect, self._prefix)
        types = self._exposition.families
        # OpenMetrics leaves `_total` out of a family's name.
        return (
            name in types or name.removesuffix("_total") in types or name in self._exposition.series
        )

    def _histogram(
        self, spelling: Spelling, buckets: list[SeriesValue]
    ) -> HistogramSnapshot | ExpositionFault:
        sums = self._counted(spelling, "_sum")
        # An engine that counts backwards, as SGLang did, has no right part either.
        if any(each.value < 0 for each in (*buckets, *sums)):
            return ExpositionFault.VALUE_NEGATIVE
        return merged_histogram(buckets, sums) or ExpositionFault.HISTOGRAM_INCOMPLETE

    def _ranks(self) -> Mapping[str, Facts]:
        ranks: defaultdict[str, dict[FactKey, float]] = defaultdict(dict)
        for metric in PROGRESS_FACTS & self._found.keys():
            spelling, series = self._found[metric]
            for rank, numbers in self._of_ranks(series).items():
                ranks[rank].update(_scalars(metric, spelling, numbers, self._dialect.replicas))
        for rank, histogram in self._gaps_of_ranks():
            if rank in ranks:
                ranks[rank][GAP_COUNT, ()] = histogram.counts[-1]
                ranks[rank][GAP_SUM, ()] = histogram.sum
        return ranks

    def _of_ranks(self, series: Collection[SeriesValue]) -> Mapping[str, list[SeriesValue]]:
        """The series that name a rank, by it."""
        own: defaultdict[str, list[SeriesValue]] = defaultdict(list)
        for each in series:
            own[self._rank(each)].append(each)
        own.pop("", None)
        return own

    def _gaps_of_ranks(self) -> Iterator[tuple[str, HistogramSnapshot]]:
        if INTER_TOKEN_LATENCY in self._found:
            spelling, buckets = self._found[INTER_TOKEN_LATENCY]
            sums = self._of_ranks(self._counted(spelling, "_sum"))
            for rank, own in self._of_ranks(buckets).items():
                if histogram := merged_histogram(own, sums.get(rank, ())):
                    yield rank, histogram

    def _rank(self, each: SeriesValue) -> str:
        """The data-parallel rank of a series, after its replica; empty for none."""
        labels = (*self._dialect.replicas, *self._dialect.merged_ranks)
        return ",".join(filter(None, map(each.labels.get, labels)))

    def _model(self) -> str | None:
        labels = self._dialect.model_labels
        series = (one for metric in self.own for one in self._found[metric][1])
        named = set(filter(None, (_first(one.labels, labels) for one in series)))
        names = named - self._dialect.no_models
        return names.pop() if len(names) == 1 else None


def _first(labels: Mapping[str, str], names: Sequence[str]) -> str:
    # Without a generator: this is called for each series.
    for name in names:
        if found := labels.get(name):
            return found
    return ""


def _is_own(each: SeriesValue, dialect: Dialect) -> bool:
    return dialect.foreign not in each.labels or dialect.own in each.labels


def _totals(series: list[SeriesValue], totals: Mapping[str, str]) -> list[SeriesValue]:
    """The series that are totals of the others; all of them if none is."""
    found = [
        each
        for each in series
        if all(each.labels.get(label, total) == total for label, total in totals.items())
    ]
    return found or series


def _lowest_ranks(series: list[SeriesValue], ranks: Collection[str]) -> list[SeriesValue]:
    """The series of the lowest rank, of those that differ in these rank labels alone."""
    if not ranks:
        return series
    lowest: dict[frozenset[tuple[str, str]], SeriesValue] = {}
    for each in sorted(series, key=lambda each: _rank(each, ranks)):
        rest = frozenset((k, v) for k, v in each.labels.items() if k not in ranks)
        lowest.setdefault(rest, each)
    return list(lowest.values())


def _rank(each: SeriesValue, ranks: Collection[str]) -> list[tuple[int, str]]:
    # By length first, so that rank 10 comes after rank 9.
    return [(len(rank), rank) for rank in (each.labels.get(label, "") for label in ranks)]


def _scalars(
    metric: Metric,
    spelling: Spelling,
    series: Sequence[SeriesValue],
    replicas: Sequence[str],
) -> Iterator[tuple[FactKey, float]]:
    groups: defaultdict[tuple[str, ...], list[SeriesValue]] = defaultdict(list)
    for each in series:
        labels = {**each.labels, **spelling.implies}
        ours = tuple(labels.get(spelling.labels.get(our, our), "") for our in metric.labels)
        is_beyond = ours not in groups and len(groups) >= MAX_LABEL_SETS
        groups[(OTHER,) * len(ours) if is_beyond else ours].append(each)
    for values, of_fact in groups.items():
        merged = _merged(metric, spelling, of_fact, replicas)
        if merged is not None and (merged or not spelling.zero_means_off):
            yield (metric.name, values), merged


def _merged(
    metric: Metric, spelling: Spelling, series: Sequence[SeriesValue], replicas: Sequence[str]
) -> float | None:
    """One value of all ranks. Their rule may be the spelling's; replicas have the fact's own."""
    if len(series) == 1:
        return _number(series[0], spelling)
    by_replica: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for each in series:
        number = _number(each, spelling)
        if number is not None:
            replica = tuple([each.labels.get(label, "") for label in replicas])
            by_replica[replica].append(number)
    if not by_replica:
        return None
    of_ranks = _MERGED[spelling.merge or metric.merge]
    return _MERGED[metric.merge]([of_ranks(numbers) for numbers in by_replica.values()])


def _number(each: SeriesValue, spelling: Spelling) -> float | None:
    if spelling.implies:
        return 1.0
    if spelling.number_in is None:
        return each.value
    text = each.labels.get(spelling.number_in, "")
    try:
        number = spelling.words[text] if text in spelling.words else float(text)
    except ValueError:
        # An info series has the word None for a value that the engine has not decided.
        return None
    return number if isfinite(number) else None


_LOG = logging.getLogger(__name__)

_LIMITS = frozenset(limit.name for limit in LIMIT_FLAGS)


class NameDrift:
    """Compares each sample of one engine with the earlier ones, also over restarts."""

    def __init__(self, engine: str, before: EngineSample | None = None) -> None:
        """`before` is the last sample of an earlier run of the agent: an upgrade of the engine
        often restarts the agent beside it. A stored sample has no histograms, and its limits may
        come from the settings."""
        self._engine = engine
        known: Facts = {} if before is None else before.facts
        self._dialect = None if before is None else DIALECTS.get(before.dialect)
        self._gone = frozenset(
            labels[0] for name, labels in known if name == FACT_MISSING.name and labels
        )
        self._seen = {name for name, _ in known} - _LIMITS | self._gone

    def gone(self, sample: EngineSample, dialect: Dialect) -> frozenset[str]:
        """The expected facts that were there before and are not in this sample."""
        if dialect is not self._dialect:
            self._dialect, self._seen, self._gone = dialect, set(), frozenset()
        present = frozenset(name for name, _ in sample.facts) | sample.histograms.keys()
        before = self._gone
        # Some engines create a series at its first use.
        missing = expected_facts(dialect) & self._seen if _has_worked(sample) else before
        self._gone = missing - present
        self._seen |= present
        if new := self._gone - before:
            _LOG.warning(
                "engine %s gives no %s any more: did an upgrade rename its series?",
                self._engine,
                ", ".join(sorted(new)),
            )
        if back := before - self._gone:
            _LOG.info("engine %s gives %s again", self._engine, ", ".join(sorted(back)))
        return self._gone


def expected_facts(dialect: Dialect) -> frozenset[str]:
    """The facts that every engine of a dialect gives once a request has finished."""
    return frozenset(metric.name for metric in dialect.facts.keys() - dialect.occasional)


def _has_worked(sample: EngineSample) -> bool:
    """Whether a request has finished since the start of the engine, by whatever it still gives."""
    finished = [
        value for (name, _), value in sample.facts.items() if name == REQUESTS_FINISHED.name
    ]
    durations = sample.histograms.get(REQUEST_DURATION.name)
    return bool(
        sum(finished)
        or (durations and durations.counts[-1])
        or (sample.fact(OUTPUT_TOKENS.name) and sample.fact(REQUESTS_RUNNING.name) == 0)
    )
