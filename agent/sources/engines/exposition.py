"""Parses an exposition, the text format of Prometheus: only the wanted series."""

import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from types import MappingProxyType

from prometheus_client.parser import text_string_to_metric_families

from agent.catalog.reasons import ExpositionFault, FetchFailed
from agent.errors import ExpositionUnreadable

# One line of the text format: a name, labels, a value, then maybe a timestamp (of OpenMetrics in
# seconds) or an exemplar.
# https://prometheus.io/docs/instrumenting/exposition_formats/#text-format-details
_SERIES_LINE = re.compile(
    r'(?P<series>[a-zA-Z_:][\w:]*(?:[ \t]*\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?)'
    r"[ \t]*(?<=[} \t])(?P<value>[^\s_]+)(?:[ \t]+-?\d+(?:\.\d+)?)?[ \t]*(?:[ \t]#.*)?",
    re.ASCII,
)
# As long as the columns of the database.
MAX_LABEL_CHARACTERS = 256
_DIGEST_CHARACTERS = 12
# Longer series are not kept: an engine could fill the memory with them.
_USUAL_CHARACTERS = 4096
_COMMENT, _TYPE = "#", "# TYPE "
_END_OF_NAME = re.compile(r"[{ \t]")


@dataclass(frozen=True, slots=True)
class SeriesValue:
    """One value of an exposition, with its labels."""

    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Exposition:
    """The wanted series by name, and how many lines were dropped, by reason.

    `numbers` are the same values by the text of their series. `families` are the names that have a
    type, with or without series: a labelled metric has none until it is used.
    """

    series: Mapping[str, tuple[SeriesValue, ...]]
    dropped: Mapping[str, int]
    numbers: Mapping[str, float] = field(default_factory=dict)
    families: frozenset[str] = frozenset()


def read_exposition(body: bytes, wanted: Collection[str]) -> Exposition:
    """The series named in `wanted`. Raises ExpositionUnreadable if the exposition is not whole.

    Malformed lines, values that are not finite and repeated series (the last one stays) are
    dropped and counted. The series are empty if the exposition has none of `wanted`.
    """
    text = _exposition_text(body)
    dropped: Counter[str] = Counter()
    families: set[str] = set()
    parsed: dict[str, tuple[str, Mapping[str, str]]] = {}
    numbers = _numbers(_wanted_lines(text, wanted, families), dropped, parsed)
    series: dict[str, list[SeriesValue]] = {}
    for head, value in numbers.items():
        name, labels = parsed[head]
        series.setdefault(name, []).append(SeriesValue(labels, value))
    return Exposition(
        {name: tuple(samples) for name, samples in series.items()},
        dict(dropped),
        numbers,
        frozenset(families),
    )


def _exposition_text(body: bytes) -> str:
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ExpositionUnreadable(
            ExpositionFault.NOT_TEXT, "has no metrics but bytes that are no UTF-8 text"
        ) from error
    start = text.lstrip()[:1]
    if not start:
        raise ExpositionUnreadable(ExpositionFault.EMPTY, "has an empty body, no metrics")
    if start == "<":
        raise ExpositionUnreadable(
            ExpositionFault.HTML, f"has an HTML page, not metrics{_title(text)}"
        )
    if start in "{[":
        raise ExpositionUnreadable(
            ExpositionFault.JSON, f"has JSON, not metrics: {printable(text)!r}"
        )
    if not text.endswith(("\n", "# EOF")):
        raise ExpositionUnreadable(
            FetchFailed.CUT_OFF, f"has metrics that end inside a line: {text[-60:]!r}"
        )
    return text


_MOST_CHARACTERS = 60
_TITLE = re.compile(r"<title[^>]*>([^<]{1,200})</title>", re.IGNORECASE)


def _title(page: str) -> str:
    """The title of an HTML page, such as `Welcome to nginx!`."""
    found = _TITLE.search(page[:_USUAL_CHARACTERS])
    return "" if found is None else f": {printable(found[1])!r}"


def printable(text: str) -> str:
    """The beginning of a text of an unknown server, in one line."""
    cleaned = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return cleaned[:_MOST_CHARACTERS]


def _wanted_lines(text: str, wanted: Collection[str], families: set[str]) -> Iterator[str]:
    """The lines of wanted series; adds the names that have a type to `families`."""
    # Not splitlines(): that also cuts at characters that a label value may hold.
    for line in text.split("\n"):
        if line.startswith(_COMMENT):
            if line.startswith(_TYPE):
                families.add(line[len(_TYPE) :].partition(" ")[0])
            continue
        end = _END_OF_NAME.search(line)
        if end and line[: end.start()] in wanted:
            yield line


def _numbers(
    lines: Iterator[str],
    dropped: Counter[str],
    parsed: dict[str, tuple[str, Mapping[str, str]]],
) -> dict[str, float]:
    """The values by the text of their series, whose names and labels are put into `parsed`."""
    numbers: dict[str, float] = {}
    for line in lines:
        parts = _SERIES_LINE.fullmatch(line.rstrip())
        try:
            if parts is None:
                raise ValueError
            head, value = parts["series"], float(parts["value"])
            parsed[head] = parsed_series(head)
        except ValueError:
            dropped[ExpositionFault.LINE_MALFORMED] += 1
            continue
        if not math.isfinite(value):
            dropped[ExpositionFault.VALUE_NOT_FINITE] += 1
            continue
        if head in numbers:
            dropped[ExpositionFault.SERIES_REPEATED] += 1
        numbers[head] = value
    return numbers


def bounded_label(text: str) -> str:
    """A text of at most MAX_LABEL_CHARACTERS: a longer one is cut and ends with a digest of it all.

    Half a surrogate pair, which JSON may hold and UTF-8 cannot, becomes `?`.
    """
    if len(text) > MAX_LABEL_CHARACTERS:
        digest = sha256(text.encode("utf-8", "replace")).hexdigest()[:_DIGEST_CHARACTERS]
        text = f"{text[: MAX_LABEL_CHARACTERS - _DIGEST_CHARACTERS - 1]}~{digest}"
    return text.encode("utf-8", "replace").decode()


def parsed_series(head: str) -> tuple[str, Mapping[str, str]]:
    """The name and the labels in the text of a series."""
    return _usual(head) if len(head) <= _USUAL_CHARACTERS else _labelled(head)


def _labelled(head: str) -> tuple[str, Mapping[str, str]]:
    (family,) = text_string_to_metric_families(f"{head} 0\n")
    (sample,) = family.samples
    labels = {name: bounded_label(value) for name, value in sample.labels.items()}
    return sample.name, MappingProxyType(labels)


# Every exposition of an engine has the same series; parsing labels is most of the cost.
_usual = lru_cache(maxsize=16384)(_labelled)
