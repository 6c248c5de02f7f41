"""Settings from environment variables: `GOODPUT_<SECTION>__<KEY>`, list items by number."""

import re
from collections.abc import Container, Mapping
from typing import Any

from agent.settings.values import shown
from agent.settings.yaml_values import Place, read_yaml

PREFIX = "GOODPUT_"

# Options of the command `render`, which reads these variables itself.
RENDER_PREFIX = f"{PREFIX}RENDER_"

# Kubernetes sets these in every pod, for a Service named goodput-agent.
_SERVICE_LINK = r"GOODPUT_AGENT_(SERVICE_HOST|SERVICE_PORT.*|PORT(_\d.*)?)"

_NO_SETTING = re.compile(rf"{_SERVICE_LINK}|{RENDER_PREFIX}[^_].*")

_NUMBER = re.compile(r"[0-9]{1,6}")
_MAX_STEPS = 10

_HEADERS = ("otlp_metrics", "headers")


def is_secret(place: Place) -> bool:
    """Whether no message may show the value at this place of the settings."""
    return place[:2] == _HEADERS or place == _HEADERS[:1]


def overlay(
    given: dict[Any, Any],
    environment: Mapping[str, str],
    sections: Container[str],
    origins: dict[Place, str],
) -> list[str]:
    """Set the variables in `given`, and their names in `origins` by the place that they set.

    Returns a sentence for each that cannot be set.
    """
    paths = {
        name: name.removeprefix(PREFIX).lower().split("__")
        for name in environment
        if name.startswith(PREFIX) and not _NO_SETTING.fullmatch(name)
    }
    problems: list[str] = []
    for name in sorted(paths, key=lambda name: _by_number(paths[name])):
        steps = paths[name]
        if steps[0] not in sections:
            wrong = f"{shown(steps[0])} is no section of the settings; unset or correct it"
            problems.append(f"{shown_name(name)}: {wrong}")
            continue
        try:
            origins[_set(given, steps, environment[name])] = name
        except ValueError as error:
            problems.append(f"{shown_name(name)}: {error}")
    return problems


def shown_name(name: str) -> str:
    """A name or key for a message."""
    text = name if name.isprintable() else repr(name)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


_MOST_SHOWN = 200


def _by_number(steps: list[str]) -> list[str]:
    """A sorting key that puts item 2 of a list before item 10."""
    return [step.zfill(9) if _NUMBER.fullmatch(step) else step for step in steps]


def _set(given: dict[Any, Any], steps: list[str], value: str) -> Place:
    """Set a value; returns its place. Raises ValueError."""
    if not all(steps) or len(steps) > _MAX_STEPS:
        raise ValueError(f"names no key; write {PREFIX}<SECTION>__<KEY>")
    inner: Any = given
    place: Place = ()
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key = _index(inner, step)
        place = (*place, key)
        if following is None:
            _put(inner, key, _value(value, place))
        else:
            inner = _descend(inner, key, into_list=_NUMBER.fullmatch(following) is not None)
    return place


def _value(text: str, place: Place) -> Any:
    read = read_yaml(text, under=place, is_secret=is_secret)
    if not read.problems:
        return read.value
    problem = read.problems[0].text
    if problem.startswith("is "):
        problem = f"{'the value' if is_secret(place) else shown(text)} {problem}"
    raise ValueError(problem)


def _index(inner: Any, step: str) -> str | int:
    if not isinstance(inner, list):
        return step
    if not _NUMBER.fullmatch(step) or int(step) > len(inner):
        raise ValueError(
            f"{shown(step)} is no item of a list; write the next number, starting at 0"
        )
    return int(step)


def _put(inner: Any, key: Any, value: Any) -> None:
    if isinstance(inner, list) and key == len(inner):
        inner.append(value)
    else:
        inner[key] = value


def _descend(inner: Any, key: Any, *, into_list: bool) -> Any:
    absent = isinstance(inner, list) and key == len(inner)
    found = None if absent else inner[key] if isinstance(inner, list) else inner.get(key)
    if found is None:
        found = [] if into_list else {}
        _put(inner, key, found)
    if not isinstance(found, (dict, list)):
        raise ValueError(f"{shown(key)} is a single value in the file; nothing can be set in it")
    return found
