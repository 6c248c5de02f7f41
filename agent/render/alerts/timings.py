"""Lengths of windows and of hold times, as intended or shortened for a trial."""

from dataclasses import dataclass

from agent.settings.values import duration_text

# rate() needs two samples, and a scrape may fail.
_SCRAPES_IN_A_WINDOW = 4
# Below this, rounding to a second could change which of two alerts fires first.
_FINE_BELOW_S = 10


@dataclass(frozen=True, slots=True)
class Timings:
    """Divides all times of the rules by `speed`."""

    speed: float = 1.0
    scrape_interval_s: float = 15.0
    evaluation_interval_s: float = 30.0

    def window(self, seconds: float) -> str:
        """A range in PromQL, never too short for the scrape interval."""
        shortest_s = _SCRAPES_IN_A_WINDOW * self.scrape_interval_s
        return _written(max(self.seconds(seconds), shortest_s))

    def hold(self, seconds: float) -> str:
        """A hold time in the format of Prometheus."""
        return _written(self.seconds(seconds))

    def seconds(self, seconds: float) -> float:
        """A length of time in seconds."""
        return seconds / self.speed

    @property
    def evaluation_interval(self) -> str:
        """The time between two evaluations of a rule."""
        return _written(self.evaluation_interval_s)


def _written(seconds: float) -> str:
    """Whole seconds from 10 s on; shorter times of a trial may have milliseconds."""
    if seconds >= _FINE_BELOW_S or seconds == round(seconds):
        return duration_text(float(max(round(seconds), 1)))
    return f"{max(round(seconds * 1000), 1)}ms"
