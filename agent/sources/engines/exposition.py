"""A metrics page as text, read into numbers: only the series that somebody asked for."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from agent.catalog.reasons import FetchFailed, PageFault
from agent.errors import PageUnreadable

# One line of the text format: a name, labels, a value, then maybe a timestamp or an exemplar.
# https://prometheus.io/docs/instrumenting/exposition_formats/#text-format-details
_SERIES_LINE = re.compile(
    r'(?P<series>[a-zA-Z_:][\w:]*(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)'
    r"[ \t]*(?<=[} \t])(?P<value>[^\s_]+)(?:[ \t]+-?\d+)?[ \t]*(?:[ \t]#.*)?",
    re.ASCII,
)
_END_OF_NAME = re.compile(r"[{ \t]")


@dataclass(frozen=True, slots=True)
class SeriesValue:
    """One number of a page, with its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """The asked-for series by name, and how many lines were dropped, by reason."""

    series: Mapping[str, tuple[SeriesValue, ...]]
    dropped: Mapping[str, int]


def read_exposition(body: bytes, wanted: Collection[str]) -> Exposition:
    """The series named in `wanted`; raises PageUnreadable for what is no whole metrics page.

    A line that cannot be read, a number that is not finite and a series told twice (the later
    stands) are dropped and counted. Of a page that tells none of `wanted`, the series are empty.
    """
    text = _page_text(body)
    dropped: Counter[str] = Counter()
    numbers = _numbers(_wanted_lines(text, wanted), dropped)
    series: dict[str, list[SeriesValue]] = {}
    for head, value in numbers.items():
        name, labels = _parsed(head)
        series.setdefault(name, []).append(SeriesValue(labels, value))
    return Exposition({name: tuple(samples) for name, samples in series.items()}, dict(dropped))


def _page_text(body: bytes) -> str:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PageUnreadable(PageFault.NOT_TEXT, f"the page is not UTF-8 text: {error}") from error
    start = text.lstrip()[:1]
    if not start:
        raise PageUnreadable(PageFault.EMPTY, "the page is empty")
    if start == "<":
        raise PageUnreadable(
            PageFault.HTML, f"the page is HTML, not metrics: {text.lstrip()[:60]!r}"
        )
    if start in "{[":
        raise PageUnreadable(
            PageFault.JSON, f"the page is JSON, not metrics: {text.lstrip()[:60]!r}"
        )
    if not text.endswith(("\n", "# EOF")):
        raise PageUnreadable(FetchFailed.CUT_OFF, f"the page ends inside a line: {text[-60:]!r}")
    return text


def _wanted_lines(text: str, wanted: Collection[str]) -> Iterator[str]:
    # Not splitlines(): that also cuts at characters that a label value may hold.
    for line in text.split("\n"):
        end = _END_OF_NAME.search(line)
        if end and line[: end.start()] in wanted:
            yield line


def _numbers(lines: Iterator[str], dropped: Counter[str]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for line in lines:
        parts = _SERIES_LINE.fullmatch(line.rstrip())
        try:
            head, value = _readable(parts)
        except ValueError:
            dropped[PageFault.LINE_MALFORMED] += 1
            continue
        if not math.isfinite(value):
            dropped[PageFault.VALUE_NOT_FINITE] += 1
            continue
        if head in numbers:
            dropped[PageFault.SERIES_REPEATED] += 1
        numbers[head] = value
    return numbers


def _readable(parts: re.Match[str] | None) -> tuple[str, float]:
    if parts is None:
        raise ValueError
    head = parts["series"]
    _parsed(head)
    return head, float(parts["value"])


# An engine tells the same series on every page; reading their labels is most of a page's cost.
@lru_cache(maxsize=16384)
def _parsed(head: str) -> tuple[str, Mapping[str, str]]:
    (family,) = text_string_to_metric_families(f"{head} 0\n")
    (sample,) = family.samples
    return sample.name, MappingProxyType(sample.labels)
