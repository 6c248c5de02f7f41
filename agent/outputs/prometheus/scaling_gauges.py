"""The gauges that autoscalers read, from the signals of engines."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from agent.analysis.scaling import EngineSignals, ObjectiveSignals
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.catalog.metrics import UNKNOWN
from agent.records.engine import EngineSample
from agent.records.objective import JudgedRequest, Objective

Labels = tuple[str, ...]
Gauges = dict[Metric, dict[Labels, float]]


class ScalingGauges:
    """The signals of engines as gauges; unknown ones are absent. Not for several threads."""

    def __init__(
        self, objectives: Sequence[Objective], engines: Sequence[str], now: Callable[[], float]
    ) -> None:
        """`now` gives Unix time."""
        self._now = now
        self._signals = {engine: EngineSignals(objectives) for engine in engines}
        self._models: dict[str, str] = {}

    def ended(self, engine: str, requests: Sequence[JudgedRequest]) -> None:
        """Add requests of an engine whose verdicts are final."""
        if signals := self._signals.get(engine):
            signals.ended(requests)

    def sample(self, sample: EngineSample, shown: EngineSample) -> None:
        """Add a sample; `shown` has the labels of the exposition."""
        if signals := self._signals.get(sample.engine):
            signals.sample(sample)
            self._models[sample.engine] = shown.model or UNKNOWN

    def gauges(self) -> Gauges:
        """The gauges now."""
        gauges: Gauges = defaultdict(dict)
        now = self._now()
        for engine, signals in self._signals.items():
            labels, found = (engine, self._models.get(engine, UNKNOWN)), signals.signals(now)
            if found.arrival_per_s is not None:
                gauges[m.ARRIVAL_RATE][labels] = found.arrival_per_s
            for objective, each in found.by_objective.items():
                _add(gauges, (objective, *labels), each)
        return gauges


def _add(gauges: Gauges, labels: Labels, found: ObjectiveSignals) -> None:
    for window, ratio in found.ratios.items():
        gauges[m.SLO_P90_TO_LIMIT][*labels, window] = ratio
    if found.held is not None:
        limit = m.LIMIT_FOUND if found.held.is_limit else m.LIMIT_OPEN
        gauges[m.SLO_HELD_RATE][*labels, limit] = found.held.per_s
        gauges[m.SLO_HELD_RATE_AGE][labels] = found.held.age_s
        gauges[m.SLO_HELD_RATE_CONFIDENCE][labels] = found.held.confidence
    if found.needed is not None:
        gauges[m.SLO_REPLICAS_NEEDED][labels] = found.needed
