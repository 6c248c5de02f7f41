"""Runs of a simulated engine, from first principles: clients queue for servers that take time."""

import heapq
from dataclasses import dataclass

import numpy as np

from agent.analysis.comparison.run_columns import RunColumns
from agent.records.columns import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """Requests arrive at random, and each of some servers works at one of them.

    `mean_s` is the mean time of service, of which the first tenth is prefill. Requests of
    `long_share` have four times as many tokens as the others.
    """

    seed: int
    rate: float = 3.0
    length_s: float = 150.0
    servers: int = 8
    mean_s: float = 1.0
    input_tokens: int = 40
    long_share: float = 0.0

    def run(self) -> RunColumns:
        """What a client sees of it."""
        random = np.random.default_rng(self.seed)
        at = np.cumsum(random.exponential(1 / self.rate, int(self.rate * self.length_s)))
        is_long = random.random(len(at)) < self.long_share
        output = random.integers(16, 49, len(at)).astype(float)
        prompt = np.where(is_long, 4.0, 1.0) * random.integers(
            self.input_tokens // 2, self.input_tokens * 3 // 2, len(at)
        )
        took = self.mean_s * output / 32 * np.exp(random.normal(0, 0.1, len(at)))
        began = self._began(at, took)
        ttft_s, e2e_s = began - at + took / 10, began - at + took
        return RunColumns(
            name=f"seed {self.seed}",
            length_s=float((at + e2e_s).max()),
            ended_s=at + e2e_s,
            ttft_s=ttft_s,
            tpot_s=(e2e_s - ttft_s) / (output - 1),
            e2e_s=e2e_s,
            input_tokens=prompt.astype(float),
            output_tokens=output,
            met=(ttft_s < 0.3).astype(float),
            failed=np.zeros(len(at)),
        )

    def _began(self, at: Array, took: Array) -> Array:
        free = [0.0] * self.servers
        began = np.empty(len(at))
        for number, arrived in enumerate(at):
            began[number] = max(heapq.heappop(free), arrived)
            heapq.heappush(free, began[number] + took[number])
        return began


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstyRun:
    """Independent requests at random times, and bursts in which all are `factor` times as slow.

    Bursts and what lies between them are exponentially long. `gap_s` of None has no bursts.
    """

    seed: int
    length_s: float
    gap_s: float | None = None
    burst_s: float = 6.0
    factor: float = 4.0
    rate: float = 3.0

    def run(self) -> RunColumns:
        """What a client sees of it."""
        random = np.random.default_rng(self.seed)
        number = random.poisson(self.rate * self.length_s)
        ended_s = np.sort(random.uniform(0, self.length_s, number))
        slow = np.where(self._in_bursts(ended_s, random), self.factor, 1.0)
        ttft_s = 0.2 * np.exp(random.normal(0, 0.3, number)) * slow
        tpot_s = 0.03 * np.exp(random.normal(0, 0.1, number)) * slow
        tokens = np.full(number, 32.0)
        return RunColumns(
            name=f"seed {self.seed}",
            length_s=self.length_s,
            ended_s=ended_s,
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=ttft_s + tpot_s * 31,
            input_tokens=tokens,
            output_tokens=tokens,
            met=np.ones(number),
            failed=np.zeros(number),
        )

    def _in_bursts(self, at_s: Array, random: np.random.Generator) -> Array:
        if self.gap_s is None:
            return np.zeros(len(at_s))
        # Twice as many as are expected, and some more.
        number = int(4 * self.length_s / (self.gap_s + self.burst_s)) + 50
        scales = np.tile([self.gap_s, self.burst_s], number)
        begins_in_burst = random.random() < self.burst_s / (self.gap_s + self.burst_s)
        ends_s = np.cumsum(random.exponential(scales[int(begins_in_burst) :]))
        found: Array = ((np.searchsorted(ends_s, at_s) + begins_in_burst) % 2).astype(np.float64)
        return found
