"""The gauges for autoscalers in the exposition of a meter, by a clock of the test."""

from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.catalog import metrics as m
from agent.catalog.metric import Metric
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from tests.analysis.cost.engine_days import engine_sample
from tests.records.making import NOON, judged, objective, record

CHAT = objective("chat", ttft_s=0.2)
SHOWN = (
    m.ARRIVAL_RATE,
    m.SLO_P90_TO_LIMIT,
    m.SLO_HELD_RATE,
    m.SLO_HELD_RATE_AGE,
    m.SLO_HELD_RATE_CONFIDENCE,
    m.SLO_REPLICAS_NEEDED,
)


class Engine:
    """An engine that is polled every 5 s; `serve` is by a clock that begins at NOON."""

    def __init__(self, *engines: str) -> None:
        self.now_s = 0.0
        self._finished = 0.0
        self.meter = Meter([CHAT], engines or ["chat-0"], now=lambda: NOON + self.now_s)
        self._poll()

    def _poll(self) -> None:
        at = NOON + self.now_s
        self.meter.sample(
            engine_sample(at, finished=self._finished, running=1.0, waiting=0.0, kv=0.25)
        )

    def serve(self, per_s: float, ttft_s: float, *, seconds: float) -> None:
        """Serve requests at a rate, each of which had its first token after some time."""
        for _ in range(int(seconds // 5)):
            rows = [
                record(
                    ttft_s=ttft_s,
                    started_at=NOON + self.now_s + number / per_s,
                    ended_at=NOON + self.now_s + number / per_s + 0.5,
                    received_at=NOON + self.now_s + 5.0,
                )
                for number in range(int(5 * per_s))
            ]
            self.now_s += 5.0
            self._finished += 5 * per_s
            self.meter.stored(judged(rows, [CHAT]), sent=len(rows), new=len(rows))
            self._poll()

    def shown(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """The series of a gauge by its own labels."""
        text = AgentExposition(self.meter, ("a", "1", "false")).render("text/plain")[0].decode()
        return {
            tuple(sample.labels[label] for label in metric.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == metric.name
        }


def test_a_new_engine_has_no_series_and_no_zeros() -> None:
    engine = Engine()
    assert {metric.name: engine.shown(metric) for metric in SHOWN} == {
        metric.name: {} for metric in SHOWN
    }


def test_five_seconds_after_a_cold_start_what_is_needed_is_known() -> None:
    engine = Engine()
    engine.serve(2.0, 0.1, seconds=5.0)
    assert engine.shown(m.ARRIVAL_RATE) == {("chat-0", "llama"): 2.0}
    needed = engine.shown(m.SLO_REPLICAS_NEEDED)
    assert needed == {("chat", "chat-0", "llama"): pytest.approx(0.5, rel=0.006)}
    ratios = engine.shown(m.SLO_P90_TO_LIMIT)
    assert {labels[-1] for labels in ratios} == {"1m", "5m"}
    assert engine.shown(m.SLO_HELD_RATE) == {}


def test_after_a_minute_too_many_the_rate_below_it_is_what_a_replica_holds() -> None:
    engine = Engine()
    engine.serve(4.0, 0.1, seconds=600.0)
    engine.serve(8.0, 0.5, seconds=120.0)
    engine.serve(2.0, 0.1, seconds=420.0)
    held = engine.shown(m.SLO_HELD_RATE)
    assert held == {("chat", "chat-0", "llama", m.LIMIT_FOUND): pytest.approx(4.0, rel=0.006)}
    needed = engine.shown(m.SLO_REPLICAS_NEEDED)
    assert needed == {("chat", "chat-0", "llama"): pytest.approx(0.5, rel=0.006)}
    # 600 s ended 540 s ago.
    assert engine.shown(m.SLO_HELD_RATE_AGE) == {("chat", "chat-0", "llama"): pytest.approx(540.0)}
    (confidence,) = engine.shown(m.SLO_HELD_RATE_CONFIDENCE).values()
    assert 0.5 < confidence < 1.0


def test_while_no_minute_has_missed_the_limit_is_open() -> None:
    engine = Engine()
    engine.serve(4.0, 0.1, seconds=480.0)
    assert [labels[-1] for labels in engine.shown(m.SLO_HELD_RATE)] == [m.LIMIT_OPEN]


def test_an_engine_without_requests_does_not_get_those_of_another() -> None:
    engine = Engine("chat-0", "chat-1")
    engine.serve(2.0, 0.1, seconds=5.0)
    assert {labels[1] for labels in engine.shown(m.SLO_P90_TO_LIMIT)} == {"chat-0"}


def test_a_model_beyond_the_limit_of_labels_is_other_here_too() -> None:
    engine = Engine()
    sample = engine_sample(NOON + 5.0, finished=9.0, running=1.0, waiting=0.0)
    engine.meter.sample(replace(sample, model="other"))
    engine.now_s = 5.0
    assert engine.shown(m.ARRIVAL_RATE) == {("chat-0", "other"): pytest.approx(1.8)}
