"""One record of two views: which view each value comes from, and that no known value is lost."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.analysis.joined_record import joined
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.records.making import NOON, record

PROXY_SPAN = "a" * 16

seconds = st.none() | st.floats(0, 1e6)
tokens = st.none() | st.integers(0, 1000)
names = st.none() | st.sampled_from(["one", "other"])
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
PER_CHOICE = ("_tokens", "preemptions")

# Any value of either view, also values that this kind of source never has.
FACTS: dict[str, Any] = {
    **dict.fromkeys(LATENCIES, seconds),
    **dict.fromkeys(("queue_s", "prefill_s", "decode_s", "max_gap_s", "cost_usd"), seconds),
    **dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), tokens),
    "preemptions": tokens,
    **dict.fromkeys(("request_id", "agent", "engine", "model", "service_name"), names),
    **dict.fromkeys(("tenant", "route", "finish_reason", "cause"), names),
    "http_status": st.none() | st.sampled_from([200, 503]),
    "status": st.sampled_from(Status),
    "received_at": st.floats(NOON, NOON + 60),
}
proxied = st.builds(ProxyView, choices=st.none() | st.integers(1, 3), first_byte_s=seconds)
proxy_views = st.builds(
    record, vantage=st.just(Vantage.PROXY), span_id=st.just(PROXY_SPAN), proxied=proxied, **FACTS
)
engine_views = st.builds(record, parent_span_id=st.just(PROXY_SPAN), **FACTS)

# Fields that identify the view, its arrival, or exist in one view only.
_OF_ONE_PLACE = {"proxied", "proxy_span_id", "engine_view", "clock_skew_s", "received_at"}


@given(proxy_views, engine_views)
def test_no_known_value_is_lost(proxy: RequestRecord, engine: RequestRecord) -> None:
    row = joined(proxy, engine)
    assert row.engine_view is not None
    several_choices = proxy.proxied is not None and (proxy.proxied.choices or 1) > 1
    for name in set(RequestRecord._fields) - _OF_ONE_PLACE:
        proxy_value, engine_value, joined_value = (
            getattr(view, name) for view in (proxy, engine, row)
        )
        if name in LATENCIES:
            assert (joined_value, getattr(row.engine_view, name)) == (proxy_value, engine_value)
        elif name == "cause":
            # It was that of one view; both together may have another one.
            assert joined_value is None
        elif name == "max_gap_s" or (name.endswith(PER_CHOICE) and several_choices):
            assert joined_value == proxy_value
        else:
            assert (joined_value is None) == (proxy_value is None and engine_value is None)
    assert row.proxied == proxy.proxied
    assert (row.trace_id, row.span_id) == (engine.trace_id, engine.span_id)
    assert (row.parent_span_id, row.proxy_span_id) == (PROXY_SPAN, PROXY_SPAN)
    assert row.vantage is Vantage.JOINED


@settings(max_examples=20)
@given(proxy_views, engine_views, st.floats(NOON, NOON + 60), st.floats(NOON, NOON + 60))
def test_the_order_in_which_views_arrive_makes_no_difference(
    proxy: RequestRecord, engine: RequestRecord, one_at: float, other_at: float
) -> None:
    def received(at: float, then: float) -> RequestRecord:
        return joined(proxy._replace(received_at=at), engine._replace(received_at=then))

    assert received(one_at, other_at) == received(other_at, one_at)
    assert received(one_at, other_at).received_at == max(one_at, other_at)


def views(proxy_values: dict[str, Any], engine_values: dict[str, Any]) -> RequestRecord:
    """The joined record of a proxy's view and an engine's."""
    proxy: dict[str, Any] = {"vantage": Vantage.PROXY, "proxied": ProxyView(choices=1)}
    return joined(record(1, **(proxy | proxy_values)), record(1, **engine_values))


PROXYS = {
    **dict.fromkeys((*LATENCIES, "max_gap_s")),
    "status": Status.CANCELLED,
    "model": "my-adapter",
    "request_id": "mine",
    "input_tokens": 10,
    "output_tokens": 0,
    "started_at": NOON,
    "ended_at": NOON + 2.0,
    "clock_skew_s": None,
}
ENGINES = {"queue_s": 0.5, "prefill_s": 0.25, "decode_s": 0.125, "cached_tokens": 64}


def test_phases_are_the_engines_and_what_the_user_saw_is_the_proxys() -> None:
    row = views(
        {**PROXYS, **{name: value + 1 for name, value in ENGINES.items()}},
        {
            **ENGINES,
            **{"ttft_s": 0.1, "tpot_s": 0.02, "e2e_s": 1.0, "max_gap_s": 0.5},
            **{"model": "llama", "request_id": "chatcmpl-mine", "status": Status.OK},
            **{"input_tokens": 11, "output_tokens": 7},
            **{"started_at": NOON + 900.0, "ended_at": NOON + 901.0, "clock_skew_s": 900.0},
        },
    )
    expected = {**PROXYS, **ENGINES}
    assert {name: getattr(row, name) for name in expected} == expected
    assert row.engine_view == EngineView(
        request_id="chatcmpl-mine", status=Status.OK, ttft_s=0.1, tpot_s=0.02, e2e_s=1.0
    )


COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def test_a_span_wins_over_the_engines_times_in_the_response() -> None:
    in_response = {"queue_s": 0.4, "prefill_s": 0.2, "decode_s": 0.1}
    view = EngineView(status=Status.OK, ttft_s=0.6, tpot_s=0.01, e2e_s=0.7)
    row = views(
        {**in_response, "engine_view": view},
        {
            "queue_s": 0.5,
            "prefill_s": None,
            "decode_s": None,
            "ttft_s": 0.75,
            "tpot_s": 0.02,
            "e2e_s": 1.5,
        },
    )
    # What the span leaves out is known from the response.
    assert (row.queue_s, row.prefill_s, row.decode_s) == (0.5, 0.2, 0.1)
    assert row.engine_view is not None
    assert (row.engine_view.ttft_s, row.engine_view.tpot_s) == (0.75, 0.02)
    assert row.engine_view.e2e_s == 1.5


@pytest.mark.parametrize(("of_other", "of_both"), [(5, 12), (0, 7), (None, None)])
def test_a_span_without_a_count_leaves_the_tokens_of_all_choices_unknown(
    of_other: int | None, of_both: int | None
) -> None:
    unknown = {"output_tokens": None, "proxied": ProxyView(choices=2)}
    proxy = record(1, vantage=Vantage.PROXY, span_id=PROXY_SPAN, **unknown)
    spans = [record(1, output_tokens=7), record(2, output_tokens=of_other)]
    assert joined(proxy, spans[0], spans[1:]).output_tokens == of_both


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("choices", "tokens"), [(None, 7), (1, 7), (2, None)])
def test_the_tokens_of_one_of_several_choices_are_not_the_tokens_of_the_request(
    name: str, choices: int | None, tokens: int | None
) -> None:
    unknown = {name: None, "proxied": ProxyView(choices=choices)}
    assert getattr(views(unknown, {name: 7}), name) == tokens


@pytest.mark.parametrize(
    ("proxy_ttft_s", "engine_ttft_s", "holdback_s"),
    [(0.3, 0.1, 0.2), (0.1, 0.3, -0.2), (None, 0.1, None), (0.3, None, None)],
)
def test_holdback_is_the_proxy_s_ttft_minus_the_engine_s(
    proxy_ttft_s: float | None, engine_ttft_s: float | None, holdback_s: float | None
) -> None:
    row = views({"ttft_s": proxy_ttft_s}, {"ttft_s": engine_ttft_s})
    assert row.engine_view is not None
    assert row.engine_view.holdback_s == pytest.approx(holdback_s)
