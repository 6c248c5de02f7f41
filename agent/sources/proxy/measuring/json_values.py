"""Values of JSON that engines and clients sent, checked for their types; edits of single keys."""

import json
import re
from collections.abc import Callable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # absent from typeshed
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

Json = Mapping[str, Any]

MAX_TEXT_LENGTH = 256

_EMPTY: Json = {}

Schema = TypeVar("Schema", bound=msgspec.Struct)
Result = TypeVar("Result")


class JsonReader(Generic[Schema, Result]):
    """Reads JSON objects of one schema, however they are spelled; other keys are skipped."""

    __slots__ = ("_decoder", "_read")

    def __init__(self, schema: type[Schema], read: Callable[[Schema], Result]) -> None:
        self._decoder = msgspec.json.Decoder(schema)
        self._read = read

    def __call__(self, text: bytes) -> Result | None:
        """Return what `read` makes of the object; None if the text does not fit the schema."""
        try:
            found = self._decoder.decode(text)
        except msgspec.ValidationError:
            return None
        except (ValueError, RecursionError):
            other = _written_by_python(text, self._decoder.type)
            return None if other is None else self._read(other)
        return self._read(found)

    def all_in(self, lines: bytes) -> list[Result] | None:
        """Return what `read` makes of each object in these lines; None if one is unreadable."""
        try:
            return [self._read(found) for found in self._decoder.decode_lines(lines)]
        except (ValueError, RecursionError):
            return None


class JsonCounter:
    """Counts JSON objects of one schema."""

    __slots__ = ("_decoder",)

    def __init__(self, schema: type[msgspec.Struct]) -> None:
        self._decoder = msgspec.json.Decoder(schema)

    def __call__(self, lines: bytes) -> int:
        """Return how many objects the lines hold; 0 if they hold anything else."""
        try:
            return len(self._decoder.decode_lines(lines))
        except (ValueError, RecursionError):
            return 0


def _written_by_python(text: bytes, schema: type[Schema]) -> Schema | None:
    """Read JSON with NaN, Infinity or half a surrogate pair, which Python's `json` writes."""
    try:
        return msgspec.convert(json.loads(text), schema)
    except (ValueError, RecursionError):
        return None


def as_object(value: object) -> Json:
    """Return the value if it is a JSON object, else an empty object."""
    return value if isinstance(value, dict) else _EMPTY


def short_text(value: object, max_length: int = MAX_TEXT_LENGTH) -> str | None:
    """Return the value if it is a printable text of at most `max_length`, else None."""
    if isinstance(value, str) and 0 < len(value) <= max_length and value.isprintable():
        return value
    return None


_SPACES = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class JsonKey(NamedTuple):
    """A key's value, and the offsets of its name and of the value's begin and end."""

    value: Any
    name: int
    begin: int
    end: int


def json_keys(text: str) -> dict[str, JsonKey]:
    """Return the keys of a JSON object by name.

    Raises ValueError unless the text is one JSON object without repeated keys, and RecursionError
    if it is nested too deeply.
    """
    keys: dict[str, JsonKey] = {}
    at = _after(text, _space(text, 0), "{")
    at = _space(text, at)
    if text.startswith("}", at):
        return _ended(text, at + 1, keys)
    while True:
        name_at = at
        name, at = scanstring(text, _after(text, at, '"'), True)
        begin = _space(text, _after(text, _space(text, at), ":"))
        value, end = _DECODER.raw_decode(text, begin)
        if name in keys:
            raise ValueError(f"the key {name!r} is repeated")
        keys[name] = JsonKey(value, name_at, begin, end)
        at = _space(text, end)
        if text.startswith("}", at):
            return _ended(text, at + 1, keys)
        at = _space(text, _after(text, at, ","))


def set_key(text: str, keys: Mapping[str, JsonKey], name: str, value: str) -> str:
    """Return the object with one key set to `value`, which is JSON.

    `keys` are the keys of the text.
    """
    if key := keys.get(name):
        return text[: key.begin] + value + text[key.end :]
    begin = text.index("{") + 1
    return f"{text[:begin]}{json.dumps(name)}:{value}{',' if keys else ''}{text[begin:]}"


def remove_key(text: str, keys: Mapping[str, JsonKey], name: str) -> str:
    """Return the object without one of its keys."""
    names = list(keys)
    index = names.index(name)
    if index:
        return text[: keys[names[index - 1]].end] + text[keys[name].end :]
    following = keys[names[1]].name if len(names) > 1 else keys[name].end
    return text[: keys[name].name] + text[following:]


def _space(text: str, at: int) -> int:
    # Most JSON has no spaces here.
    if text[at : at + 1] not in _SPACES:
        return at
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _after(text: str, at: int, expected: str) -> int:
    if not text.startswith(expected, at):
        raise ValueError(f"expected {expected} at character {at}")
    return at + 1


def _ended(text: str, at: int, keys: dict[str, JsonKey]) -> dict[str, JsonKey]:
    if _space(text, at) != len(text):
        raise ValueError(f"text after the object at character {at}")
    return keys
