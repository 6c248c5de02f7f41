"""Settings from environment variables: `GOODPUT_<SECTION>__<KEY>`, list items by number."""

import re
from collections.abc import Container, Mapping
from typing import Any

import yaml

PREFIX = "GOODPUT_"

# Options of the command `render`, which reads these variables itself.
RENDER_PREFIX = f"{PREFIX}RENDER_"

# Kubernetes sets these in every pod, for a Service named goodput-agent.
_SERVICE_LINK = r"GOODPUT_AGENT_(SERVICE_HOST|SERVICE_PORT.*|PORT(_\d.*)?)"

_NO_SETTING = re.compile(rf"{_SERVICE_LINK}|{RENDER_PREFIX}[^_].*")


def overlay(
    given: dict[Any, Any], environment: Mapping[str, str], sections: Container[str]
) -> list[str]:
    """Set the variables in `given`; returns a sentence for each that cannot be set."""
    paths = {
        name: name.removeprefix(PREFIX).lower().split("__")
        for name in environment
        if name.startswith(PREFIX) and not _NO_SETTING.fullmatch(name)
    }
    problems = [
        _set(given, name, paths[name], environment[name])
        if paths[name][0] in sections
        else f"{name}: {paths[name][0]!r} is no section of the settings; unset or correct it"
        for name in sorted(paths, key=lambda name: _by_number(paths[name]))
    ]
    return [problem for problem in problems if problem is not None]


def _by_number(steps: list[str]) -> list[str]:
    """A sorting key that puts item 2 of a list before item 10."""
    return [step.zfill(9) if step.isdecimal() else step for step in steps]


def _set(given: dict[Any, Any], name: str, steps: list[str], value: str) -> str | None:
    if not all(steps):
        return f"{name}: names no key; write {PREFIX}<SECTION>__<KEY>"
    place: Any = given
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key = _index(place, step)
        if key is None:
            return f"{name}: {step!r} is no item of a list; write the next number, starting at 0"
        if following is None:
            try:
                _put(place, key, yaml.safe_load(value))
            except yaml.YAMLError:
                return f"{name}: {value!r} is no YAML value"
        else:
            place = _descend(place, key, into_list=following.isdecimal())
            if place is None:
                return f"{name}: {step!r} is a single value in the file; nothing can be set in it"
    return None


def _index(place: Any, step: str) -> str | int | None:
    if not isinstance(place, list):
        return step
    return int(step) if step.isdecimal() and int(step) <= len(place) else None


def _put(place: Any, key: Any, value: Any) -> None:
    if isinstance(place, list) and key == len(place):
        place.append(value)
    else:
        place[key] = value


def _descend(place: Any, key: Any, *, into_list: bool) -> Any:
    absent = isinstance(place, list) and key == len(place)
    inner = None if absent else place[key] if isinstance(place, list) else place.get(key)
    if inner is None:
        inner = [] if into_list else {}
        _put(place, key, inner)
    return inner if isinstance(inner, (dict, list)) else None
