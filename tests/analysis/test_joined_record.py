"""One record of two views: what is whose word, and that nothing known is lost."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.joined_record import joined
from agent.records.record_fields import Join, Length, Mark, RecordField, UtcSeconds, fields_of
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.records.making import NOON, record

PROXY_SPAN = "a" * 16

seconds = st.none() | st.floats(0, 1e6)
tokens = st.none() | st.integers(0, 1000)
names = st.none() | st.sampled_from(["one", "other"])
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")

# Any value of either view; what each kind of source never tells may be there all the same.
FACTS: dict[str, Any] = {
    **dict.fromkeys(LATENCIES, seconds),
    **dict.fromkeys(("queue_s", "prefill_s", "decode_s", "max_gap_s", "cost_usd"), seconds),
    **dict.fromkeys(("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"), tokens),
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

# What tells which view it is, when it came, or is of one place alone.
_OF_ONE_PLACE = {"proxied", "proxy_span_id", "engine_view", "clock_skew_s", "received_at"}


@given(proxy_views, engine_views)
def test_nothing_that_is_known_is_lost(proxy: RequestRecord, engine: RequestRecord) -> None:
    one = joined(proxy, engine)
    assert one.engine_view is not None
    several = proxy.proxied is not None and (proxy.proxied.choices or 1) > 1
    for name in set(RequestRecord._fields) - _OF_ONE_PLACE:
        seen, told, kept = (getattr(view, name) for view in (proxy, engine, one))
        if name in LATENCIES:
            assert (kept, getattr(one.engine_view, name)) == (seen, told)
        elif name == "max_gap_s" or (name.endswith("_tokens") and several):
            assert kept == seen
        else:
            assert (kept is None) == (seen is None and told is None)
    assert one.proxied == proxy.proxied


@given(proxy_views, engine_views)
def test_a_request_is_known_by_the_engines_span_and_by_the_proxys(
    proxy: RequestRecord, engine: RequestRecord
) -> None:
    one = joined(proxy, engine)
    assert (one.trace_id, one.span_id, one.parent_span_id, one.proxy_span_id) == (
        engine.trace_id,
        engine.span_id,
        PROXY_SPAN,
        PROXY_SPAN,
    )
    assert one.vantage is Vantage.JOINED


@given(proxy_views, engine_views, st.floats(NOON, NOON + 60), st.floats(NOON, NOON + 60))
def test_which_view_came_first_makes_no_difference(
    proxy: RequestRecord, engine: RequestRecord, one_at: float, other_at: float
) -> None:
    def received(at: float, then: float) -> RequestRecord:
        return joined(proxy._replace(received_at=at), engine._replace(received_at=then))

    assert received(one_at, other_at) == received(other_at, one_at)
    assert received(one_at, other_at).received_at == max(one_at, other_at)


def views(seen: dict[str, Any], told: dict[str, Any]) -> RequestRecord:
    """The joined record of a proxy's view and an engine's."""
    proxy: dict[str, Any] = {"vantage": Vantage.PROXY, "proxied": ProxyView(choices=1)}
    return joined(record(1, **(proxy | seen)), record(1, **told))


def test_the_users_latencies_are_never_the_engines() -> None:
    unseen = dict.fromkeys((*LATENCIES, "max_gap_s"))
    one = views(unseen, {"ttft_s": 0.1, "tpot_s": 0.02, "e2e_s": 1.0, "max_gap_s": 0.5})
    assert {name: getattr(one, name) for name in unseen} == unseen
    assert one.engine_view == EngineView(
        request_id="request-1", status=Status.OK, ttft_s=0.1, tpot_s=0.02, e2e_s=1.0
    )


@pytest.mark.parametrize("seen", Status)
@pytest.mark.parametrize("told", [Status.OK, Status.ERROR])
def test_how_it_ended_is_what_the_user_got_and_the_engines_word_is_kept(
    seen: Status, told: Status
) -> None:
    one = views({"status": seen}, {"status": told})
    assert one.status is seen
    assert one.engine_view is not None
    assert one.engine_view.status is told


def test_moments_are_the_proxys_and_the_engines_clock_does_not_concern_them() -> None:
    one = views(
        {"started_at": NOON, "ended_at": NOON + 2.0},
        {"started_at": NOON + 900.0, "ended_at": NOON + 901.0, "clock_skew_s": 900.0},
    )
    assert (one.started_at, one.ended_at, one.clock_skew_s) == (NOON, NOON + 2.0, None)


def test_where_both_know_a_name_or_a_count_it_is_what_the_user_asked_for_and_was_told() -> None:
    one = views(
        {"model": "my-adapter", "request_id": "mine", "input_tokens": 10, "output_tokens": 0},
        {"model": "llama", "request_id": "chatcmpl-mine", "input_tokens": 11, "output_tokens": 7},
    )
    assert (one.model, one.request_id, one.input_tokens, one.output_tokens) == (
        "my-adapter",
        "mine",
        10,
        0,
    )
    assert one.engine_view is not None
    assert one.engine_view.request_id == "chatcmpl-mine"


def test_the_phases_inside_the_engine_are_the_engines() -> None:
    phases = {"queue_s": 0.5, "prefill_s": 0.25, "decode_s": 0.125, "cached_tokens": 64}
    other = {name: value + 1 for name, value in phases.items()}
    one = views(other, phases)
    assert {name: getattr(one, name) for name in phases} == phases


COUNTS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("choices", "tokens"), [(None, 7), (1, 7), (2, None)])
def test_the_tokens_of_one_of_several_choices_are_not_those_of_the_request(
    name: str, choices: int | None, tokens: int | None
) -> None:
    unknown = {name: None, "proxied": ProxyView(choices=choices)}
    assert getattr(views(unknown, {name: 7}), name) == tokens


@pytest.mark.parametrize(
    ("seen_s", "told_s", "holdback_s"),
    [(0.3, 0.1, 0.2), (0.1, 0.3, -0.2), (None, 0.1, None), (0.3, None, None)],
)
def test_holdback_is_what_lies_between_the_engines_first_token_and_the_users(
    seen_s: float | None, told_s: float | None, holdback_s: float | None
) -> None:
    one = views({"ttft_s": seen_s}, {"ttft_s": told_s})
    assert one.engine_view is not None
    assert one.engine_view.holdback_s == pytest.approx(holdback_s)


EXAMPLES: dict[object, Any] = {float: 0.5, int: 7, str: "x", bool: True, Status: Status.ERROR}
# The same in both views, of the proxy's clock, or a gap as only the proxy measures it.
_NOT_TAKEN = {"trace_id", "vantage", "proxy_span_id", "max_gap_s"}
_NOT_TAKEN |= {"started_at", "ended_at", "clock_skew_s"}


@pytest.mark.parametrize(
    "field",
    [each for each in fields_of(RequestRecord) if each.name not in _NOT_TAKEN and not each.is_view],
    ids=lambda field: str(field.name),
)
def test_a_value_that_only_the_engine_knows_is_in_the_joined_record_or_in_its_engine_view(
    field: RecordField,
) -> None:
    """Also of fields that are declared later: the join reads the declaration."""
    value = NOON + 9.0 if field.is_timestamp else EXAMPLES[field.type]
    unknown = {field.name: None} if field.nullable else {}
    one = views(unknown, {field.name: value})
    assert value in (getattr(one, field.name), getattr(one.engine_view, field.name, None))


class Declared(NamedTuple):
    """A record with a field of each kind."""

    plain: float | None = None
    name: Annotated[str | None, Length(100)] = None
    at: Annotated[UtcSeconds, Join.PROXY] = 0.0
    tokens: Annotated[int | None, Mark.PER_CHOICE, Join.ENGINE_FIRST] = None
    bins: Mapping[int, int] | None = None


def test_a_field_is_declared_by_its_type_and_its_marks_alone() -> None:
    plain, name, at, tokens, bins = fields_of(Declared)
    assert (plain.type, plain.nullable, plain.join) == (float, True, Join.PROXY_FIRST)
    assert (name.type, name.length, plain.length) == (str, 100, None)
    assert (at.is_timestamp, at.nullable, at.join) == (True, False, Join.PROXY)
    assert (tokens.join, tokens.marks) == (Join.ENGINE_FIRST, frozenset({Mark.PER_CHOICE}))
    assert (bins.is_mapping, name.is_mapping) == (True, False)
