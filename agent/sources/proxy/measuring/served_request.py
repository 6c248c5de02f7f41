"""The record of a request as an engine's middleware sends it.

Fields go by their names, so that the plugin and the agent may be of different versions: a field
that one side does not know is left out.
"""

from typing import Any, get_args, get_type_hints

import msgspec

from agent.records.request import EngineView, ProxyView, RequestRecord


def _struct(kind: Any, views: dict[Any, type[msgspec.Struct]]) -> type[msgspec.Struct]:
    """A struct with the fields of a named tuple, and structs in place of its views."""
    fields: list[Any] = []
    for name, hint in get_type_hints(kind).items():
        view = next((views[each] for each in get_args(hint) if each in views), None)
        value = hint if view is None else view | None
        required = name not in kind._field_defaults
        fields.append((name, value) if required else (name, value, kind._field_defaults[name]))
    return msgspec.defstruct(kind.__name__, fields, omit_defaults=True, gc=False)


_PROXY_VIEW = _struct(ProxyView, {})
_ENGINE_VIEW = _struct(EngineView, {})
_RECORD = _struct(RequestRecord, {ProxyView: _PROXY_VIEW, EngineView: _ENGINE_VIEW})

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_RECORD)


def record_bytes(record: RequestRecord) -> bytes:
    """The record as bytes. Raises TypeError, ValueError and OverflowError for what no message can
    hold."""
    proxied, engine_view = record.proxied, record.engine_view
    values = record._replace(
        proxied=None if proxied is None else _PROXY_VIEW(*proxied),  # type: ignore[arg-type]
        engine_view=None if engine_view is None else _ENGINE_VIEW(*engine_view),  # type: ignore[arg-type]
    )
    return _ENCODER.encode(_RECORD(*values))


def record_from(sent: bytes) -> RequestRecord:
    """The record in these bytes. Raises ValueError for anything else."""
    found: Any = _DECODER.decode(sent)
    proxied, engine_view = found.proxied, found.engine_view
    record = RequestRecord(*msgspec.structs.astuple(found))
    return record._replace(
        proxied=proxied and ProxyView(*msgspec.structs.astuple(proxied)),
        engine_view=engine_view and EngineView(*msgspec.structs.astuple(engine_view)),
    )
