"""Values out of JSON that clients and engines sent, checked for their types."""

import json
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

MAX_TEXT_LENGTH = 256

_EMPTY: Json = {}


def parse_object(text: bytes) -> Json | None:
    """Return the JSON object in a text; None for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def as_object(value: object) -> Json:
    """Return the value if it is a JSON object, else an empty object."""
    return value if isinstance(value, dict) else _EMPTY


def short_text(value: object, max_length: int = MAX_TEXT_LENGTH) -> str | None:
    """Return the value if it is a printable text of at most so many characters, else None."""
    if isinstance(value, str) and 0 < len(value) <= max_length and value.isprintable():
        return value
    return None
