"""Values out of JSON that engines and clients sent, checked for their types."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

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
