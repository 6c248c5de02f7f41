"""The gauges that autoscalers read, from the signals of engines."""

from collections import defaultdict
from collections.abc import Callable, Sequence

from agent.analysis.scaling import EngineSignals, Held, ObjectiveSignals
from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.catalog.metrics import UNKNOWN
from agent.records.engine import EngineSample
from agent.records.held_rate import HeldRates, RateEvidence
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

    def held_rates(self) -> HeldRates:
        """What was learnt of the rates that engines hold."""
        learnt: defaultdict[str, dict[str, Sequence[RateEvidence]]] = defaultdict(dict)
        for engine, signals in self._signals.items():
            for objective, evidence in signals.learnt.items():
                learnt[objective][engine] = evidence
        return learnt

    def remember(self, held_rates: HeldRates) -> None:
        """Take what an earlier run of the agent learnt, where this one has learnt nothing."""
        for objective, by_engine in held_rates.items():
            for engine, evidence in by_engine.items():
                if signals := self._signals.get(engine):
                    signals.remember(objective, evidence)

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
                # Before the first sample, what an earlier run learnt has no model.
                if each.held is not None and engine in self._models:
                    _add_held(gauges, (objective, *labels), each.held)
        return gauges


def _add(gauges: Gauges, labels: Labels, found: ObjectiveSignals) -> None:
    for window, ratio in found.ratios.items():
        gauges[m.SLO_P90_TO_LIMIT][*labels, window] = ratio
    if found.needed is not None:
        gauges[m.SLO_REPLICAS_NEEDED][labels] = found.needed


def _add_held(gauges: Gauges, labels: Labels, held: Held) -> None:
    limit = m.LIMIT_FOUND if held.is_limit else m.LIMIT_OPEN
    gauges[m.SLO_HELD_RATE][*labels, limit] = held.per_s
    gauges[m.SLO_HELD_RATE_AGE][labels] = held.age_s
    gauges[m.SLO_HELD_RATE_CONFIDENCE][labels] = held.confidence
