"""A small engine that batches, stalls decode for each prefill, and is read like a real one."""

import random
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum

import pytest

from agent.analysis.cost.minute_cost import MinuteCost
from agent.analysis.efficiency.engine_observation import minute_start_near
from agent.analysis.efficiency.time_range import TimeRange, covered_s
from agent.records.engine import EngineSample
from agent.records.request import RequestRecord
from tests.analysis.cost.engine_days import LLAMA_ON_H100, cost, reading, request, whole

MINUTES = 5


@dataclass
class Asked:
    """A request on its way through the engine; `leaves` is the token at which its client goes."""

    number: int
    arrived_at: float
    input_tokens: int
    output_tokens: int
    leaves: bool
    begun_at: float = 0.0
    first_at: float = 0.0
    made: int = 0

    def row(self, ended_at: float) -> RequestRecord:
        """What its span tells."""
        return request(
            self.number,
            self.arrived_at,
            queue_s=self.begun_at - self.arrived_at,
            prefill_s=self.first_at - self.begun_at,
            decode_s=ended_at - self.first_at,
            input_tokens=self.input_tokens,
            output_tokens=self.made,
        )._replace(ended_at=ended_at)


@dataclass
class BatchingEngine:
    """Runs until `until`, each step either one prefill or a token for every running request."""

    chance: random.Random
    rate: float
    left: float
    now: float = 0.0
    asked: int = 0
    counts: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("steps", "input", "cached", "output"), 0.0)
    )
    waiting: list[Asked] = field(default_factory=list)
    running: list[Asked] = field(default_factory=list)
    rows: list[RequestRecord] = field(default_factory=list)
    samples: list[EngineSample] = field(default_factory=list)
    busy: list[TimeRange] = field(default_factory=list)

    def run(self, until: float) -> None:
        """Serve and be read every five seconds, not quite evenly."""
        arrives, reads = self.chance.expovariate(self.rate), 0.3
        while self.now < until:
            while min(arrives, reads) <= self.now:
                if reads <= arrives:
                    running = float(len(self.running))
                    self.samples.append(reading(reads, running=running, **self.counts))
                    reads += self.chance.uniform(4.95, 5.05)
                else:
                    self.waiting.append(self._ask(arrives))
                    arrives += self.chance.expovariate(self.rate)
            if not self._step():
                self.now = min(arrives, reads)

    def _ask(self, at: float) -> Asked:
        self.asked += 1
        prompt, output = self.chance.choice((200, 1000, 4000)), self.chance.randint(2, 400)
        return Asked(self.asked, at, prompt, output, self.chance.random() < self.left)

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
        for one in self.running:
            one.made += 1
            self.counts["output"] += 1
        self._let_go()
        return True

    def _prefill(self, one: Asked) -> None:
        one.begun_at = self.now
        self.now += 0.01 + one.input_tokens * 30e-6
        one.first_at = self.now
        self.counts["input"] += one.input_tokens
        self.running.append(one)

    def _let_go(self) -> None:
        for one in list(self.running):
            if one.made >= one.output_tokens / (2 if one.leaves else 1):
                self.running.remove(one)
                # A client that goes leaves no span.
                self.rows += [] if one.leaves else [one.row(self.now)]


def ran(rate: float, left: float = 0.0) -> BatchingEngine:
    engine = BatchingEngine(random.Random(7), rate, left)
    engine.run(60.0 * (MINUTES + 3))
    return engine


def windows(engine: BatchingEngine) -> list[TimeRange]:
    moments = [sample.at for sample in engine.samples]
    edges = [
        minute_start_near(60.0 * mark, moments, max_gap_s=15) for mark in range(1, MINUTES + 2)
    ]
    return [TimeRange(*edge) for edge in pairwise(edges)]


def costs(engine: BatchingEngine) -> list[MinuteCost]:
    return [cost(engine.samples, engine.rows, window, LLAMA_ON_H100) for window in windows(engine)]


def total(engine: BatchingEngine, part: str) -> float:
    return fsum(getattr(found, part) for found in costs(engine))


@pytest.mark.parametrize("rate", [0.05, 0.5, 3.0])
def test_where_every_request_has_a_row_next_to_nothing_is_unseen(rate: float) -> None:
    engine = ran(rate)
    bill = total(engine, "bill")
    assert total(engine, "unseen") / bill < 0.01
    assert total(engine, "unknown") == 0
    assert sum(map(whole, costs(engine))) == pytest.approx(bill)


def test_what_clients_that_left_took_is_unseen() -> None:
    # Of every ten requests three left, with half of their tokens: 1.5 of 8.5 parts.
    engine = ran(2.0, left=0.3)
    share = total(engine, "unseen") / total(engine, "bill")
    assert share == pytest.approx(1.5 / 8.5, abs=0.05)


@pytest.mark.parametrize("rate", [0.02, 0.1, 0.3, 0.7])
def test_idle_time_is_what_the_engine_idled(rate: float) -> None:
    engine = ran(rate)
    window = TimeRange(windows(engine)[0].from_at, windows(engine)[-1].until)
    idle_s = window.length_s - covered_s(engine.busy, window)
    assert total(engine, "idle") == pytest.approx(idle_s, abs=0.01 * window.length_s)
