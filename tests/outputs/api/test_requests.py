"""Lists of requests, page by page, and single ones."""

from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import NOW, chosen, unix, verdicts_of
from tests.records.making import NOON, objective, record

KEYS = {
    *("request_id", "trace_id", "span_id", "agent", "engine", "model", "service_name", "tenant"),
    *("route", "vantage", "started_at", "ended_at", "clock_skew_s", "ttft_s", "tpot_s", "e2e_s"),
    *("queue_s", "prefill_s", "decode_s", "max_gap_s", "input_tokens", "cached_tokens"),
    *("output_tokens", "reasoning_tokens", "finish_reason", "status", "http_status", "verdict"),
    *("verdicts", "cause", "cost_usd", "gpu_hours", "parent_span_id", "proxy_span_id"),
    *("first_byte_s",),
    *("first_visible_s", "gaps", "gap_tokens", "input_bytes", "output_bytes", "error", "choices"),
    *("streamed", "ttft_limit_s", "tpot_limit_s", "engine_request_id", "engine_status"),
    *("engine_ttft_s", "engine_tpot_s", "engine_e2e_s", "holdback_s", "settles_at", "counted"),
    *("prefill_flops", "prefill_kv_bytes", "decode_flops", "decode_kv_bytes", "priced_at"),
    "part",
}


def newest_first(records: list[RequestRecord]) -> list[str]:
    """Trace ids by start; of one moment, the one that was stored last comes first."""
    stored = sorted(enumerate(records), key=lambda pair: (pair[1].started_at, pair[0]))
    return [item.trace_id for _, item in reversed(stored)]


def listed(api: Api, **filters: Any) -> list[str]:
    """Trace ids of all that a list holds."""
    return [item["trace_id"] for page in api.pages("requests", **filters) for item in page]


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


@pytest.mark.parametrize("limit", [1, 7, 100, 599, 600, 1000])
def test_pages_hold_every_request_once_and_the_newest_first(
    busy: Api, records: list[RequestRecord], limit: int
) -> None:
    # Pages of one would be six hundred questions.
    after = {"started_from": iso(NOW - 30)} if limit == 1 else {}
    recent = [item for item in records if not after or item.started_at >= NOW - 30]
    pages = list(busy.pages("requests", limit=limit, **after))
    assert [item["trace_id"] for page in pages for item in page] == newest_first(recent)
    assert {len(page) for page in pages[:-1]} <= {limit}
    assert 0 < len(pages[-1]) <= limit


def test_a_page_holds_a_hundred_where_nothing_is_asked_for(busy: Api) -> None:
    assert len(busy.ask("requests")["items"]) == 100


def test_requests_that_arrive_meanwhile_push_none_out_and_repeat_none(api: Api) -> None:
    first = [record(n, started_at=NOON + n // 3) for n in range(9)]
    api.store(first, [objective()])
    pages = api.pages("requests", limit=4)
    seen = [item["trace_id"] for item in next(pages)]
    api.store([record(n, started_at=NOON + 5) for n in range(20, 30)], [objective()])
    seen += [item["trace_id"] for page in pages for item in page]
    assert seen == newest_first(first)


@pytest.mark.parametrize(
    "selection",
    [
        {"engine": "chat-0"},
        {"model": "llama"},
        {"tenant": "acme"},
        {"objective": "long"},
        {"engine": "chat-1", "model": "qwen", "tenant": "acme", "objective": "chat"},
    ],
    ids=lambda selection: ",".join(selection),
)
def test_a_selection_lists_the_requests_that_it_means(
    busy: Api, records: list[RequestRecord], selection: dict[str, str]
) -> None:
    found = listed(busy, limit=1000, **selection)
    assert found == newest_first(chosen(records, **selection))
    assert found


@pytest.mark.parametrize("verdict", ["met", "missed", "undetermined"])
@pytest.mark.parametrize("of", ["", "chat", "long"])
def test_a_verdict_is_that_of_the_objective_asked_for_or_of_all_together(
    busy: Api, records: list[RequestRecord], verdict: str, of: str
) -> None:
    wanted = [item for item in records if verdicts_of(item).get(of) == verdict]
    found = listed(busy, limit=1000, verdict=verdict, objective=of)
    assert found == newest_first(wanted)
    assert found


@pytest.mark.parametrize("status", Status)
def test_a_status_lists_the_requests_that_ended_so(
    busy: Api, records: list[RequestRecord], status: Status
) -> None:
    wanted = [item for item in records if item.status is status]
    assert listed(busy, limit=1000, status=status.value) == newest_first(wanted)


@pytest.mark.parametrize("measure", ["ttft_s", "tpot_s", "e2e_s"])
def test_a_shortest_latency_leaves_out_the_faster_and_the_unseen(
    busy: Api, records: list[RequestRecord], measure: str
) -> None:
    seen = sorted(value for item in records if (value := getattr(item, measure)) is not None)
    edge_s = seen[len(seen) // 2]
    wanted = [item for item in records if (getattr(item, measure) or 0.0) >= edge_s]
    found = listed(busy, limit=1000, **{f"min_{measure}": repr(edge_s)})
    assert found == newest_first(wanted)


def test_a_time_begins_with_its_first_moment_and_ends_before_its_last(api: Api) -> None:
    api.store([record(n, started_at=NOON + n / 4) for n in range(5)], [objective()])
    told = listed(api, started_from=iso(NOON + 0.25), started_until=iso(NOON + 0.75))
    assert told == [f"{n:032x}" for n in (2, 1)]


@pytest.mark.parametrize("zone", ["", "Z", "+00:00", "+02:00", "-11:30"])
def test_a_time_may_be_of_any_zone_and_is_utc_without_one(api: Api, zone: str) -> None:
    api.store([record(1, started_at=NOON - 1), record(2, started_at=NOON)], [objective()])
    hours = {"+02:00": 2.0, "-11:30": -11.5}.get(zone, 0.0)
    local = datetime.fromtimestamp(NOON + 3600 * hours, UTC).replace(tzinfo=None)
    assert listed(api, started_from=f"{local.isoformat()}{zone}") == [f"{2:032x}"]


@pytest.mark.parametrize(
    ("filters", "count"),
    [
        ({"started_from": "0001-01-01T00:00:00+14:00"}, 1),
        ({"started_until": "9999-12-31T23:59:59-14:00"}, 1),
        ({"started_from": "9999-12-31T23:59:59-14:00"}, 0),
        ({"started_until": "0001-01-01T00:00:00+14:00"}, 0),
        ({"min_ttft_s": "1e308"}, 0),
        ({"min_ttft_s": "inf"}, 0),
        ({"min_ttft_s": "0"}, 1),
    ],
)
def test_filters_at_the_ends_of_time_and_number_are_answered(
    api: Api, filters: dict[str, str], count: int
) -> None:
    api.store([record(1)], [objective()])
    assert len(listed(api, **filters)) == count


# Refusals


def cursor(text: str | bytes) -> str:
    return urlsafe_b64encode(text if isinstance(text, bytes) else text.encode()).decode()


FORGED: list[str | bytes] = [
    " ", "1", "1 2 3", "a b", "nan 1", "inf 1", "-inf 1", "1e300 1", "-1 1", "1 -1", "1 1e3",
    "1 1.5", "1 99999999999999999999", "1 " + "9" * 5000, "[1, 2]", "[" * 20000, b"\xff\xfe 1",
    "253402300801 1", "1\0 1",
]  # fmt: skip
HOSTILE_CURSORS = ["abc", "====", "é", "\0", " ", "AAAA", *(cursor(text) for text in FORGED)]


@pytest.mark.parametrize("given_cursor", HOSTILE_CURSORS, ids=range(len(HOSTILE_CURSORS)))
@pytest.mark.parametrize("path", ["requests", "events", "gpus/GPU-1"])
def test_a_cursor_that_no_page_gave_out_is_refused(busy: Api, path: str, given_cursor: str) -> None:
    told = busy.refusal(path, cursor=given_cursor)
    assert told == (422, "cursor: no page gave out this cursor; start without one")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=st.binary(max_size=30).map(cursor) | st.text(max_size=30))
def test_no_cursor_makes_the_api_fail(busy: Api, text: str) -> None:
    assert busy.answer("/api/v1/requests", cursor=text, limit=1).status_code in (200, 422)


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"limit": "0"}, "limit: Input should be greater than or equal to 1 (got '0')"),
        ({"limit": "1001"}, "limit: Input should be less than or equal to 1000 (got '1001')"),
        ({"limit": "many"}, "limit: Input should be a valid integer"),
        ({"limit": "-1"}, "limit: "),
        ({"verdict": "good"}, "verdict: Input should be 'met', 'missed' or 'undetermined' (got 'g"),
        ({"status": "200"}, "status: Input should be 'ok', 'error', 'timeout', 'cancelled' or"),
        ({"started_from": "yesterday"}, "started_from: Input should be a valid datetime"),
        ({"started_until": "2026-13-01"}, "started_until: Input should be a valid datetime"),
        ({"min_ttft_s": "-0.1"}, "min_ttft_s: Input should be greater than or equal to 0"),
        ({"min_tpot_s": "nan"}, "min_tpot_s: Input should be greater than or equal to 0"),
        ({"min_e2e_s": "fast"}, "min_e2e_s: Input should be a valid number"),
        ({"engine": "a\0b"}, "engine: no name holds a NUL character"),
        ({"objective": "o" * 257}, "objective: String should have at most 256 characters"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_a_filter_that_means_nothing_is_refused_with_a_sentence(
    busy: Api, filters: dict[str, str], said: str
) -> None:
    status, sentence = busy.refusal("requests", **filters)
    assert status == 422
    assert sentence.startswith(said)


def test_every_bad_parameter_is_named_at_once(busy: Api) -> None:
    _, sentence = busy.refusal("requests", limit="0", verdict="x", min_e2e_s="-1")
    assert [part.partition(":")[0] for part in sentence.split("; ")] == [
        "verdict",
        "min_e2e_s",
        "limit",
    ]


# Single requests


PROXY_VIEW: dict[str, Any] = {
    **dict.fromkeys(("first_byte_s", "first_visible_s"), 0.125),
    **dict.fromkeys(("gap_tokens", "choices"), 2),
    **dict.fromkeys(("input_bytes", "output_bytes"), 2**40),
    **dict.fromkeys(("ttft_limit_s", "tpot_limit_s"), 0.5),
    **{"error": "timeout", "streamed": False},
}
ENGINE_VIEW: dict[str, Any] = {
    **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "holdback_s"), 0.0625),
    **{"request_id": "chatcmpl-1", "status": "ok"},
}


def engine_key(name: str) -> str:
    """How the API names what the engine told of a request that the proxy saw, too."""
    return name if name == "holdback_s" else f"engine_{name}"


def test_a_request_is_told_with_everything_that_was_stored(api: Api) -> None:
    stored = record(
        1,
        service_name="vllm",
        tenant="acme",
        route="/v1/chat",
        vantage=Vantage.JOINED,
        status=Status.TIMEOUT,
        started_at=NOON + 0.123456,
        ended_at=NOON + 1.654321,
        clock_skew_s=1.5,
        max_gap_s=0.25,
        cached_tokens=64,
        reasoning_tokens=9,
        finish_reason="stop",
        http_status=504,
        cause="queue",
        cost_usd=0.25,
        parent_span_id="00f067aa0ba902b7",
        proxy_span_id="00f067aa0ba902b7",
        proxied=ProxyView(**PROXY_VIEW),
        engine_view=EngineView(**ENGINE_VIEW | {"status": Status.OK}),
    )
    api.store([stored], [objective("chat"), objective("fast", ttft_s=0.01)])
    told = api.ask("requests/request-1")
    assert told.pop("others") == []
    del told["views"]
    assert told.keys() == KEYS
    assert (told.pop("counted"), told.pop("part"), told.pop("settles_at")) == (True, False, None)
    of_windows = ("prefill_flops", "prefill_kv_bytes", "decode_flops", "decode_kv_bytes")
    assert [told.pop(name) for name in (*of_windows, "gpu_hours", "priced_at")] == [None] * 6
    assert {name: told.pop(name) for name in PROXY_VIEW} == PROXY_VIEW
    assert {name: told.pop(engine_key(name)) for name in ENGINE_VIEW} == ENGINE_VIEW
    assert told.pop("gaps") is None
    moments = {name: unix(told.pop(name)) for name in ("started_at", "ended_at")}
    assert moments == {"started_at": NOON + 0.123456, "ended_at": NOON + 1.654321}
    assert told.pop("verdicts") == {"chat": "missed", "fast": "missed"}
    assert told.pop("verdict") == "missed"
    assert told == {name: getattr(stored, name) for name in told}


def test_what_is_not_known_of_a_request_is_null(api: Api) -> None:
    unknown = {
        name: None
        for name in RequestRecord._field_defaults
        if name not in ("request_id", "clock_skew_s", "proxied", "engine_view")
    }
    api.store([record(1, **unknown)], [])
    told = api.ask("requests/request-1")
    names = {*unknown, *ProxyView._fields, *map(engine_key, EngineView._fields), "settles_at"}
    assert {told[name] for name in names} == {None}
    assert (told["verdict"], told["verdicts"]) == ("undetermined", {})


def test_clients_that_repeat_an_id_do_not_hide_each_other(api: Api) -> None:
    spans = [record(n, request_id="same", started_at=NOON + n) for n in range(3)]
    api.store([*spans, record(9)], [objective()])
    told = api.ask("requests/same")
    assert told["trace_id"] == f"{2:032x}"
    assert [other["trace_id"] for other in told["others"]] == [f"{1:032x}", f"{0:032x}"]
    assert told["others"][0].keys() == KEYS


HOSTILE_IDS = [
    "a/b", "/", "a//b", "../../etc/passwd", "a%2Fb", "100%", "größe", "日本", "a b", "?x=1", "#x",
    "<script>alert(1)</script>", "' OR 1=1 --", "\\", '"', "%00", ".", "openapi.json",
]  # fmt: skip


def test_an_id_may_be_any_text(api: Api) -> None:
    stored = [record(n, request_id=request_id) for n, request_id in enumerate(HOSTILE_IDS)]
    api.store(stored, [objective()])
    for item in stored:
        # A dot alone would be taken out of the path by any client.
        told = api.ask(f"requests/{quote(str(item.request_id), safe='').replace('.', '%2E')}")
        assert (told["request_id"], told["trace_id"]) == (item.request_id, item.trace_id)
        assert told["others"] == []
    assert {item["request_id"] for item in api.ask("requests")["items"]} == set(HOSTILE_IDS)


@pytest.mark.parametrize("request_id", ["no-such-id", "request-", "%25", "request_1", "x" * 5000])
def test_an_unknown_id_is_not_found(busy: Api, request_id: str) -> None:
    status, sentence = busy.refusal(f"requests/{request_id}")
    assert status == 404
    assert sentence.endswith("is stored")


def test_an_id_that_no_database_can_hold_is_refused(busy: Api) -> None:
    assert busy.refusal("requests/a%00b") == (
        422,
        "request_id: no name holds a NUL character (got 'a\\x00b')",
    )


def test_hostile_names_come_back_as_they_are_and_as_json(api: Api) -> None:
    name = '<img src=x onerror="alert(1)">'
    api.store([record(1, model=name, tenant=name, finish_reason=name)], [objective()])
    answer = api.answer("/api/v1/requests", model=name)
    assert answer.headers["Content-Type"] == "application/json"
    (item,) = answer.json()["items"]
    assert (item["model"], item["tenant"], item["finish_reason"]) == (name, name, name)
