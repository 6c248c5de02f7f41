"""From a parsed page to our facts, by the dialect that the page is written in."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from agent.analysis.failures.heartbeat import HEARTBEAT_FACTS
from agent.catalog.engine_facts import DATA_PARALLEL_RANKS, PROCESS_START_TIME, REQUESTS_RUNNING
from agent.catalog.engines import DIALECTS, Dialect, Spelling
from agent.catalog.metric import Kind, Merge, Metric
from agent.catalog.reasons import PageFault
from agent.errors import PageUnreadable
from agent.records.engine import HistogramSnapshot
from agent.sources.engines.engine_histograms import merged_histogram
from agent.sources.engines.exposition import Exposition, SeriesValue

AUTO = "auto"

Fact = tuple[str, tuple[str, ...]]

_MERGED: Mapping[Merge, Callable[[Sequence[float]], float]] = {Merge.SUM: sum, Merge.MAX: max}


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedExposition:
    """What one page told, merged over ranks. `model` is None unless the page names exactly one.

    `ranks` holds the facts of the heartbeat of each rank, where there are several.
    """

    dialect: Dialect
    model: str | None
    facts: Mapping[Fact, float]
    ranks: Mapping[str, Mapping[Fact, float]]
    histograms: Mapping[str, HistogramSnapshot]
    process_started_at: float | None
    dropped: Mapping[str, int]


def dialects_of(kind: str) -> tuple[Dialect, ...]:
    """The dialects to try for an engine of this kind; all of them for `auto`."""
    if kind == AUTO:
        return tuple(DIALECTS.values())
    if kind not in DIALECTS:
        raise ValueError(f"engine kind {kind!r} is unknown: use one of {[AUTO, *DIALECTS]}")
    return (DIALECTS[kind],)


def wanted_series(dialects: Collection[Dialect]) -> frozenset[str]:
    """Every series name that these dialects may read from a page."""
    return frozenset(
        name
        for dialect in dialects
        for prefix in dialect.prefixes
        for metric, spellings in dialect.facts.items()
        for spelling in spellings
        for name in _series_names(metric, _respelled(spelling.series, dialect, prefix))
    )


def translate(page: Exposition, dialects: Collection[Dialect]) -> TranslatedExposition:
    """The facts of a page in the dialect that has most to say about it.

    Raises PageUnreadable when no series on it is an engine's own in any of these dialects.
    """
    tellings = [
        _DialectReader(page, dialect, prefix) for dialect in dialects for prefix in dialect.prefixes
    ]
    best = max(tellings, key=lambda telling: len(telling.told))
    if not best.told:
        engines = ", ".join(dialect.engine for dialect in dialects)
        raise PageUnreadable(
            PageFault.NO_KNOWN_SERIES,
            f"the page has no series of {engines}: is it an engine's own page, and are its "
            "statistics switched on?",
        )
    return best.reading()


def _respelled(series: str, dialect: Dialect, prefix: str) -> str:
    written = dialect.prefixes[0]
    return prefix + series.removeprefix(written) if series.startswith(written) else series


def _series_names(metric: Metric, series: str) -> tuple[str, ...]:
    if metric.kind is Kind.HISTOGRAM:
        return (f"{series}_bucket", f"{series}_sum")
    return (series,)


class _DialectReader:
    """One page read as one dialect with one prefix."""

    def __init__(self, page: Exposition, dialect: Dialect, prefix: str) -> None:
        self._page = page
        self._dialect = dialect
        self._prefix = prefix
        self._found: dict[Metric, tuple[Spelling, list[SeriesValue]]] = {}
        for metric in dialect.facts:
            if newest := self._newest(metric):
                self._found[metric] = newest
        self.told = [
            metric
            for metric, (spelling, _) in self._found.items()
            if spelling.series.startswith(dialect.prefixes[0])
        ]

    def _newest(self, metric: Metric) -> tuple[Spelling, list[SeriesValue]] | None:
        """The first spelling that the page has: an engine in transition shows two."""
        for spelling in self._dialect.facts[metric]:
            name = _series_names(metric, self._name(spelling))[0]
            if samples := self._counted(name, spelling):
                return spelling, samples
        return None

    def _name(self, spelling: Spelling) -> str:
        return _respelled(spelling.series, self._dialect, self._prefix)

    def _counted(self, name: str, spelling: Spelling) -> list[SeriesValue]:
        own = [
            sample
            for sample in self._page.series.get(name, ())
            if _is_own(sample, self._dialect)
            and all(sample.labels.get(label) in values for label, values in spelling.only.items())
        ]
        return _lowest_ranks(own, self._dialect.mirrored_ranks)

    def reading(self) -> TranslatedExposition:
        dropped = Counter(self._page.dropped)
        ranks = self._ranks()
        running = (REQUESTS_RUNNING.name, ())
        facts: dict[Fact, float] = {}
        if count := sum(running in told for told in ranks.values()):
            facts[DATA_PARALLEL_RANKS.name, ()] = float(count)
        histograms: dict[str, HistogramSnapshot] = {}
        for metric, (spelling, samples) in self._found.items():
            if metric.kind is not Kind.HISTOGRAM:
                facts.update(_scalars(metric, spelling, samples))
            elif merged := self._histogram(spelling, samples):
                histograms[metric.name] = merged
            else:
                dropped[PageFault.HISTOGRAM_INCOMPLETE] += 1
        return TranslatedExposition(
            dialect=self._dialect,
            model=self._model(),
            facts=facts,
            ranks=ranks if len(ranks) > 1 else {},
            histograms=histograms,
            process_started_at=facts.get((PROCESS_START_TIME.name, ())),
            dropped=dropped,
        )

    def _histogram(
        self, spelling: Spelling, buckets: list[SeriesValue]
    ) -> HistogramSnapshot | None:
        return merged_histogram(buckets, self._counted(f"{self._name(spelling)}_sum", spelling))

    def _ranks(self) -> Mapping[str, Mapping[Fact, float]]:
        ranks: defaultdict[str, dict[Fact, float]] = defaultdict(dict)
        for metric in HEARTBEAT_FACTS & self._found.keys():
            spelling, samples = self._found[metric]
            own: defaultdict[str, list[SeriesValue]] = defaultdict(list)
            for sample in samples:
                own[self._rank(sample)].append(sample)
            own.pop("", None)
            for rank, numbers in own.items():
                ranks[rank].update(_scalars(metric, spelling, numbers))
        return ranks

    def _rank(self, sample: SeriesValue) -> str:
        """The data-parallel rank whose sample this is; empty for none."""
        return ",".join(filter(None, map(sample.labels.get, self._dialect.merged_ranks)))

    def _model(self) -> str | None:
        label = self._dialect.model_label
        told = (sample for metric in self.told for sample in self._found[metric][1])
        names = {sample.labels[label] for sample in told if label and sample.labels.get(label)}
        return names.pop() if len(names) == 1 else None


def _is_own(sample: SeriesValue, dialect: Dialect) -> bool:
    if dialect.foreign in sample.labels and dialect.own not in sample.labels:
        return False
    return all(sample.labels.get(label, total) == total for label, total in dialect.totals.items())


def _lowest_ranks(samples: list[SeriesValue], ranks: Collection[str]) -> list[SeriesValue]:
    """Of the series that differ only in these ranks, the one of the lowest."""
    if not ranks:
        return samples
    lowest: dict[frozenset[tuple[str, str]], SeriesValue] = {}
    for sample in sorted(samples, key=lambda sample: _rank(sample, ranks)):
        rest = frozenset((k, v) for k, v in sample.labels.items() if k not in ranks)
        lowest.setdefault(rest, sample)
    return list(lowest.values())


def _rank(sample: SeriesValue, ranks: Collection[str]) -> list[tuple[int, str]]:
    # By length first, so that rank 10 comes after rank 9.
    return [(len(rank), rank) for rank in (sample.labels.get(label, "") for label in ranks)]


def _scalars(
    metric: Metric, spelling: Spelling, samples: Sequence[SeriesValue]
) -> Iterator[tuple[Fact, float]]:
    groups: defaultdict[tuple[str, ...], list[float]] = defaultdict(list)
    for sample in samples:
        number = _number(sample, spelling)
        if number is not None:
            told = (sample.labels.get(spelling.labels.get(our, our), "") for our in metric.labels)
            groups[tuple(told)].append(number)
    for values, numbers in groups.items():
        merged = _MERGED[spelling.merge or metric.merge](numbers)
        if merged or not spelling.zero_means_off:
            yield (metric.name, values), merged


def _number(sample: SeriesValue, spelling: Spelling) -> float | None:
    if spelling.number_in is None:
        return sample.value
    text = sample.labels.get(spelling.number_in, "")
    try:
        number = spelling.words[text] if text in spelling.words else float(text)
    except ValueError:
        # What the engine has not settled, an info series writes as the word None.
        return None
    return number if isfinite(number) else None
