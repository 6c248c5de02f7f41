"""PromQL from the catalogue; a name or label that the agent does not publish is an error."""

import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import utils

from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Kind, Metric
from agent.catalog.routers import ROUTER_FACTS

# Prometheus adds these to every series that it scrapes.
TARGET_LABELS = ("job", "instance")
# Many configurations of Prometheus add these as well.
PLACE_LABELS = ("cluster", "namespace")

_OWN_LABELS = {
    **dict.fromkeys((fact.name for fact in ENGINE_FACTS), ("engine", "model")),
    **dict.fromkeys((fact.name for fact in GPU_FACTS), ("gpu",)),
    **dict.fromkeys((fact.name for fact in ROUTER_FACTS), ("router",)),
}


class Matcher(NamedTuple):
    """A condition on a label, with its text in PromQL."""

    label: str
    text: str


def eq(label: str, value: str) -> Matcher:
    """The label has this value."""
    return Matcher(label, f"{label}={quoted(value)}")


def among(label: str, values: Iterable[object]) -> Matcher:
    """The label has one of these values, which hold no special character of a pattern."""
    return Matcher(label, f"{label}=~{quoted('|'.join(str(value) for value in values))}")


def none_of(label: str, values: Iterable[object]) -> Matcher:
    """The label has none of these values, which hold no special character of a pattern."""
    return Matcher(label, f"{label}!~{quoted('|'.join(str(value) for value in values))}")


def like(label: str, glob: str) -> tuple[Matcher, ...]:
    """The label matches a shell glob; no condition for the glob `*`."""
    if glob == "*":
        return ()
    return (Matcher(label, f"{label}=~{quoted(_pattern(glob))}"),)


def filled(label: str) -> Matcher:
    """The label has the value that `printf` of a Go template inserts."""
    return Matcher(label, f"{label}=%q")


def upto(bound: float) -> Matcher:
    """The bucket of a bound; whole numbers also without `.0`, as Go clients write them."""
    text = str(utils.floatToGoString(bound))  # type: ignore[no-untyped-call]
    whole = text.removesuffix(".0")
    if whole == text:
        return eq("le", text)
    return Matcher("le", f"le=~{quoted(whole + '([.]0)?')}")


def quoted(value: str) -> str:
    """A string as PromQL writes it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_SPECIAL = frozenset(".+*?()|[]{}^$\\")


def _pattern(glob: str) -> str:
    """A glob as a regular expression of RE2; Prometheus anchors it at both ends."""
    pieces = []
    rest = glob
    while rest:
        end = rest.find("]", 2)
        if rest[0] == "[" and end > 0:
            inside = rest[1:end].replace("\\", "\\\\").replace("[", "\\[")
            negated = inside.startswith("!")
            pieces.append(f"[^{inside[1:]}]" if negated else f"[{inside}]")
            rest = rest[end + 1 :]
            continue
        pieces.append({"*": ".*", "?": "."}.get(rest[0], escaped(rest[0])))
        rest = rest[1:]
    return "".join(pieces)


def escaped(text: str) -> str:
    """A text as a regular expression of RE2 that matches nothing else."""
    return "".join(f"\\{each}" if each in _SPECIAL else each for each in text)


_STRING = r'"(?:[^"\\]|\\.)*"'
# Of an expression: what holds no selector, or the name of a series with its matchers.
_SELECTOR = re.compile(
    rf"{_STRING}|\$\{{\w+\}}|\[[^\]]*\]|\boffset \w+|\b\d[\w.]*|\b(?:and|or|unless|bool)\b"
    r"|\b(?:by|on|ignoring|without|group_left|group_right)\s*\([^)]*\)"
    r"|([a-zA-Z_:][\w:]*)(?!\s*\(|\s+(?:by|without)\b|[\w:])"
    rf'(\{{(?:[^{{}}"]|{_STRING})*\}})?'
)


def narrowed(expression: str, matchers: str) -> str:
    """The expression with these matchers in each selector; each ends with a comma."""

    def selector(found: re.Match[str]) -> str:
        name, inside = found[1], found[2]
        if name is None:
            return found[0]
        rest = f"{matchers}{inside[1:]}" if inside else f"{matchers.rstrip(',')}}}"
        return f"{name}{{{rest}"

    return _SELECTOR.sub(selector, expression)


def published_labels(metric: Metric) -> frozenset[str]:
    """Every label of the metric's series in Prometheus.

    Prometheus renames a label of the metric that its target has, too.
    """
    own = (*_OWN_LABELS.get(metric.name, ()), *metric.labels)
    renamed = (f"exported_{label}" for label in own if label in PLACE_LABELS)
    return frozenset((*own, *renamed, *TARGET_LABELS, *PLACE_LABELS))


def value_of(metric: Metric, *matchers: Matcher) -> str:
    """The series of a counter or a gauge."""
    ending = {Kind.COUNTER: "_total", Kind.GAUGE: ""}[metric.kind]
    return _series(metric, ending, matchers)


def buckets_of(metric: Metric, *matchers: Matcher) -> str:
    """The buckets of a histogram."""
    return _series(metric, "_bucket", matchers, "le")


def count_of(metric: Metric, *matchers: Matcher) -> str:
    """The number of observations of a histogram."""
    return _series(metric, "_count", matchers)


def sum_of(metric: Metric, *matchers: Matcher) -> str:
    """The sum of the observations of a histogram."""
    return _series(metric, "_sum", matchers)


def histogram_of(metric: Metric, *own: Matcher) -> Callable[[str, tuple[Matcher, ...]], str]:
    """A function of an ending and further matchers that returns a series of a histogram."""

    def series(ending: str, matchers: tuple[Matcher, ...]) -> str:
        more = ("le",) if ending == "_bucket" else ()
        return _series(metric, ending, (*own, *matchers), *more)

    return series


def _series(metric: Metric, ending: str, matchers: Iterable[Matcher], *more: str) -> str:
    known = {*published_labels(metric), *more}
    for matcher in matchers:
        if matcher.label not in known:
            raise ValueError(f"{metric.name} has no label {matcher.label!r}; it has {known}")
    inside = ",".join(matcher.text for matcher in matchers)
    return f"{metric.name}{ending}{{{inside}}}" if inside else f"{metric.name}{ending}"


def by(labels: Iterable[str], expression: str, how: str = "sum") -> str:
    """The expression aggregated over all labels but these."""
    return f"{how} by ({', '.join(labels)}) ({expression})"
