"""Facts of samples as JSON: a value by name, or a list of values with their labels."""

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from agent.records.gpu import FactKey, Facts


def facts_json(facts: Facts) -> dict[str, Any]:
    """Facts as JSON has them: `{"name": 1.0, "labelled": [{"labels": ["a"], "value": 2.0}]}`."""
    written: dict[str, Any] = {}
    for (name, labels), value in facts.items():
        if labels:
            entry = {"labels": list(labels), "value": json_value(value)}
            written.setdefault(name, []).append(entry)
        else:
            written[name] = json_value(value)
    return written


def facts_from(stored: str) -> Facts:
    """The known facts of a stored sample. Raises ValueError or TypeError for a damaged one."""
    facts: dict[FactKey, float] = {}
    for name, value in dict(json.loads(stored)).items():
        for labels, number in _entries(value) if isinstance(value, list) else [((), value)]:
            if number is not None:
                facts[name, labels] = float(number)
    return facts


def _entries(stored: list[Any]) -> list[tuple[tuple[str, ...], Any]]:
    try:
        return [(tuple(entry["labels"]), entry["value"]) for entry in stored]
    except KeyError as error:
        raise ValueError(f"a fact has no {error}") from error


def facts_by_text(stored: Mapping[str, Any]) -> dict[str, float | None]:
    """Stored facts as the API names them: a fact's labels in braces behind its name."""
    shown: dict[str, float | None] = {}
    for name, value in stored.items():
        if isinstance(value, list):
            shown |= {f"{name}{{{','.join(each['labels'])}}}": each["value"] for each in value}
        else:
            shown[name] = value
    return shown


def json_value(value: str | float | None) -> str | float | None:
    """The value, or None where JSON has none: expositions of engines hold NaN."""
    return None if isinstance(value, float) and not isfinite(value) else value
