"""A quantile of the values of the last hour, in bounded memory."""

from collections import Counter, deque

from agent.analysis.quantiles import bin_of, quantile

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
