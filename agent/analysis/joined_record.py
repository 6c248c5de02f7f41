"""Joins the two views of a request, the proxy's and the engine's, into one record.

The user's view judges: latencies, timestamps and status are the proxy's alone, also where the proxy
does not know them. The engine's values of the same fields are kept beside them, in `engine_view`.
The declaration of each field in `records.request` says which view gives its value.
"""

from typing import Any

from agent.records.record_fields import Join, Mark, RecordField, fields_of
from agent.records.request import EngineView, RequestRecord, Vantage

_FIELDS = fields_of(RequestRecord)


def _joined_as(join: Join) -> list[RecordField]:
    return [field for field in _FIELDS if field.join is join]


_ENGINES = tuple(field.name for field in _joined_as(Join.ENGINE))
_IN_TURN = tuple(
    (field.name, Mark.PER_CHOICE in field.marks, field.join is Join.ENGINE_FIRST)
    for field in (*_joined_as(Join.PROXY_FIRST), *_joined_as(Join.ENGINE_FIRST))
)
_ENGINE_VIEW = tuple(
    field.name for field in fields_of(EngineView) if field.join is not Join.COMPUTED
)


def joined(proxy: RequestRecord, engine: RequestRecord) -> RequestRecord:
    """The record of the request, whichever view came first."""
    several = proxy.proxied is not None and (proxy.proxied.choices or 1) > 1
    values: dict[str, Any] = {name: getattr(engine, name) for name in _ENGINES}
    for name, per_choice, engine_first in _IN_TURN:
        of_proxy = getattr(proxy, name)
        if engine_first or of_proxy is None:
            of_engine = None if several and per_choice else getattr(engine, name)
            values[name] = of_proxy if of_engine is None else of_engine
    return proxy._replace(
        vantage=Vantage.JOINED,
        proxy_span_id=proxy.span_id,
        received_at=max(proxy.received_at, engine.received_at),
        engine_view=_engine_view(proxy, engine),
        **values,
    )


def _engine_view(proxy: RequestRecord, engine: RequestRecord) -> EngineView:
    user_s, engine_s = proxy.ttft_s, engine.ttft_s
    return EngineView(
        holdback_s=None if user_s is None or engine_s is None else user_s - engine_s,
        **{name: getattr(engine, name) for name in _ENGINE_VIEW},
    )
