"""Figures of a report as text; an unknown one is a dash."""

from datetime import UTC, datetime

UNKNOWN = "-"


def number(value: float | None, digits: int = 1) -> str:
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
