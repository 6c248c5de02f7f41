"""Reads expressions: the series that they select, and how a Prometheus without them is filled."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

WORDS = {
    "sum", "max", "count", "by", "rate", "increase", "resets", "and", "or", "on", "unless",
    "histogram_quantile", "absent", "time", "vector", "max_over_time", "avg_over_time", "topk",
    "sort", "group_left", "scalar",
}  # fmt: skip
AGGREGATED = re.compile(r"\b(?:by|on) \(([\w, ]*)\)")
_RANGE = re.compile(r"\[\w+\]|offset \w+")
_NAME = re.compile(r'([a-zA-Z_][\w:]*)(\{(?:[^}"]|"[^"]*")*\})?')
_LABEL = re.compile(r'(\w+)(?:=~|!~|!=|=)(?:"[^"]*"|%q)')
# A matcher on what only a template knows.
_FILLED = re.compile(r"\w+=%q,?")


def _selectors(expression: str) -> Iterator[tuple[str, str]]:
    for name, inside in _NAME.findall(AGGREGATED.sub("", _RANGE.sub("", expression))):
        if name not in WORDS:
            yield name, inside


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The series that an expression selects, each with the labels of its matchers."""
    for name, inside in _selectors(expression):
        yield name, set(_LABEL.findall(inside))


def series_of(expression: str) -> Iterator[str]:
    """Each of its selectors, without the matchers that a template fills in."""
    for name, inside in _selectors(expression):
        known = _FILLED.sub("", inside)
        yield name if known in ("", "{}") else f"{name}{known}".replace(",}", "}")


def templates(rule: dict[str, Any]) -> Iterator[str]:
    """The expressions inside a rule's annotations."""
    for text in rule.get("annotations", {}).values():
        yield from re.findall(r"`(.*?)`", text)
        yield from re.findall(r'query "(.*?)"', text)


@cache
def rule_groups(text: str) -> list[dict[str, Any]]:
    """The groups of a rule file, to be read only: many tests ask for those of the same text."""
    groups: list[dict[str, Any]] = yaml.safe_load(text)["groups"]
    return groups


def alert_rules(text: str) -> list[dict[str, Any]]:
    """The alerts of a rule file."""
    return [rule for group in rule_groups(text) for rule in group["rules"] if "alert" in rule]


def expressions(document: dict[str, Any]) -> Iterator[str]:
    """Every expression of a rule file."""
    for group in document["groups"]:
        for rule in group["rules"]:
            yield rule["expr"]
            yield from templates(rule)
