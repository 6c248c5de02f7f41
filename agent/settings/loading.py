"""Loading the settings from defaults, a YAML file and environment variables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agent.errors import SettingsInvalid
from agent.settings.environment import is_secret, overlay, shown_name
from agent.settings.named_files import read_named_file
from agent.settings.settings_model import Settings
from agent.settings.values import shown
from agent.settings.yaml_values import Place, YamlDocument, read_yaml

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
            _sentence(detail, origins)
            for detail in error.errors()
            if unread.isdisjoint(detail["loc"][:length] for length in range(1, 20))
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
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"{path}: cannot be read: {error}"]) from error
    if not isinstance(document.value, (dict, type(None))):
        kind = type(document.value).__name__
        raise SettingsInvalid([f"{path}: holds a {kind}, not a mapping of keys"])
    return document


def _repeated_names(given: Mapping[Any, Any], origins: _Origins) -> Iterator[str]:
    """A sentence for each repeated name of an engine or of an objective."""
    for section in ("engines", "objectives"):
        items = given.get(section)
        items = items if isinstance(items, list) else []
        names = [item.get("name") for item in items if isinstance(item, Mapping)]
        for name, times in Counter(name for name in names if isinstance(name, str)).items():
            if times > 1:
                text = f"the name {shown(name)} is used {times} times; names must be unique"
                yield _at(origins.of((section,)), (section,), text)


# Messages in the terms of YAML, where pydantic uses those of Python.
_WORDS = {
    "extra_forbidden": "is not a known key; remove it or correct its spelling",
    "missing": "is missing",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
}
_WITHOUT_INPUT = ("extra_forbidden", "missing", "value_error")


def _sentence(detail: Any, origins: _Origins) -> str:
    kind, place = detail["type"], detail["loc"]
    message = _WORDS.get(kind, detail["msg"].removeprefix("Value error, "))
    hidden = kind in _WITHOUT_INPUT or is_secret(place)
    got = "" if hidden else f" (got {shown(detail['input'])})"
    return _at(origins.of(place), place, f"{message}{got}")
