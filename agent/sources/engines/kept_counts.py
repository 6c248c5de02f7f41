"""Keeps what ranks and replicas of an engine had counted when they left: a counter never falls."""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping

from agent.catalog.engines import Dialect
from agent.catalog.metric import Kind
from agent.sources.engines.exposition import Exposition, SeriesValue, parsed_series
from agent.sources.engines.translate import series_of_facts

# The series that are recognised when they come back: those of some hundred ranks.
MAX_GONE = 65_536
_STARTED_AT = "process_start_time_seconds"
# The reported start time of one process wavers by less.
_SAME_START_S = 1.0

_Part = tuple[str, ...]
_Key = tuple[str, frozenset[tuple[str, str]]]


class KeptCounts:
    """Compares each exposition of one engine with the one before.

    A part is a data-parallel rank or a replica. The counts of a part that left, or began again
    beside others, are kept; a part that comes back with no less has its own counts again. If no
    part goes on, the engine has restarted, and nothing is kept.
    """

    def __init__(self, dialects: Collection[Dialect]) -> None:
        counted = (Kind.COUNTER, Kind.HISTOGRAM)
        self._counters = series_of_facts(dialects, counted)
        parts = (label for each in dialects for label in (*each.replicas, *each.merged_ranks))
        self._part_labels = tuple(dict.fromkeys(parts))
        self._before: Mapping[str, float] = {}
        # The last value of each series that is gone, and the sums of what is kept.
        self._gone: OrderedDict[str, float] = OrderedDict()
        self._kept: defaultdict[_Key, float] = defaultdict(float)

    def completed(self, now: Exposition) -> Exposition | None:
        """The exposition with series of what is kept; None if nothing is."""
        self._compare(self._before, now.numbers)
        self._before = now.numbers
        if not self._kept:
            return None
        series = dict(now.series)
        for (name, labels), value in self._kept.items():
            series[name] = (*series.get(name, ()), SeriesValue(dict(labels), value))
        return Exposition(series, now.dropped, now.numbers, now.families)

    def _compare(self, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        if _other_process(before, now):
            self._forget()
            return
        fell = self._counting(s for s, value in now.items() if value < before.get(s, value))
        gone = self._counting(before.keys() - now.keys())
        if fell or gone:
            again = self._began_again(before, now, fell + gone)
            if again and not self._goes_on(before, now, again):
                self._forget()
                return
            self._keep({s: before[s] for s in fell if self._part(s) in again})
            self._keep({s: before[s] for s in gone})
            self._gone.update((s, before[s]) for s in gone)
        for series in self._gone.keys() & now.keys():
            last = self._gone.pop(series)
            if now[series] >= last:
                self._keep({series: -last})
        while len(self._gone) > MAX_GONE:
            self._gone.popitem(last=False)

    def _began_again(
        self, before: Mapping[str, float], now: Mapping[str, float], less: Iterable[str]
    ) -> set[_Part]:
        """The parts that stayed and of which most counters fell, or are gone."""
        # Series without a part are of the engine's front, which is always there.
        present = {self._part(series) for series in now} | {("",) * len(self._part_labels)}
        counted = Counter(self._part(s) for s in self._counting(before) if before[s] > 0)
        fewer = Counter(self._part(series) for series in less if before[series] > 0)
        return {part for part, count in fewer.items() if 2 * count > counted[part]} & present

    def _goes_on(
        self, before: Mapping[str, float], now: Mapping[str, float], again: set[_Part]
    ) -> bool:
        counting = {self._part(s) for s in self._counting(before) if before[s] > 0 and s in now}
        return bool(counting - again)

    def _counting(self, series: Iterable[str]) -> list[str]:
        return [each for each in series if parsed_series(each)[0] in self._counters]

    def _part(self, series: str) -> _Part:
        labels = parsed_series(series)[1]
        return tuple([labels.get(label, "") for label in self._part_labels])

    def _keep(self, counts: Mapping[str, float]) -> None:
        for series, count in counts.items():
            name, labels = parsed_series(series)
            of_none = {label: "" for label in self._part_labels if label in labels}
            key = name, frozenset({**labels, **of_none}.items())
            self._kept[key] += count
            if not self._kept[key]:
                del self._kept[key]

    def _forget(self) -> None:
        self._gone.clear()
        self._kept.clear()


def _other_process(before: Mapping[str, float], now: Mapping[str, float]) -> bool:
    then, started_at = before.get(_STARTED_AT), now.get(_STARTED_AT)
    return then is not None and started_at is not None and abs(started_at - then) >= _SAME_START_S
