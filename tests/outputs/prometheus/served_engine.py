"""An engine at a clock of the test, and what the exposition of its meter shows."""

from prometheus_client.parser import text_string_to_metric_families

from agent.catalog.metric import Metric
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from tests.analysis.cost.engine_days import engine_sample
from tests.records.making import NOON, judged, objective, record

CHAT = objective("chat", ttft_s=0.2)


class ServedEngine:
    """An engine that is polled every 5 s, and its meter, by a clock that `serve` moves on."""

    def __init__(self, *engines: str, begins_at: float = NOON, polled: bool = True) -> None:
        self.now_s = 0.0
        self._begins_at = begins_at
        self._finished = 0.0
        self.meter = Meter([CHAT], engines or ["chat-0"], now=self.now)
        if polled:
            self.poll()

    def now(self) -> float:
        """The Unix time of its clock."""
        return self._begins_at + self.now_s

    def poll(self) -> None:
        """Give the meter a sample."""
        facts = {"finished": self._finished, "running": 1.0, "waiting": 0.0, "kv": 0.25}
        self.meter.sample(engine_sample(self.now(), **facts))

    def serve(self, per_s: float, ttft_s: float, *, seconds: float) -> None:
        """Serve requests at a rate, each of which had its first token after some time."""
        for _ in range(int(seconds // 5)):
            rows = [
                record(
                    ttft_s=ttft_s,
                    started_at=self.now() + number / per_s,
                    ended_at=self.now() + number / per_s + 0.5,
                    received_at=self.now() + 5.0,
                )
                for number in range(int(5 * per_s))
            ]
            self.now_s += 5.0
            self._finished += 5 * per_s
            self.meter.stored(judged(rows, [CHAT]), sent=len(rows), new=len(rows))
            self.poll()

    def shown(self, metric: Metric) -> dict[tuple[str, ...], float]:
        """The series of a gauge by its own labels."""
        text = AgentExposition(self.meter, ("a", "1", "false")).render("text/plain")[0].decode()
        return {
            tuple(sample.labels[label] for label in metric.labels): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == metric.name
        }
