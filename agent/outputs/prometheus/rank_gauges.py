"""The gauges of data-parallel ranks: the load of each, and how uneven they are."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice

from agent.analysis.rank_skew import RankWindow
from agent.catalog import engine_facts as fact
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.catalog.metrics import UNKNOWN
from agent.records.engine import EngineSample

Labels = tuple[str, ...]
Gauges = dict[Metric, dict[Labels, float]]

# Of an engine with more ranks, these many have gauges of their own. The skew is that of all.
MAX_RANKS = 128

_OF_RANK: Mapping[Metric, Metric] = {
    m.RANK_REQUESTS_RUNNING: fact.REQUESTS_RUNNING,
    m.RANK_REQUESTS_WAITING: fact.REQUESTS_WAITING,
    m.RANK_KV_CACHE_USAGE: fact.KV_CACHE_USAGE,
}


class RankGauges:
    """The ranks of all engines; an engine with one rank has no gauges. Not for several threads."""

    def __init__(self, engines: Sequence[str]) -> None:
        self._windows = {engine: RankWindow() for engine in engines}

    def sample(self, sample: EngineSample) -> None:
        """Add a sample of an engine."""
        if window := self._windows.get(sample.engine):
            window.sample(sample)

    def skews(self, engine: str) -> Mapping[str, float]:
        """How uneven the engine's ranks are, by measure; empty with one rank."""
        window = self._windows.get(engine)
        return {} if window is None else window.skews()

    def gauges(self, published: Mapping[str, EngineSample | None]) -> Gauges:
        """The gauges of the engines whose newest sample is `published`."""
        gauges: Gauges = defaultdict(dict)
        for engine, sample in published.items():
            if sample is not None and sample.ranks and engine in self._windows:
                self._add(gauges, sample, self._windows[engine])
        return gauges

    def _add(self, gauges: Gauges, sample: EngineSample, window: RankWindow) -> None:
        labels = (sample.engine, sample.model or UNKNOWN)
        step_times = window.step_times()
        for rank, facts in islice(sample.ranks.items(), MAX_RANKS):
            for metric, of in _OF_RANK.items():
                if (value := facts.fact(of.name)) is not None:
                    gauges[metric][*labels, rank] = value
            if rank in step_times:
                gauges[m.RANK_STEP_TIME][*labels, rank] = step_times[rank]
        for measure, ratio in window.skews().items():
            gauges[m.RANK_SKEW][*labels, measure] = ratio
