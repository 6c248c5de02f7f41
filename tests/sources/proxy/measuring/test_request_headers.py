"""Who asked, and for which limits."""

from hashlib import sha256

import pytest

from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.measuring.request_measuring import MeasuringOptions
from tests.sources.proxy.measuring.playing import Desk, Played

KEY = b"sk-0123456789abcdef"


def asked_with(*headers: tuple[bytes, bytes], desk: Desk | None = None) -> Played:
    return (desk or Desk()).play("/v1/completions", {"prompt": "a"}, [], headers=headers)


def tenant(*headers: tuple[bytes, bytes], named: str | None = None) -> str | None:
    return asked_with(*headers, desk=Desk(MeasuringOptions(tenant_header=named))).record.tenant


def test_a_key_becomes_a_tenant_that_does_not_show_it() -> None:
    known = tenant((b"authorization", b"Bearer " + KEY))
    assert known is not None
    assert known.startswith("key-")
    assert len(known) == len("key-") + 12
    assert KEY.decode() not in known
    # Nor does it match a digest of the key that something else may have kept.
    assert known != "key-" + sha256(KEY).hexdigest()[:12]


@pytest.mark.parametrize(
    "headers",
    [
        ((b"authorization", b"bearer  " + KEY),),
        ((b"x-api-key", KEY),),
        ((b"x-api-key", b" " + KEY + b" "),),
        ((b"authorization", b"Basic dXNlcg=="), (b"x-api-key", KEY)),
    ],
)
def test_one_key_is_one_tenant_in_whichever_header_it_comes(headers: RawHeaders) -> None:
    assert tenant(*headers) == tenant((b"authorization", b"Bearer " + KEY))


def test_different_keys_are_different_tenants() -> None:
    assert tenant((b"x-api-key", b"one")) != tenant((b"x-api-key", b"two"))


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"authorization", b"Bearer "),),
        ((b"authorization", b"Basic dXNlcg=="),),
        ((b"x-api-key", b""),),
    ],
)
def test_without_a_key_the_tenant_is_unknown(headers: RawHeaders) -> None:
    assert tenant(*headers) is None


def test_a_header_set_for_it_names_the_tenant_before_any_key() -> None:
    headers = ((b"x-team", b" search "), (b"x-api-key", KEY))
    assert tenant(*headers, named="X-Team") == "search"
    assert tenant(*headers) == tenant((b"x-api-key", KEY))


@pytest.mark.parametrize("value", [b"", b"   ", b"x" * 257, b"a\x00b", b"\xff\xfe"])
def test_a_header_that_names_no_tenant_leaves_it_to_the_key(value: bytes) -> None:
    headers = ((b"x-team", value), (b"x-api-key", KEY))
    assert tenant(*headers, named="x-team") == tenant((b"x-api-key", KEY))


def test_the_request_id_of_the_client_is_kept_and_sent_on() -> None:
    played = asked_with((b"x-request-id", b"mine-1"))
    assert played.record.request_id == "mine-1"
    assert (b"x-request-id", b"mine-1") in played.exchange.headers


@pytest.mark.parametrize("value", [None, b"", b"x" * 257, b"a\x07", b"\xff"])
def test_a_request_without_a_usable_id_gets_that_of_its_span(value: bytes | None) -> None:
    played = asked_with(*(() if value is None else ((b"x-request-id", value),)))
    assert played.record.request_id == played.record.span_id
    assert (b"x-request-id", played.record.span_id.encode()) in played.exchange.headers


def test_the_trace_context_goes_to_the_engine_and_the_ids_to_the_record() -> None:
    desk = Desk()
    played = asked_with(desk=desk)
    (span,) = desk.tracing.spans
    assert set(span.headers) <= set(played.exchange.headers)
    assert (played.record.trace_id, played.record.span_id) == (span.trace_id, span.span_id)
    assert span.records == [played.record]


def test_limits_come_in_milliseconds_and_are_kept_in_seconds() -> None:
    desk = Desk()
    headers = ((b"x-slo-ttft-ms", b"250"), (b"x-slo-tpot-ms", b" 12.5 "))
    view = asked_with(*headers, desk=desk).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (0.25, 0.0125)
    assert desk.failures == []


def test_one_limit_says_nothing_of_the_other() -> None:
    view = asked_with((b"x-slo-tpot-ms", b"30")).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (None, 0.03)


@pytest.mark.parametrize("value", [b"", b"0", b"-5", b"nan", b"inf", b"fast", b"5ms", b"\xff"])
def test_a_limit_that_is_no_positive_number_is_ignored_and_counted(value: bytes) -> None:
    desk = Desk()
    headers = ((b"x-slo-ttft-ms", value), (b"x-slo-tpot-ms", b"30"))
    view = asked_with(*headers, desk=desk).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (None, 0.03)
    assert desk.failures == ["slo_header"]
