"""Cost of a small batching engine that stalls decode during each prefill."""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum

import pytest

from agent.analysis.efficiency.engine_observation import minute_start_near
from agent.analysis.efficiency.time_range import TimeRange, TimeRanges, covered_s
from agent.records.engine import EngineSample
from agent.records.request import RequestRecord
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    SplitMinute,
    cost,
    engine_sample,
    request,
    whole,
)

MINUTES = 5


@dataclass
class QueuedRequest:
    """A request in the engine; `leaves`: its client disconnects after half of the tokens."""

    number: int
    arrived_at: float
    input_tokens: int
    output_tokens: int
    leaves: bool
    begun_at: float = 0.0
    first_at: float = 0.0
    generated: int = 0

    def row(self, ended_at: float) -> RequestRecord:
        """The row of its span."""
        return request(
            self.number,
            self.arrived_at,
            queue_s=self.begun_at - self.arrived_at,
            prefill_s=self.first_at - self.begun_at,
            decode_s=ended_at - self.first_at,
            input_tokens=self.input_tokens,
            output_tokens=self.generated,
        )._replace(ended_at=ended_at)


@dataclass
class BatchingEngine:
    """Runs until `until`, each step either one prefill or a token for every running request."""

    chance: random.Random
    rate: float
    leave_ratio: float
    now: float = 0.0
    arrived: int = 0
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("steps", "input", "cached", "output"), 0.0)
    )
    waiting: list[QueuedRequest] = field(default_factory=list)
    running: list[QueuedRequest] = field(default_factory=list)
    rows: list[RequestRecord] = field(default_factory=list)
    samples: list[EngineSample] = field(default_factory=list)
    busy: list[TimeRange] = field(default_factory=list)

    def run(self, until: float) -> None:
        """Serves requests; a sample is taken about every five seconds."""
        arrives, reads = self.chance.expovariate(self.rate), 0.3
        while self.now < until:
            while min(arrives, reads) <= self.now:
                if reads <= arrives:
                    running = float(len(self.running))
                    self.samples.append(engine_sample(reads, running=running, **self.counts))
                    reads += self.chance.uniform(4.95, 5.05)
                else:
                    self.waiting.append(self._arrive(arrives))
                    arrives += self.chance.expovariate(self.rate)
            if not self._step():
                self.now = min(arrives, reads)

    def _arrive(self, at: float) -> QueuedRequest:
        self.arrived += 1
        prompt, output = self.chance.choice((200, 1000, 4000)), self.chance.randint(2, 400)
        return QueuedRequest(
            self.arrived, at, prompt, output, self.chance.random() < self.leave_ratio
        )

    def _step(self) -> bool:
        begun_at = self.now
        if self.waiting and len(self.running) < 64:
            self._prefill(self.waiting.pop(0))
        elif self.running:
            self.now += 0.015 + 0.0002 * len(self.running)
        else:
            return False
        self.busy.append(TimeRange(begun_at, self.now))
        self.counts["steps"] += 1
        for queued in self.running:
            queued.generated += 1
            self.counts["output"] += 1
        self._end_requests()
        return True

    def _prefill(self, queued: QueuedRequest) -> None:
        queued.begun_at = self.now
        self.now += 0.01 + queued.input_tokens * 30e-6
        queued.first_at = self.now
        self.counts["input"] += queued.input_tokens
        self.running.append(queued)

    def _end_requests(self) -> None:
        for queued in list(self.running):
            if queued.generated >= queued.output_tokens / (2 if queued.leaves else 1):
                self.running.remove(queued)
                # A request without its client has no span.
                self.rows += [] if queued.leaves else [queued.row(self.now)]


def ran(rate: float, leave_ratio: float = 0.0) -> BatchingEngine:
    engine = BatchingEngine(random.Random(7), rate, leave_ratio)
    engine.run(60.0 * (MINUTES + 3))
    return engine


def windows(engine: BatchingEngine) -> list[TimeRange]:
    times = [sample.at for sample in engine.samples]
    edges = [
        minute_start_near(60.0 * minute, times, max_gap_s=15) for minute in range(1, MINUTES + 2)
    ]
    return [TimeRange(*edge) for edge in pairwise(edges)]


def costs(engine: BatchingEngine) -> list[SplitMinute]:
    return [cost(engine.samples, engine.rows, window, LLAMA_ON_H100) for window in windows(engine)]


def total(engine: BatchingEngine, part: str) -> float:
    return fsum(getattr(found.cost, part) for found in costs(engine))


def billed(engine: BatchingEngine) -> float:
    return fsum(window.length_s for window in windows(engine))


@pytest.mark.parametrize("rate", [0.05, 0.5, 3.0])
def test_almost_no_cost_is_unseen_when_every_request_has_a_row(rate: float) -> None:
    engine = ran(rate)
    bill = billed(engine)
    assert total(engine, "unseen") / bill < 0.01
    assert total(engine, "unknown") == 0
    assert sum(map(whole, costs(engine))) == pytest.approx(bill)


def test_the_cost_of_requests_without_a_row_is_unseen() -> None:
    # Three of ten clients disconnected after half of their tokens: 1.5 of 8.5 parts.
    engine = ran(2.0, leave_ratio=0.3)
    share = total(engine, "unseen") / billed(engine)
    assert share == pytest.approx(1.5 / 8.5, abs=0.05)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3, 0.7])
def test_idle_time_is_the_time_without_steps(rate: float) -> None:
    engine = ran(rate)
    window = TimeRange(windows(engine)[0].from_at, windows(engine)[-1].until)
    idle_s = window.length_s - covered_s(TimeRanges.of(engine.busy), window)
    assert total(engine, "idle") == pytest.approx(idle_s, abs=0.01 * window.length_s)
