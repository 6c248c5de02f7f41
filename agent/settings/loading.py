"""Loading the settings from defaults, a YAML file and environment variables.

A variable is `GOODPUT_<SECTION>__<KEY>`, with numbers for list items."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from agent.errors import SettingsInvalid
from agent.settings.named_files import read_named_file, similar_files
from agent.settings.settings_model import Settings
from agent.settings.values import did_you_mean, shown
from agent.settings.yaml_values import UNREAD, Place, YamlDocument, read_yaml

PREFIX = "GOODPUT_"

# Options of the command `render`, which reads these variables itself.
RENDER_PREFIX = f"{PREFIX}RENDER_"

# Kubernetes sets these in every pod, for a Service named goodput-agent.
_SERVICE_LINK = r"GOODPUT_AGENT_(SERVICE_HOST|SERVICE_PORT.*|PORT(_\d.*)?)"

_NO_SETTING = re.compile(rf"{_SERVICE_LINK}|{RENDER_PREFIX}[^_].*")

_NUMBER = re.compile(r"[0-9]{1,6}")
_MAX_STEPS = 10

_HEADERS = ("otlp_metrics", "headers")

# Unknown keys that a user may know from elsewhere.
_REPLACED: Mapping[Place, str] = {
    ("storage", "url"): (
        "is now storage.file for SQLite (a path), and storage.publish_to for PostgreSQL and "
        "ClickHouse"
    ),
    ("storage", "journal"): (
        "is now storage.file, storage.keep_in_file and storage.max_bytes; an agent always writes "
        "to its file first"
    ),
    ("storage", "journal", "enabled"): (
        "remove it; an agent always writes to storage.file first, and publishes to "
        "storage.publish_to"
    ),
    ("storage", "journal", "path"): "is now storage.file",
    ("storage", "journal", "max_bytes"): "is now storage.max_bytes",
    ("storage", "journal", "max_age"): "is now storage.keep_in_file",
    ("storage", "write_timeout"): (
        "remove it; an agent writes to storage.file alone, which needs no limit"
    ),
}


def is_secret(place: Place) -> bool:
    """Whether no message may show the value at this place of the settings."""
    return place[:2] == _HEADERS or place == _HEADERS[:1]


def overlay(
    given: dict[Any, Any],
    environment: Mapping[str, str],
    sections: Collection[str],
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
            close = did_you_mean(steps[0], sections) or "; unset or correct it"
            wrong = f"{shown(steps[0])} is not a section of the settings{close}"
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
            f"{shown(step)} is not an item of a list; write the next number, starting at 0"
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


_MOST_PROBLEMS = 50
_LONGEST_PROBLEM = 1000


def load(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """The settings from a file and the environment; SettingsInvalid lists every problem."""
    document = YamlDocument() if path is None else _read(path)
    problems = [_at(f"{path}:{each.line}", each.place, each.text) for each in document.problems]
    if any(not each.place for each in document.problems):
        # What the rest means is unknown.
        raise SettingsInvalid(_first_ones(problems))
    given = document.value or {}
    origins = _Origins(path, document.lines, {})
    problems += overlay(given, environment, Settings.model_fields, origins.variables)
    # A section without keys is null in YAML, and means its defaults.
    given = {key: value for key, value in given.items() if value is not None}
    problems += _repeated_names(given, origins)
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        unread = {each.place for each in document.problems}
        problems += [
            sentence
            for detail in error.errors()
            if unread.isdisjoint(detail["loc"][:length] for length in range(1, 20))
            for sentence in _sentences(detail, origins)
        ]
    if problems:
        raise SettingsInvalid(_first_ones(problems))
    return settings


@dataclass(frozen=True, slots=True)
class _Origins:
    """Where values come from: a line of the file, or a variable of the environment."""

    file: Path | None
    lines: Mapping[Place, int]
    variables: dict[Place, str]

    def of(self, place: Place) -> str:
        """The name of the variable, or file and line; empty for a default."""
        parents = [place[:length] for length in range(len(place), 0, -1)]
        variable = next((self.variables[each] for each in parents if each in self.variables), None)
        line = next((self.lines[each] for each in parents if each in self.lines), None)
        return variable or ("" if line is None else f"{self.file}:{line}")


def _at(origin: str, place: Place, text: str) -> str:
    where = "".join(
        f"[{step}]" if isinstance(step, int) else f".{shown_name(str(step))}" for step in place
    ).lstrip(".")
    return ": ".join(part for part in (origin, where, text) if part)


def _first_ones(problems: list[str]) -> list[str]:
    cut = [
        text if len(text) <= _LONGEST_PROBLEM else f"{text[:_LONGEST_PROBLEM]}..."
        for text in problems[:_MOST_PROBLEMS]
    ]
    more = len(problems) - len(cut)
    return [*cut, f"{more:,} more problems"] if more else cut


def _read(path: Path) -> YamlDocument:
    """The document of a file, which is a mapping of keys or empty. Raises SettingsInvalid."""
    try:
        document = read_yaml(read_named_file(path).decode("utf-8"), is_secret=is_secret)
    except OSError as error:
        raise SettingsInvalid(
            [f"{path}: cannot be read: {error}{similar_files(path, error)}"]
        ) from error
    except UnicodeDecodeError as error:
        raise SettingsInvalid([f"{path}: cannot be read: {error}"]) from error
    if document.value is not UNREAD and not isinstance(document.value, (dict, type(None))):
        kind = type(document.value).__name__
        raise SettingsInvalid([f"{path}: holds a {kind}, not a mapping of keys"])
    return document


def _repeated_names(given: Mapping[Any, Any], origins: _Origins) -> Iterator[str]:
    """A sentence for each repeated name of an engine, a router or an objective."""
    for section in ("engines", "routers", "objectives"):
        items = given.get(section)
        items = items if isinstance(items, list) else []
        names = [item.get("name") for item in items if isinstance(item, Mapping)]
        for name, times in Counter(name for name in names if isinstance(name, str)).items():
            if times > 1:
                text = f"the name {shown(name)} is used {times} times; names must be unique"
                yield _at(origins.of((section,)), (section,), text)


def _keys_beside(place: Place) -> list[str]:
    """The keys of the section that a place is in."""
    sections: list[type[BaseModel]] = [Settings]
    for step in place[:-1]:
        if isinstance(step, str):
            kinds = [kind for section in sections for key, kind in _keys(section) if key == step]
            sections = [section for kind in kinds for section in _sections(kind)]
    return [key for section in sections for key, _ in _keys(section)]


def _keys(section: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    for name, field in section.model_fields.items():
        yield field.alias or name, field.annotation


def _sections(kind: Any) -> Iterator[type[BaseModel]]:
    """The sections in the type of a setting."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _sections(part)


# Messages in the terms of YAML, where pydantic uses those of Python.
_WORDS = {
    "missing": "is missing",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
}
_QUOTED = re.compile("'([^']*)'")
_WITHOUT_INPUT = ("extra_forbidden", "missing", "value_error")


def _sentences(detail: Any, origins: _Origins) -> list[str]:
    """The sentence of a problem; for a section that was replaced, one for each of its keys."""
    place, given = detail["loc"], detail["input"]
    if place not in _REPLACED:
        return [_sentence(detail, origins)]
    inner = [(*place, key) for key in given] if isinstance(given, dict) else []
    replaced = [each for each in inner if each in _REPLACED] or [place]
    return [_at(origins.of(each), each, _REPLACED[each]) for each in replaced]


def _sentence(detail: Any, origins: _Origins) -> str:
    kind, place = detail["type"], detail["loc"]
    message = _WORDS.get(kind, detail["msg"].removeprefix("Value error, "))
    if kind == "extra_forbidden":
        close = did_you_mean(str(place[-1]), _keys_beside(place))
        message = f"is not a known key{close or '; remove it or correct its spelling'}"
    hidden = kind in _WITHOUT_INPUT or is_secret(place)
    got = "" if hidden else f" (got {shown(detail['input'])})"
    if kind == "literal_error":
        got += did_you_mean(str(detail["input"]), _QUOTED.findall(detail["ctx"]["expected"]))
    return _at(origins.of(place), place, f"{message}{got}")
