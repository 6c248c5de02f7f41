"""The page of settings: default, environment variable and meaning of each."""

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from agent.render.reference.field_meanings import field_meanings, summary_of
from agent.render.reference.markdown_page import code, page, table
from agent.settings import Settings
from agent.settings.environment import PREFIX
from agent.settings.section import Section

_HEADER = ("setting", "default", "environment", "meaning")
_REQUIRED = "required"
_COMPUTED = "at start"


class Setting(NamedTuple):
    """One setting: its path in the file, its default in YAML, its variable and its meaning.

    `default` is None where there is none, or where it is known at the start only.
    """

    path: str
    variable: str
    default: str | None
    required: bool
    meaning: str


class _Place(NamedTuple):
    """The key of a section, in the file and in a variable."""

    path: str = ""
    variable: str = PREFIX

    def of(self, key: str) -> "_Place":
        """A key inside."""
        before = f"{self.variable}__" if self.path else self.variable
        path = f"{self.path}.{key}" if self.path else key
        return _Place(path, f"{before}{key.upper()}")

    def item(self) -> "_Place":
        """The first item of a list."""
        return _Place(f"{self.path}[0]", f"{self.variable}__0")


def settings_page() -> str:
    """The page in Markdown."""
    return page(
        "Settings",
        "Every key of the file that `--config` names, and its environment variable, which wins. "
        "A list is set by number: `GOODPUT_ENGINES__1__URL` is of the second engine. Unknown keys "
        "are errors. Durations are written as in `5s`, `10m`, `12h`, `30d`.",
        _parts(),
    )


def all_settings() -> Iterator[Setting]:
    """Every setting, in the order of the declarations."""
    for _, settings in _sections(Settings, _Place()):
        yield from settings


def _parts() -> Iterator[str]:
    for title, settings in _sections(Settings, _Place()):
        # A section may hold only others.
        if settings:
            yield f"## {title}"
            yield table(_HEADER, map(_row, settings))


def _row(setting: Setting) -> tuple[str, ...]:
    default = _REQUIRED if setting.required else _COMPUTED
    if setting.default is not None:
        default = code(setting.default)
    return code(setting.path), default, code(setting.variable), setting.meaning


def _sections(section: type[BaseModel], place: _Place) -> Iterator[tuple[str, list[Setting]]]:
    """The titles and settings of a section, and then of the sections inside it."""
    meanings = field_meanings(section)
    own, inner = [], []
    for name, field in section.model_fields.items():
        here = place.of(field.alias or name)
        found, is_list = _inner(field.annotation)
        if found is None or name in meanings:
            own.append(_setting(here, field, meanings[name]))
        if found is not None:
            inner.append((found, here.item() if is_list else here))
    title = code(place.path) if place.path else "The agent"
    yield f"{title}: {_lower(summary_of(section))}", own
    for found, where in inner:
        yield from _sections(found, where)


def _lower(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:].removesuffix(".")


def _inner(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section of a setting's type, and whether it is a list of them."""
    options = get_args(annotation) if _is_union(annotation) else (annotation,)
    for option in options:
        if get_origin(option) is tuple:
            found, _ = _inner(get_args(option)[0])
            return found, True
        if isinstance(option, type) and issubclass(option, Section):
            return option, False
    return None, False


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _setting(place: _Place, field: FieldInfo, meaning: str) -> Setting:
    default = None
    if not field.is_required() and field.default_factory is None:
        default = _yaml(field.default)
    words = _words(field.annotation)
    allowed = f" One of {', '.join(map(code, words))}." if words else ""
    return Setting(place.path, place.variable, default, field.is_required(), meaning + allowed)


def _words(annotation: Any) -> tuple[str, ...]:
    """The words that a setting may be, if those are all."""
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _yaml(value: Any) -> str:
    """A default as it would be written in the file."""
    if isinstance(value, tuple):
        value = [_plain(item) for item in value]
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=1000)
    return text.removesuffix("\n...\n").strip()


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", by_alias=True, include=value.model_fields_set)
    return value
