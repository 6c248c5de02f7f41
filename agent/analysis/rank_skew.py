"""How uneven the data-parallel ranks of an engine are, from its samples of the last minutes."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from math import fsum

from agent.catalog.engine_facts import (
    INTER_TOKEN_LATENCY,
    KV_CACHE_USAGE,
    REQUESTS_RUNNING,
    REQUESTS_WAITING,
)
from agent.catalog.metric import Metric
from agent.records.engine import EngineSample

# Samples of this time count: a load balancer needs some requests of each rank to even them out.
WINDOW_S = 300.0

REQUESTS, RUNNING, WAITING = "requests", "running", "waiting"
KV_USAGE, STEP_TIME = "kv_cache_usage", "step_time"

# Counts of a rank's histogram, which are in its facts.
GAP_SUM, GAP_COUNT = f"{INTER_TOKEN_LATENCY.name}_sum", f"{INTER_TOKEN_LATENCY.name}_count"

_Ranks = Mapping[str, EngineSample]
_Read = Callable[[EngineSample], float | None]


def skew(of_ranks: Collection[float]) -> float | None:
    """The highest value over the mean: 1 is even. None without ranks, and if all are 0."""
    whole = fsum(of_ranks)
    return max(of_ranks) * len(of_ranks) / whole if whole > 0 else None


class RankWindow:
    """The samples of one engine's ranks in the last minutes; empty with fewer than two ranks."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, _Ranks]] = deque()

    def sample(self, sample: EngineSample) -> None:
        """Add a sample. Other ranks than before begin anew."""
        if self._samples and self._samples[-1][1].keys() != sample.ranks.keys():
            self._samples.clear()
        if sample.ranks:
            self._samples.append((sample.at, sample.ranks))
        while self._samples and self._samples[0][0] < sample.at - WINDOW_S:
            self._samples.popleft()

    def step_times(self) -> Mapping[str, float]:
        """The mean seconds between two outputs of a request, by rank; without idle ranks."""
        if not self._samples:
            return {}
        (_, first), (_, last) = self._samples[0], self._samples[-1]
        found = {rank: _mean_gap(first[rank], last[rank]) for rank in last}
        return {rank: gap_s for rank, gap_s in found.items() if gap_s is not None}

    def skews(self) -> Mapping[str, float]:
        """The skew by measure, without unknown ones. Idle ranks have no step time."""
        by_rank = {
            REQUESTS: self._means(_requests),
            RUNNING: self._means(_of(REQUESTS_RUNNING)),
            WAITING: self._means(_of(REQUESTS_WAITING)),
            KV_USAGE: self._means(_of(KV_CACHE_USAGE)),
            STEP_TIME: [*self.step_times().values()],
        }
        found = {measure: skew(values) for measure, values in by_rank.items() if len(values) > 1}
        return {measure: ratio for measure, ratio in found.items() if ratio is not None}

    def _means(self, read: _Read) -> list[float]:
        """The mean of each rank over the samples; empty if one of them is unknown."""
        if not self._samples:
            return []
        means = []
        for rank in self._samples[-1][1]:
            values = [read(ranks[rank]) for _, ranks in self._samples]
            known = [value for value in values if value is not None]
            if len(known) < len(values):
                return []
            means.append(fsum(known) / len(known))
        return means


def _of(metric: Metric) -> _Read:
    return lambda rank: rank.fact(metric.name)


def _requests(rank: EngineSample) -> float | None:
    running, waiting = rank.fact(REQUESTS_RUNNING.name), rank.fact(REQUESTS_WAITING.name)
    return None if running is None or waiting is None else running + waiting


def _mean_gap(first: EngineSample, last: EngineSample) -> float | None:
    """None if no output came, or if the counts began again."""
    then_s, now_s = first.fact(GAP_SUM), last.fact(GAP_SUM)
    then, now = first.fact(GAP_COUNT), last.fact(GAP_COUNT)
    if then_s is None or now_s is None or then is None or now is None or now <= then:
        return None
    return (now_s - then_s) / (now - then) if now_s >= then_s else None
