"""Reads the wanted attributes of a span; a fast path serves the usual ones."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from agent.catalog.reasons import ValueDropped
from agent.catalog.spans import REQUEST_ATTRIBUTES, ValueType

MAX_TEXT_CHARACTERS = 256

# A value or None, and the reason of a refusal.
ValueOrReason = tuple[Any, str | None]


def plain(value: AnyValue) -> object:
    """The attribute's value as a Python scalar; None for lists, maps, bytes and nothing."""
    which = value.WhichOneof("value")
    return getattr(value, which) if which in _SCALARS else None


_SCALARS = frozenset(("string_value", "bool_value", "int_value", "double_value"))


def request_attributes(span: Span, refused: Counter[tuple[str, str]]) -> dict[str, Any]:
    """The wanted attributes by our field names; of two spellings, the one with the lower rank."""
    values = _usual_attributes(span)
    return _any_attributes(span, refused) if values is None else values


_SLOTS = {
    ValueType.SECONDS: "double_value",
    ValueType.COUNT: "int_value",
    ValueType.TEXT: "string_value",
}
_USUAL = {key: (name, _SLOTS[kind]) for key, (name, kind, _) in REQUEST_ATTRIBUTES.items()}


def _usual_attributes(span: Span) -> dict[str, Any] | None:
    """The wanted attributes where each occurs once, in the usual type and not zero; else None.

    Nearly every span is so, and asking for the type of a value costs more than reading it.
    """
    values: dict[str, Any] = {}
    usual = _USUAL.get
    for pair in span.attributes:
        found = usual(pair.key)
        if found is not None:
            name, slot = found
            value = getattr(pair.value, slot)
            if not value or name in values or (slot == "string_value" and not usable(value)):
                return None
            values[name] = value
    return values


def usable(text: str) -> bool:
    """Whether a database can store the text: PostgreSQL takes no NUL, and names are short."""
    return len(text) <= MAX_TEXT_CHARACTERS and "\0" not in text


def name_or_none(text: object) -> ValueOrReason:
    """A name that a database can store, or None and a reason; an empty name is unknown."""
    if text is None:
        return None, None
    if not isinstance(text, str):
        return None, ValueDropped.WRONG_TYPE
    if not usable(text):
        return None, ValueDropped.CONTROL_CHARACTER if "\0" in text else ValueDropped.TOO_LONG
    return text or None, None


def _any_attributes(span: Span, refused: Counter[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    ranks: dict[str, int] = {}
    wanted = REQUEST_ATTRIBUTES
    for pair in span.attributes:
        found = wanted.get(pair.key)
        if found is None:
            continue
        name, kind, rank = found
        if rank > ranks.get(name, rank):
            continue
        value, reason = _READERS[kind](pair.value)
        if reason is not None:
            refused[name, reason] += 1
        elif value is not None:
            values[name] = value
            ranks[name] = rank
    return values


def _read_seconds(value: AnyValue) -> ValueOrReason:
    which = value.WhichOneof("value")
    if which == "double_value":
        return value.double_value, None
    if which == "int_value":
        return float(value.int_value), None
    return None, ValueDropped.WRONG_TYPE


def _read_count(value: AnyValue) -> ValueOrReason:
    which = value.WhichOneof("value")
    if which == "int_value":
        return value.int_value, None
    if which == "double_value" and value.double_value.is_integer():
        return int(value.double_value), None
    return None, ValueDropped.WRONG_TYPE


def _read_text(value: AnyValue) -> ValueOrReason:
    which = value.WhichOneof("value")
    if which == "array_value" and len(value.array_value.values) == 1:
        return _read_text(value.array_value.values[0])
    if which != "string_value":
        return None, ValueDropped.WRONG_TYPE
    return name_or_none(value.string_value)


_READERS: Mapping[ValueType, Callable[[AnyValue], ValueOrReason]] = {
    ValueType.SECONDS: _read_seconds,
    ValueType.COUNT: _read_count,
    ValueType.TEXT: _read_text,
}
