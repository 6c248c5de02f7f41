"""The declaration of a metric; expositions, rules and dashboards derive from it."""

from dataclasses import dataclass
from enum import Enum, StrEnum


class Kind(StrEnum):
    """The Prometheus type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Merge(Enum):
    """How values of one metric from several ranks or agents become one."""

    SUM = "sum"
    MAX = "max"


class Unit(StrEnum):
    """Base units; NONE for a metric whose name has no unit."""

    SECONDS = "seconds"
    BYTES = "bytes"
    RATIO = "ratio"
    JOULES = "joules"
    WATTS = "watts"
    CELSIUS = "celsius"
    HERTZ = "hertz"
    NONE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One published metric. `name` has no `_total`: the exposition adds it to counters."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: Unit = Unit.NONE
    merge: Merge = Merge.SUM


def counter(
    name: str, text: str, *labels: str, unit: Unit = Unit.NONE, merge: Merge = Merge.SUM
) -> Metric:
    """A counter with its help text and its own labels."""
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=labels, unit=unit, merge=merge)


def gauge(
    name: str, text: str, *labels: str, unit: Unit = Unit.NONE, merge: Merge = Merge.SUM
) -> Metric:
    """A gauge with its help text and its own labels."""
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=labels, unit=unit, merge=merge)


def histogram(name: str, text: str, *labels: str) -> Metric:
    """A histogram of seconds with its help text and its own labels."""
    return Metric(name=name, kind=Kind.HISTOGRAM, help=text, labels=labels, unit=Unit.SECONDS)
