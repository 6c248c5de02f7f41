"""Joins the two views of a request, the proxy's and the engine's, into one record.

The user's view judges: latencies, timestamps and status are the proxy's alone, also where the proxy
does not know them. The engine's values of the same fields are kept beside them, in `engine_view`.
The declaration of each field in `records.request` says which view gives its value.
"""

from collections.abc import Sequence
from typing import Any

from agent.records.record_fields import Join, Mark, RecordField, fields_of
from agent.records.request import EngineView, RequestRecord, Status, Vantage

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


# With one prompt, each span of its choices has all of the prompt's tokens.
_ONE_PROMPT = frozenset(("/v1/chat/completions",))


def awaits_choices(proxy: RequestRecord, spans: int) -> bool:
    """Whether the request's tokens are unknown until more spans of the engine have come."""
    lacks_tokens = proxy.status is Status.OK and proxy.output_tokens is None
    return lacks_tokens and spans < _choices(proxy) != 1


def joined(
    proxy: RequestRecord, engine: RequestRecord, others: Sequence[RequestRecord] = ()
) -> RequestRecord:
    """The record of the request, whichever view came first.

    `others` are the engine's spans of the request's other choices: its tokens are the sum of all.
    """
    choices = _choices(proxy)
    several = choices > 1
    of_choices = _tokens_of(proxy, (engine, *others)) if len(others) + 1 == choices > 1 else {}
    values: dict[str, Any] = {name: getattr(engine, name) for name in _ENGINES}
    for name, per_choice, engine_first in _IN_TURN:
        of_proxy = getattr(proxy, name)
        if engine_first or of_proxy is None:
            alone = not (several and per_choice)
            of_engine = getattr(engine, name) if alone else of_choices.get(name)
            values[name] = of_proxy if of_engine is None else of_engine
    return proxy._replace(
        vantage=Vantage.JOINED,
        proxy_span_id=proxy.span_id,
        received_at=max(proxy.received_at, engine.received_at),
        engine_view=_engine_view(proxy, engine),
        # It is explained anew, by both views.
        cause=None,
        **values,
    )


def _choices(proxy: RequestRecord) -> int:
    return 1 if proxy.proxied is None else proxy.proxied.choices or 1


def _tokens_of(proxy: RequestRecord, spans: Sequence[RequestRecord]) -> dict[str, int | None]:
    """The tokens of a request by the spans of all its choices."""
    prompts = {span.input_tokens for span in spans}
    return {
        "input_tokens": prompts.pop() if len(prompts) == 1 and proxy.route in _ONE_PROMPT else None,
        "output_tokens": _sum([span.output_tokens for span in spans]),
        "reasoning_tokens": _sum([span.reasoning_tokens for span in spans]),
    }


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _engine_view(proxy: RequestRecord, engine: RequestRecord) -> EngineView:
    user_s, engine_s = proxy.ttft_s, engine.ttft_s
    return EngineView(
        holdback_s=None if user_s is None or engine_s is None else user_s - engine_s,
        **{name: getattr(engine, name) for name in _ENGINE_VIEW},
    )
