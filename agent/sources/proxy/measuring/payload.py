"""JSON from the outside, of which nothing is known before it is looked at."""

import json
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

_EMPTY: Json = {}


def parsed(text: bytes) -> Json | None:
    """The JSON object that the text is, None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def mapping(value: object) -> Json:
    """The value where it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else _EMPTY
