"""Request id, tenant, trace context and limits from the headers."""

from hashlib import sha256

import pytest

from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.measuring.request_measuring import MeasuringOptions
from tests.sources.proxy.measuring.playing import Played, Setup

REQUEST_ID = b"x-request-id"
KEY = b"sk-0123456789abcdef"


def played_with(*headers: tuple[bytes, bytes], setup: Setup | None = None) -> Played:
    return (setup or Setup()).play("/v1/completions", {"prompt": "a"}, [], headers=headers)


def tenant(*headers: tuple[bytes, bytes], named: str | None = None) -> str | None:
    return played_with(*headers, setup=Setup(MeasuringOptions(tenant_header=named))).record.tenant


def test_the_tenant_is_a_digest_of_the_key() -> None:
    known = tenant((b"authorization", b"Bearer " + KEY))
    assert known is not None
    assert known.startswith("key-")
    assert len(known) == len("key-") + 12
    assert KEY.decode() not in known
    assert known != tenant((b"x-api-key", b"another"))
    # A plain digest of the key may be known elsewhere.
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
def test_one_key_is_one_tenant_in_any_header(headers: RawHeaders) -> None:
    assert tenant(*headers) == tenant((b"authorization", b"Bearer " + KEY))


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


def test_the_tenant_header_wins_over_the_key() -> None:
    headers = ((b"x-team", b" search "), (b"x-api-key", KEY))
    assert tenant(*headers, named="X-Team") == "search"
    assert tenant(*headers) == tenant((b"x-api-key", KEY))


@pytest.mark.parametrize("value", [b"", b"x" * 257, b"a\x00b", b"\xff\xfe"])
def test_an_unusable_tenant_header_falls_back_to_the_key(value: bytes) -> None:
    headers = ((b"x-team", value), (b"x-api-key", KEY))
    assert tenant(*headers, named="x-team") == tenant((b"x-api-key", KEY))


@pytest.mark.parametrize("value", [None, b""])
def test_a_request_without_an_id_gets_its_span_id(value: bytes | None) -> None:
    played = played_with(*(() if value is None else ((REQUEST_ID, value),)))
    assert played.record.request_id == played.record.span_id
    own = (REQUEST_ID, played.record.span_id.encode())
    assert own in played.exchange.headers
    assert played.exchange.added_headers == (own,)


@pytest.mark.parametrize("value", [b"x" * 257, b"a\x07", b"\xff"])
def test_an_unusable_id_passes_unchanged_and_the_client_gets_the_one_of_the_row(
    value: bytes,
) -> None:
    played = played_with((REQUEST_ID, value))
    assert played.record.request_id == played.record.span_id
    # What the exchange does not replace is relayed as the client sent it.
    assert REQUEST_ID not in dict(played.exchange.headers)
    assert played.exchange.added_headers == ((REQUEST_ID, played.record.span_id.encode()),)


@pytest.mark.parametrize("value", ["x" * 256, "größe", "a b"])
def test_an_id_of_up_to_256_bytes_is_that_of_the_row(value: str) -> None:
    played = played_with((REQUEST_ID, value.encode()))
    assert played.record.request_id == value
    assert REQUEST_ID not in dict(played.exchange.headers)
    assert played.exchange.added_headers == ()


def test_a_client_may_get_no_id() -> None:
    setup = Setup(MeasuringOptions(return_request_id=False))
    played = played_with(setup=setup)
    assert played.exchange.added_headers == ()
    assert (REQUEST_ID, played.record.span_id.encode()) in played.exchange.headers


def test_the_engine_gets_the_trace_context_and_the_record_its_ids() -> None:
    setup = Setup()
    played = played_with(setup=setup)
    (span,) = setup.tracing.spans
    assert set(span.headers) <= set(played.exchange.headers)
    assert (played.record.trace_id, played.record.span_id) == (span.trace_id, span.span_id)
    assert span.records == [played.record]


def test_limits_are_read_in_milliseconds_and_recorded_in_seconds() -> None:
    setup = Setup()
    headers = ((b"x-slo-ttft-ms", b"250"), (b"x-slo-tpot-ms", b" 12.5 "))
    view = played_with(*headers, setup=setup).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (0.25, 0.0125)
    assert setup.failures == []


@pytest.mark.parametrize("value", [b"", b"0", b"nan", b"inf", b"fast", b"\xff"])
def test_a_limit_that_is_not_a_positive_number_is_ignored_and_counted(value: bytes) -> None:
    setup = Setup()
    headers = ((b"x-slo-ttft-ms", value), (b"x-slo-tpot-ms", b"30"))
    view = played_with(*headers, setup=setup).view
    assert (view.ttft_limit_s, view.tpot_limit_s) == (None, 0.03)
    assert setup.failures == ["slo_header"]


# Names of users, workloads and sessions


def test_trusted_headers_name_the_user_the_workload_and_the_session() -> None:
    names = MeasuringOptions(
        user_header="X-User", workload_header="X-Job", session_header="X-Session-ID"
    )
    sent = ((b"x-user", b"ann"), (b"x-job", "größe".encode()), (b"x-session-id", b"s" * 257))
    view = Setup(names).play("/v1/chat/completions", {"model": "m"}, [], headers=sent).view
    # A name that is too long for its column is unknown.
    assert (view.end_user, view.workload, view.session) == ("ann", "größe", None)
    view = Setup().play("/v1/chat/completions", {"model": "m"}, [], headers=sent).view
    assert (view.end_user, view.workload, view.session) == (None, None, None)
