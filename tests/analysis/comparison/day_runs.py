"""Days of simulated traffic, from first principles: a day's pattern of arrivals at a queue.

Arrivals are a Poisson process. Its rate follows the hour, a random effect of the day, and a random
walk back to its mean (AR) within the day. Servers take requests in order, so that TTFT follows the
load. All days are simulated side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from agent.analysis.comparison.run_columns import RunColumns
from agent.catalog.time_units import DAY_S, HOUR_S
from agent.records.columns import Array

# 2026-10-19, a Monday.
_FIRST_DAY = 1_792_368_000.0
_STEP_S = 300.0
_STEPS = int(DAY_S / _STEP_S)
_AR_HOURS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DayTraffic:
    """Traffic of some days; standard deviations are of logarithms.

    At its peak the rate is `swing` times that of the night. `busy` is the mean share of servers
    that prefill; `weekend` is the rate of Saturdays and Sundays as a part of that of other days.
    """

    seed: int
    days: int
    requests_per_day: int = 8000
    servers: int = 3
    busy: float = 0.45
    swing: float = 4.0
    rate_of_day: float = 0.02
    speed_of_day: float = 0.01
    rate_within_day: float = 0.08
    weekend: float = 1.0

    def runs(self) -> list[RunColumns]:
        """One run for each day, from midnight to midnight."""
        random = np.random.default_rng(self.seed)
        arrived_s = self._arrivals(random)
        shape = arrived_s.shape
        speed = np.exp(random.normal(0.0, self.speed_of_day, (self.days, 1)))
        input_tokens = np.exp(random.normal(6.5, 0.8, shape))
        output_tokens = np.exp(random.normal(5.0, 0.6, shape))
        # Of lognormal lengths, the mean is above the median.
        mean_s = self.busy * self.servers * DAY_S / self.requests_per_day
        prefill_s = speed * mean_s * input_tokens / np.exp(6.5 + 0.8**2 / 2)
        began_s = started(arrived_s, prefill_s, self.servers)
        ttft_s = began_s + prefill_s - arrived_s
        tpot_s = speed * 0.03 * np.exp(random.normal(0.0, 0.2, shape))
        columns = {
            "ttft_s": ttft_s,
            "tpot_s": tpot_s,
            "e2e_s": ttft_s + tpot_s * output_tokens,
            "ended_s": began_s + prefill_s + tpot_s * output_tokens,
            "input_tokens": np.round(input_tokens),
            "output_tokens": np.round(output_tokens),
        }
        return [
            self._run(day, {name: values[day] for name, values in columns.items()})
            for day in range(self.days)
        ]

    def _run(self, day: int, columns: dict[str, Any]) -> RunColumns:
        inside = columns["ended_s"] < DAY_S
        kept: dict[str, Any] = {name: values[inside] for name, values in columns.items()}
        return RunColumns(
            name=f"day {day}",
            length_s=DAY_S,
            **kept,
            met=(kept["ttft_s"] < 60.0).astype(float),
            failed=np.zeros(len(kept["ended_s"])),
            events={},
            began_at=_FIRST_DAY + day * DAY_S,
        )

    def _arrivals(self, random: np.random.Generator) -> Array:
        """Times of arrival, a row each day; those after its end are infinite."""
        hour = np.arange(_STEPS) * _STEP_S / HOUR_S
        pattern = self.swing ** ((1 - np.cos(2 * np.pi * (hour - 3.0) / 24)) / 2)
        kept = np.exp(-_STEP_S / HOUR_S / _AR_HOURS)
        shocks = random.normal(0.0, 1.0, (self.days, _STEPS))
        walk = np.empty_like(shocks)
        walk[:, 0] = shocks[:, 0]
        for step in range(1, _STEPS):
            walk[:, step] = kept * walk[:, step - 1] + np.sqrt(1 - kept**2) * shocks[:, step]
        of_day = random.normal(0.0, self.rate_of_day, (self.days, 1))
        level = np.where(np.arange(self.days)[:, np.newaxis] % 7 >= 5, self.weekend, 1.0)
        rate = pattern / pattern.mean() * level * np.exp(of_day + self.rate_within_day * walk)
        expected = np.cumsum(rate * self.requests_per_day / _STEPS, axis=1)
        most = int(expected[:, -1].max() + 6 * np.sqrt(expected[:, -1].max()))
        units = np.cumsum(random.exponential(1.0, (self.days, most)), axis=1)
        # Those after the end of the day come long after it.
        ends_s = np.append(np.arange(_STEPS + 1) * _STEP_S, 1e12)
        return np.array(
            [
                np.interp(of_one, np.concatenate([[0.0], known, [known[-1] + 1e6]]), ends_s)
                for of_one, known in zip(units, expected, strict=True)
            ]
        )


def started(arrived_s: Array, took_s: Array, servers: int) -> Array:
    """When each request begins, first come first served; a row each day."""
    free_s = np.zeros((len(arrived_s), servers))
    began_s = np.empty_like(arrived_s)
    rows = np.arange(len(arrived_s))
    for number in range(arrived_s.shape[1]):
        first = free_s.argmin(axis=1)
        began_s[:, number] = np.maximum(arrived_s[:, number], free_s[rows, first])
        free_s[rows, first] = began_s[:, number] + took_s[:, number]
    return began_s


def slower(run: RunColumns, factor: float) -> RunColumns:
    """The run with a longer TTFT, all else as before."""
    more_s = (factor - 1) * run.ttft_s
    return replace(run, ttft_s=run.ttft_s + more_s, e2e_s=run.e2e_s + more_s)


def joined(days: Sequence[RunColumns]) -> RunColumns:
    """One run of several days in a row."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in days])
        for name in (
            *("ttft_s", "tpot_s", "e2e_s", "input_tokens", "output_tokens", "met", "failed"),
        )
    }
    ended_s = [each.ended_s + number * DAY_S for number, each in enumerate(days)]
    return replace(days[0], length_s=len(days) * DAY_S, ended_s=np.concatenate(ended_s), **columns)
