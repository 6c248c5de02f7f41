"""How long windows are and how long a condition must hold, for real or sped up for a trial."""

from dataclasses import dataclass

from agent.settings.values import duration_text

# rate() needs two samples, and one scrape may fail.
_SCRAPES_IN_A_WINDOW = 4
# Below this a rounded second would change which of two alerts comes first.
_FINE_BELOW_S = 10


@dataclass(frozen=True, slots=True)
class Timings:
    """Everything `speed` times faster than it is meant, the rules being the same."""

    speed: float = 1.0
    scrape_interval_s: float = 15.0
    evaluation_interval_s: float = 30.0

    def window(self, seconds: float) -> str:
        """A range as PromQL writes it, never too short for the scrape interval."""
        shortest_s = _SCRAPES_IN_A_WINDOW * self.scrape_interval_s
        return _written(max(self.seconds(seconds), shortest_s))

    def hold(self, seconds: float) -> str:
        """For how long a condition must hold, as Prometheus writes it."""
        return _written(self.seconds(seconds))

    def seconds(self, seconds: float) -> float:
        """A length of time in seconds."""
        return seconds / self.speed

    @property
    def evaluation_interval(self) -> str:
        """How often rules are looked at."""
        return _written(self.evaluation_interval_s)


def _written(seconds: float) -> str:
    """Whole seconds where they are meant for real; what is sped up may be less than one."""
    if seconds >= _FINE_BELOW_S or seconds == round(seconds):
        return duration_text(float(max(round(seconds), 1)))
    return f"{max(round(seconds * 1000), 1)}ms"
