"""How a metric is declared: once, as data. Pages, rules and dashboards derive from it."""

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
    """Base units only; NONE for what has no unit that a name could carry."""

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
    """One published metric. `name` has no `_total`: the page adds it to counters."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: Unit = Unit.NONE
    merge: Merge = Merge.SUM
