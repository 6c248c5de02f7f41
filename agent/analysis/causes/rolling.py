"""Sums over any period and a quantile of the last hour, in bounded memory."""

from array import array
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from agent.analysis.quantiles import bin_of, quantile

_FIRST_ROWS = 64


class RunningSums:
    """Sums of several columns up to each of many times (Unix seconds), in their order.

    A row covers the time from `since` to its own time; in between, sums grow evenly. Column 0 is
    the covered time. Rows shorter than `width_s` are merged. Beyond `max_rows` rows, the oldest are
    dropped.
    """

    def __init__(self, columns: int, *, max_rows: int, width_s: float = 0.0) -> None:
        self._at = array("d")
        self._sums = np.zeros((_FIRST_ROWS, columns + 1))
        self._max_rows = max_rows
        self._width_s = width_s
        # The first and the newest time; plain attributes, as each request reads them many times.
        self.first_at = float("inf")
        self.last_at = float("-inf")
        # Arrays of `between`, made once: each request needs the sums of several periods.
        self._four_rows = np.zeros(4, np.intp)
        self._four_parts = np.zeros(4)
        self._four_sums = np.zeros((4, columns + 1))
        self._found = np.zeros(columns + 1)

    def __len__(self) -> int:
        return len(self._at)

    def after(self, at: float) -> float | None:
        """The first time of a row at or after `at`; None without such a row."""
        index = bisect_left(self._at, at)
        return self._at[index] if index < len(self._at) else None

    def before(self, at: float) -> float | None:
        """The last time of a row before `at`; None without such a row."""
        index = bisect_left(self._at, at)
        return self._at[index - 1] if index else None

    def add(self, since: float, at: float, values: Sequence[float]) -> None:
        """Add the values of the time from `since` to `at`.

        An `at` before the newest row counts as the time of the newest row.
        """
        times = self._at
        if not times or since > times[-1] + self._width_s:
            self._append(since)
        increase = (max(0.0, at - max(since, times[-1])), *values)
        if len(times) > 1 and at - times[-2] < self._width_s:
            times[-1] = max(at, times[-1])
        else:
            self._append(max(at, times[-1]))
        self._sums[len(times) - 1] += increase
        self.first_at, self.last_at = times[0], times[-1]

    def correct(self, at: float, by: Sequence[float]) -> None:
        """Add to the values of the row of an earlier time."""
        self._sums[bisect_left(self._at, at) : len(self._at), 1:] += by

    def between(self, start: float, end: float) -> list[float]:
        """The sums of a period: the covered time, then the columns; zeros without any row."""
        times = self._at
        if end <= start or end <= self.first_at or start > self.last_at or len(times) < 2:
            return [0.0] * self._sums.shape[1]
        # The rows that hold the two ends, and the parts of these rows that have passed.
        low, high = bisect_left(times, start), bisect_left(times, end)
        low_part, high_part = 0.0, 1.0
        if low:
            before = times[low - 1]
            low_part = (start - before) / (times[low] - before)
        else:
            low = 1
        if high < len(times):
            before = times[high - 1]
            high_part = (end - before) / (times[high] - before)
        else:
            high -= 1
        rows, parts = self._four_rows, self._four_parts
        rows[0], rows[1], rows[2], rows[3] = low - 1, low, high - 1, high
        parts[0], parts[1], parts[2], parts[3] = low_part - 1, -low_part, 1 - high_part, high_part
        self._sums.take(rows, 0, self._four_sums, "clip")
        found: list[float] = parts.dot(self._four_sums, self._found).tolist()
        return found

    def _append(self, at: float) -> None:
        times = self._at
        if len(times) >= 2 * self._max_rows:
            self._sums[: self._max_rows] = self._sums[self._max_rows : len(times)]
            del times[: -self._max_rows]
        if len(times) == len(self._sums):
            self._sums = np.concatenate((self._sums, np.zeros_like(self._sums)))
        if times:
            self._sums[len(times)] = self._sums[len(times) - 1]
        times.append(at)


SLOT_S = 120.0
SLOTS = 30


class RollingQuantile:
    """One quantile of the values of the last SLOTS * SLOT_S seconds.

    The values are kept as counts in the bins of `analysis.quantiles`, so the quantile has their
    relative error. It is computed anew when the number of values has changed by a twentieth.
    """

    def __init__(self, q: float) -> None:
        self._q = q
        self._bins: Counter[int] = Counter()
        self._slots: deque[tuple[int, Counter[int]]] = deque()
        self._count = 0
        self._computed_at = 0
        self._value: float | None = None

    @property
    def count(self) -> int:
        """How many values there are."""
        return self._count

    def add(self, at: float, value: float) -> None:
        """Add a value of a Unix time."""
        slot = int(at // SLOT_S)
        if not self._slots or slot > self._slots[-1][0]:
            self._slots.append((slot, Counter()))
            while self._slots[0][0] <= slot - SLOTS:
                self._drop(self._slots.popleft()[1])
        index = bin_of(value)
        self._slots[-1][1][index] += 1
        self._bins[index] += 1
        self._count += 1

    def value(self, at_least: int = 1) -> float | None:
        """The quantile; None of fewer than `at_least` values."""
        if self._count < at_least:
            return None
        if self._value is None or abs(self._count - self._computed_at) > self._computed_at / 20:
            self._value = quantile(self._bins, self._q)
            self._computed_at = self._count
        return self._value

    def _drop(self, old: Counter[int]) -> None:
        self._bins.subtract(old)
        self._bins = +self._bins
        self._count -= old.total()
