"""Reading the settings: defaults, then a YAML file, then environment variables."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent.errors import SettingsInvalid
from agent.settings.model import Settings

ENVIRONMENT_PREFIX = "GOODPUT_"


def load(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """The settings from a file and the environment; SettingsInvalid lists every problem found."""
    given = _read(path) if path is not None else {}
    problems: list[str] = []
    for name, value in sorted(environment.items()):
        if name.startswith(ENVIRONMENT_PREFIX):
            problem = _overlay(given, name, value)
            problems += [problem] if problem else []
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems += [_sentence(detail) for detail in error.errors()]
    if problems:
        raise SettingsInvalid(problems)
    return settings


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"{path}: cannot be read: {error}"]) from error
    except yaml.YAMLError as error:
        raise SettingsInvalid([f"{path}: is no YAML: {error}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsInvalid([f"{path}: holds a {type(content).__name__}, not a mapping of keys"])
    return content


def _overlay(given: dict[str, Any], name: str, value: str) -> str | None:
    """Set one environment variable in `given`; the answer is a problem, or None."""
    steps = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
    place: Any = given
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key = _index(place, step)
        if key is None:
            return f"{name}: {step!r} is no place in a list; write the next number, starting at 0"
        if following is None:
            try:
                _put(place, key, yaml.safe_load(value))
            except yaml.YAMLError:
                return f"{name}: {value!r} is no YAML value"
        else:
            place = _descend(place, key, into_list=following.isdigit())
            if place is None:
                return f"{name}: {step!r} is a single value in the file; nothing can be set in it"
    return None


def _index(place: Any, step: str) -> str | int | None:
    if not isinstance(place, list):
        return step
    return int(step) if step.isdigit() and int(step) <= len(place) else None


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


def _sentence(detail: Any) -> str:
    where = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in detail["loc"]
    ).lstrip(".")
    if detail["type"] == "extra_forbidden":
        return f"{where}: is not a known key; remove it or correct its spelling"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] in ("value_error", "missing"):
        return f"{where}: {message}" if where else message
    return f"{where}: {message} (got {detail['input']!r})"
