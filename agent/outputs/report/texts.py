"""Values and events of a report in words."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from math import floor
from typing import Any

UNKNOWN = "-"


def number_text(value: float | None, digits: int = 1) -> str:
    """A number with thousands apart."""
    if value is None:
        return UNKNOWN
    return f"{value:,.{0 if value == int(value) else digits}f}"


def share(value: float | None) -> str:
    """A share as a percentage."""
    if value is None:
        return UNKNOWN
    return f"{100 * value:.{2 if abs(value) <= 1 else 0}f} %"


def dollars(value: float | None) -> str:
    """Dollars, the more digits the fewer they are."""
    if value is None:
        return UNKNOWN
    return f"${value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"${value:.3g}"


def milliseconds(value: float | None) -> str:
    """Milliseconds without their unit."""
    return UNKNOWN if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def moment(text: str | None) -> str:
    """A time of the API in UTC to the second."""
    if text is None:
        return UNKNOWN
    return f"{datetime.fromisoformat(text).astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def printable(value: object) -> str:
    """A name that clients or engines wrote, without what would steer a terminal."""
    if value is None:
        return UNKNOWN
    return "".join(
        each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(value)
    )


def percent(value: float | None) -> str:
    """A share with one digit, never rounded up to all."""
    return UNKNOWN if value is None else f"{number_text(floor(1000 * value + 1e-9) / 10)} %"


def plural(count: float, noun: str = "request") -> str:
    """A count with its noun: `1 request`, `17 requests`."""
    return f"{number_text(count)} {noun}{'' if count == 1 else 's'}"


def words(name: object) -> str:
    """A name of the API in words."""
    return printable(name).replace("_", " ")


_LONGEST_EVIDENCE = 120


def evidence_text(evidence: Mapping[str, Any]) -> str:
    """What was seen of an event, without what is unknown; the end of a long text is cut off."""
    known = {name: value for name, value in evidence.items() if value is not None}
    text = "; ".join(_fact(name, value) for name, value in known.items())
    return text if len(text) <= _LONGEST_EVIDENCE else f"{text[:_LONGEST_EVIDENCE]}..."


def _fact(name: str, value: object) -> str:
    """A name in words, and a number as the end of its name says."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"{words(name)}: {printable(value)}"
    for ending, show in _UNITS.items():
        if name.endswith(ending):
            return f"{words(name.removesuffix(ending) or name)}: {show(value)}"
    return f"{words(name)}: {_trimmed(value)}"


def _trimmed(value: float) -> str:
    """Up to three digits behind the point."""
    return f"{value:,.3f}".rstrip("0").rstrip(".")


def _time_text(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"


def _bytes_text(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{number_text(count / size)} {unit}"
    return f"{number_text(count)} B"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "_at": _time_text,
    "_s": lambda seconds: f"{_trimmed(seconds)} s",
    "_bytes": _bytes_text,
    "_usage": share,
}
