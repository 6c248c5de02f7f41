"""The record of a request as an engine's middleware sends it.

Fields go by their names, so that the plugin and the agent may be of different versions: a field
that one side does not know is left out.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from agent.analysis.latency import MAX_TOKENS
from agent.analysis.quantiles import HIGHEST_BIN, LOWEST_BIN
from agent.records.record_fields import Mark, RecordField, fields_of
from agent.records.request import EngineView, ProxyView, RequestRecord

_SMALL = 2**31 - 1
# More than any time in seconds or number of bytes; a NaN is not within it either.
_MOST = 1e15
_Bin = Annotated[int, Meta(ge=LOWEST_BIN, le=HIGHEST_BIN)]
_Gaps = dict[_Bin, Annotated[int, Meta(ge=1, le=MAX_TOKENS)]]
# Differences of two clocks or views, and vLLM's priority.
_MAY_BE_NEGATIVE = frozenset(("clock_skew_s", "holdback_s", "priority"))


def _checked(field: RecordField) -> Any:
    """The type of a field, with the range of its values."""
    if field.type is str:
        return Annotated[str, Meta(max_length=field.length or 64)]
    if field.is_json:
        return _Gaps
    if field.type is float:
        return Annotated[float, Meta(ge=_least(field, _MOST), le=_MOST)]
    if field.type is int:
        most = _SMALL if Mark.SMALL in field.marks else int(_MOST)
        return Annotated[int, Meta(ge=int(_least(field, most)), le=most)]
    return field.type


def _least(field: RecordField, most: float) -> float:
    return -most if field.name in _MAY_BE_NEGATIVE else 0


def _struct(kind: Any, views: dict[Any, type[msgspec.Struct]]) -> type[msgspec.Struct]:
    """A struct with the fields of a named tuple, and structs in place of its views."""
    fields: list[Any] = []
    for field in fields_of(kind):
        checked = views.get(field.type) or _checked(field)
        hint = checked | None if field.nullable else checked
        default = kind._field_defaults
        known = (default[field.name],) if field.name in default else ()
        fields.append((field.name, hint, *known))
    return msgspec.defstruct(kind.__name__, fields, omit_defaults=True, gc=False)


_PROXY_VIEW = _struct(ProxyView, {})
_ENGINE_VIEW = _struct(EngineView, {})
_RECORD = _struct(RequestRecord, {ProxyView: _PROXY_VIEW, EngineView: _ENGINE_VIEW})
# The place of each in a record.
_VIEWS = (
    (RequestRecord._fields.index("proxied"), _PROXY_VIEW),
    (RequestRecord._fields.index("engine_view"), _ENGINE_VIEW),
)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_RECORD)


def record_bytes(record: RequestRecord) -> bytes:
    """The record as bytes. Raises TypeError, ValueError and OverflowError for what no message can
    hold."""
    values: list[Any] = list(record)
    for place, view in _VIEWS:
        if values[place] is not None:
            values[place] = view(*values[place])
    return _ENCODER.encode(_RECORD(*values))


def record_from(sent: bytes) -> RequestRecord:
    """The record in these bytes. Raises msgspec.ValidationError for a value that a field cannot
    have, and ValueError for anything else."""
    found: Any = _DECODER.decode(sent)
    proxied, engine_view = found.proxied, found.engine_view
    record = RequestRecord(*msgspec.structs.astuple(found))
    return record._replace(
        proxied=proxied and ProxyView(*msgspec.structs.astuple(proxied)),
        engine_view=engine_view and EngineView(*msgspec.structs.astuple(engine_view)),
    )
