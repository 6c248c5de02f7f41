"""Loading the settings from defaults, a YAML file and environment variables."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent.errors import SettingsInvalid
from agent.settings.environment import overlay
from agent.settings.settings_model import Settings
from agent.settings.values import masked


def load(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """The settings from a file and the environment; SettingsInvalid lists every problem."""
    given = _read(path) if path is not None else {}
    problems = overlay(given, environment, Settings.model_fields)
    # A section without keys is null in YAML, and means its defaults.
    given = {key: value for key, value in given.items() if value is not None}
    problems += _repeated_names(given)
    try:
        settings = Settings.model_validate(given)
    except ValidationError as error:
        problems += [_sentence(detail) for detail in error.errors()]
    if problems:
        raise SettingsInvalid(problems)
    return settings


class _Loader(yaml.SafeLoader):
    """YAML without repeated keys, where the second would silently replace the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, or a ConstructorError that names the repeated key and its place."""
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} is repeated", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[Any, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid([f"{path}: cannot be read: {error}"]) from error
    except yaml.YAMLError as error:
        raise SettingsInvalid([f"{path}: is no YAML: {error}"]) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsInvalid([f"{path}: holds a {type(content).__name__}, not a mapping of keys"])
    return content


def _repeated_names(given: Mapping[Any, Any]) -> Iterator[str]:
    """A sentence for each repeated name of an engine or of an objective."""
    for section in ("engines", "objectives"):
        items = given.get(section)
        items = items if isinstance(items, list) else []
        names = [item.get("name") for item in items if isinstance(item, Mapping)]
        for name, times in Counter(name for name in names if isinstance(name, str)).items():
            if times > 1:
                yield f"{section}: the name {name!r} is used {times} times; names must be unique"


# Messages in the terms of YAML, where pydantic uses those of Python.
_WORDS = {
    "extra_forbidden": "is not a known key; remove it or correct its spelling",
    "missing": "is missing",
    "tuple_type": "must be a list",
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
}
_WITHOUT_INPUT = ("extra_forbidden", "missing", "value_error")


def _sentence(detail: Any) -> str:
    where = "".join(
        f"[{step}]" if isinstance(step, int) else f".{step}" for step in detail["loc"]
    ).lstrip(".")
    kind = detail["type"]
    message = _WORDS.get(kind, detail["msg"].removeprefix("Value error, "))
    got = "" if kind in _WITHOUT_INPUT else f" (got {masked(repr(detail['input']))})"
    return f"{where}: {message}{got}"
