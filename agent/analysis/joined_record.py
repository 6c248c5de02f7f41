"""Joins the views of a request into one record: the proxy's, the engine's and its plugin's.

The user's view judges: latencies, timestamps and status are the proxy's alone, also if the proxy
does not know them. The engine's values of the same fields are kept beside them, in `engine_view`.
The declaration of each field in `records.request` says which view gives its value.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from agent.analysis.latency import tpot_s
from agent.records.engine import EndedRequest, ServedRequest
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


def is_prefill_alone(proxy: RequestRecord, span_output_tokens: int | None) -> bool:
    """Whether a span made only the first of several output tokens: another engine decoded."""
    return _choices(proxy) == 1 and span_output_tokens == 1 < (proxy.output_tokens or 0)


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
    if engine.prefill_engine is not None:
        # To the proxy, the router before both engines is the engine.
        values["engine"] = engine.engine
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


_ABORT, _ERROR = "abort", "error"

# vLLM makes the id of a request of this prefix and the header X-Request-Id. Those of the Responses
# API are random.
_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/messages": "chatcmpl-",
    "/v1/completions": "cmpl-",
}
# Of a completion, of which a request may have several prompts, and of other requests with several.
_FIRST_OF_SEVERAL = ("-0", "_0")

# A span is made of the same numbers as the plugin's record.
_SAME_S = 0.001
# An engine ends a request before its client has read all; one that was left, a little later.
_AROUND_S = 30.0


def engine_ids(record: RequestRecord) -> tuple[str, ...]:
    """The ids that the engine may have given to the request of a record, the likeliest first."""
    if record.vantage is Vantage.ENGINE:
        return () if record.request_id is None else (record.request_id,)
    own = None if record.proxied is None else record.proxied.response_id
    if own is None and record.request_id is not None:
        prefix = _PREFIXES.get(record.route or "")
        own = None if prefix is None else prefix + record.request_id
    return () if own is None else (own, *(own + suffix for suffix in _FIRST_OF_SEVERAL))


def is_same(record: RequestRecord, ended: EndedRequest) -> bool:
    """Whether an ended request with one of its ids is that of a record: clients repeat ids."""
    if record.engine != ended.engine:
        return False
    if record.vantage is Vantage.ENGINE:
        return record.output_tokens in (None, ended.output_tokens) and (
            record.e2e_s is None
            or ended.e2e_s is None
            or abs(record.e2e_s - ended.e2e_s) <= _SAME_S
        )
    return record.started_at - _AROUND_S <= ended.ended_at <= record.ended_at + _AROUND_S


def difference(record: RequestRecord, ended: EndedRequest) -> float:
    """How unlike they are, to choose among several that may be the same, such as choices."""
    if record.vantage is not Vantage.ENGINE:
        return abs(record.ended_at - ended.ended_at)
    pairs = (
        (record.queue_s, ended.queue_s),
        (record.prefill_s, ended.prefill_s),
        (record.decode_s, ended.decode_s),
    )
    return sum(abs(one - other) for one, other in pairs if one is not None and other is not None)


def with_figures(record: RequestRecord, ended: Sequence[EndedRequest]) -> RequestRecord:
    """The record with the engine's figures. `ended` has one for each choice that was found.

    What the user saw stays: latencies, status, and tokens that were in the response.
    """
    first = ended[0]
    if record.vantage is Vantage.ENGINE:
        return record._replace(
            status=Status.ERROR if first.finish_reason == _ERROR else record.status,
            **_phases(record, first),
            preemptions=first.preemptions,
            cached_tokens=_or(first.cached_tokens, record.cached_tokens),
            finish_reason=first.finish_reason,
        )
    choices = 1 if record.proxied is None else record.proxied.choices or 1
    if choices > 1:
        return record if len(ended) < choices else _with_sums(record, ended)
    return record._replace(
        **_phases(record, first),
        preemptions=first.preemptions,
        cached_tokens=_or(first.cached_tokens, record.cached_tokens),
        input_tokens=_or(record.input_tokens, first.input_tokens),
        output_tokens=_or(record.output_tokens, first.output_tokens),
        finish_reason=_or(record.finish_reason, first.finish_reason),
        engine_view=_view(record, first),
    )


def own_record(
    ended: EndedRequest, *, agent: str, model: str | None, received_at: float
) -> RequestRecord:
    """The record of a request that nothing but the plugin reported.

    Its ids are made of its figures, so that it has one row however often it is stored.
    """
    identity = f"{ended.engine}\0{ended.request_id}\0{ended.ended_at!r}\0{ended.queue_s!r}"
    digest = hashlib.blake2b(identity.encode(), digest_size=24).hexdigest()
    return RequestRecord(
        trace_id=digest[:32],
        span_id=digest[32:],
        vantage=Vantage.ENGINE,
        status=_status(ended),
        started_at=ended.ended_at - (ended.e2e_s or 0.0),
        ended_at=ended.ended_at,
        received_at=received_at,
        request_id=ended.request_id,
        agent=agent,
        engine=ended.engine,
        model=model,
        ttft_s=ended.ttft_s,
        tpot_s=tpot_s(ended.decode_s, ended.output_tokens),
        e2e_s=ended.e2e_s,
        queue_s=ended.queue_s,
        prefill_s=ended.prefill_s,
        decode_s=ended.decode_s,
        input_tokens=ended.input_tokens,
        cached_tokens=ended.cached_tokens,
        output_tokens=ended.output_tokens,
        finish_reason=ended.finish_reason,
        preemptions=ended.preemptions,
    )


def served_row(served: ServedRequest) -> RequestRecord:
    """The record of a request that the middleware in its engine's front saw.

    With the engine's figures it is joined: both views are of one request, since one process sent
    them. No span of the engine is needed, so the engine's span id is made up.
    """
    record = served.record
    if not served.choices:
        return record
    first = served.choices[0]
    whole = with_figures(record, served.choices)
    if len(served.choices) > _choices(record):
        # The turns of a response: the phases are those of the first one.
        whole = whole._replace(
            decode_s=None, preemptions=sum(each.preemptions for each in served.choices)
        )
    view = EngineView(request_id=first.request_id, status=_status(first))
    return whole._replace(
        vantage=Vantage.JOINED,
        span_id=_made_span_id(record.span_id, first.request_id),
        proxy_span_id=record.span_id,
        parent_span_id=record.parent_span_id or record.span_id,
        engine_view=whole.engine_view or view,
    )


def is_from_front(span_id: str, proxy_span_id: str | None, engine_request_id: str | None) -> bool:
    """Whether a row with these ids was made by `served_row`: no proxy and no span of it exist."""
    if proxy_span_id is None or engine_request_id is None:
        return False
    return span_id == _made_span_id(proxy_span_id, engine_request_id)


def _made_span_id(proxy_span_id: str, engine_request_id: str) -> str:
    identity = f"{proxy_span_id}\0{engine_request_id}"
    return hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()


def _status(ended: EndedRequest) -> Status:
    return {_ABORT: Status.CANCELLED, _ERROR: Status.ERROR}.get(ended.finish_reason, Status.OK)


def _phases(record: RequestRecord, ended: EndedRequest) -> dict[str, Any]:
    return {
        name: _or(getattr(ended, name), getattr(record, name))
        for name in ("queue_s", "prefill_s", "decode_s")
    }


def _view(record: RequestRecord, ended: EndedRequest) -> EngineView:
    user_s, engine_s = record.ttft_s, ended.ttft_s
    return EngineView(
        request_id=ended.request_id,
        status=_status(ended),
        ttft_s=engine_s,
        tpot_s=tpot_s(ended.decode_s, ended.output_tokens),
        e2e_s=ended.e2e_s,
        holdback_s=None if user_s is None or engine_s is None else user_s - engine_s,
    )


def _with_sums(record: RequestRecord, ended: Sequence[EndedRequest]) -> RequestRecord:
    """Of several choices, only their sums are the request's."""
    return record._replace(
        preemptions=sum(each.preemptions for each in ended),
        output_tokens=_or(record.output_tokens, sum(each.output_tokens for each in ended)),
    )


def _or(value: Any, other: Any) -> Any:
    return other if value is None else value
