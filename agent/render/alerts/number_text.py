"""Numbers as texts for alerts."""

from decimal import Decimal

from agent.settings.values import duration_text


def number(value: float | Decimal) -> str:
    """A number without the rounding errors of binary fractions."""
    return f"{Decimal(str(value)).normalize():f}"


def percent(ratio: float | Decimal) -> str:
    """A share as a percentage: 0.999 is `99.9 %`."""
    return f"{number(Decimal(str(ratio)) * 100)} %"


def percentile(ratio: float) -> str:
    """The name of a percentile: 0.95 is `p95`."""
    return f"p{number(Decimal(str(ratio)) * 100)}"


def latency(seconds: float) -> str:
    """A latency: `200 ms`, `1.5 s`."""
    if seconds < 1:
        return f"{number(Decimal(str(seconds)) * 1000)} ms"
    return f"{number(seconds)} s"


def span(seconds: float) -> str:
    """A length of time: `30d`, `50h`."""
    return duration_text(float(round(seconds)))
