"""The declaration of a metric; expositions, rules and dashboards derive from it."""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import TypedDict, Unpack


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
    """One published metric. `name` has no `_total`: the exposition adds it to counters.

    `absent` says when it has no series, as in "without a proxy". Empty is never, or as usual for
    facts of engines and GPUs: while these cannot be read or do not report it.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: Unit = Unit.NONE
    merge: Merge = Merge.SUM
    absent: str = ""


class MetricOptions(TypedDict, total=False):
    """What else is declared of a counter or a gauge."""

    unit: Unit
    merge: Merge
    absent: str


def counter(name: str, text: str, *labels: str, **options: Unpack[MetricOptions]) -> Metric:
    """A counter with its help text and its own labels."""
    return Metric(name=name, kind=Kind.COUNTER, help=text, labels=labels, **options)


def gauge(name: str, text: str, *labels: str, **options: Unpack[MetricOptions]) -> Metric:
    """A gauge with its help text and its own labels."""
    return Metric(name=name, kind=Kind.GAUGE, help=text, labels=labels, **options)


def histogram(name: str, text: str, *labels: str, absent: str = "") -> Metric:
    """A histogram of seconds with its help text and its own labels."""
    return Metric(
        name=name,
        kind=Kind.HISTOGRAM,
        help=text,
        labels=labels,
        unit=Unit.SECONDS,
        absent=absent,
    )
