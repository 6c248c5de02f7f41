"""One record of the two views of a request: the proxy's, and that of the engine behind it.

The user's view judges: latencies, moments and how it ended are the proxy's alone, also where the
proxy does not know them. What the engine told of the same is kept beside them. What only the engine
can see is the engine's: queue, prefill, decode, cached tokens. Where both know a name or a count,
the proxy's word counts: it is what the user asked for and was told.
"""

from typing import Any

from agent.records.request import EngineView, RequestRecord, Vantage


def joined(proxy: RequestRecord, engine: RequestRecord) -> RequestRecord:
    """The record of the request, whichever view came first.

    Of several choices (`n` > 1, or several prompts) an engine's span is one part, so its counts of
    tokens are not those of the request. The clock skew of an engine does not concern the proxy's
    moments.
    """
    several = proxy.proxied is not None and (proxy.proxied.choices or 1) > 1
    counts = proxy if several else engine
    return proxy._replace(
        span_id=engine.span_id,
        parent_span_id=engine.parent_span_id,
        proxy_span_id=proxy.span_id,
        vantage=Vantage.JOINED,
        received_at=max(proxy.received_at, engine.received_at),
        engine_view=_engine_view(proxy, engine),
        **{name: _first(getattr(proxy, name), getattr(engine, name)) for name in _PROXYS_FIRST},
        **{name: _first(getattr(engine, name), getattr(proxy, name)) for name in _ENGINES_FIRST},
        **{name: _first(getattr(proxy, name), getattr(counts, name)) for name in _COUNTED_BY_PART},
        cached_tokens=_first(counts.cached_tokens, proxy.cached_tokens),
    )


_PROXYS_FIRST = (
    *("request_id", "agent", "engine", "model", "service_name", "tenant", "route"),
    *("finish_reason", "http_status", "cause", "cost_usd"),
)
_ENGINES_FIRST = ("queue_s", "prefill_s", "decode_s")
_COUNTED_BY_PART = ("input_tokens", "output_tokens", "reasoning_tokens")


def _first(value: Any, other: Any) -> Any:
    return other if value is None else value


def _engine_view(proxy: RequestRecord, engine: RequestRecord) -> EngineView:
    seen_s, told_s = proxy.ttft_s, engine.ttft_s
    return EngineView(
        request_id=engine.request_id,
        status=engine.status,
        ttft_s=engine.ttft_s,
        tpot_s=engine.tpot_s,
        e2e_s=engine.e2e_s,
        holdback_s=None if seen_s is None or told_s is None else seen_s - told_s,
    )
