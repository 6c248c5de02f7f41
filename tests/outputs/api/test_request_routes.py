"""Lists of requests in pages, and single requests."""

from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest

from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import NOW, chosen, unix, verdicts_of
from tests.records.making import NOON, objective, record


def newest_first(records: list[RequestRecord]) -> list[str]:
    """Return trace ids, latest start first; of equal starts, the last stored first."""
    stored = sorted(enumerate(records), key=lambda pair: (pair[1].started_at, pair[0]))
    return [item.trace_id for _, item in reversed(stored)]


def listed(api: Api, **filters: Any) -> list[str]:
    """Return the trace ids of all pages of a list."""
    return [item["trace_id"] for page in api.pages("requests", **filters) for item in page]


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


@pytest.mark.parametrize("limit", [1, 7, 100, 599, 600, 1000])
def test_pages_hold_every_request_once_and_the_newest_first(
    busy: Api, records: list[RequestRecord], limit: int
) -> None:
    # Pages of one item would need six hundred queries.
    after = {"started_from": iso(NOW - 30)} if limit == 1 else {}
    recent = [item for item in records if not after or item.started_at >= NOW - 30]
    pages = list(busy.pages("requests", limit=limit, **after))
    assert [item["trace_id"] for page in pages for item in page] == newest_first(recent)
    assert {len(page) for page in pages[:-1]} <= {limit}
    assert 0 < len(pages[-1]) <= limit


def test_a_page_holds_a_hundred_items_by_default(busy: Api) -> None:
    assert len(busy.query("requests")["items"]) == 100


def test_requests_stored_between_pages_hide_and_repeat_none(api: Api) -> None:
    first = [record(n, started_at=NOON + n // 3) for n in range(9)]
    api.store(first, [objective()])
    pages = api.pages("requests", limit=4)
    trace_ids = [item["trace_id"] for item in next(pages)]
    api.store([record(n, started_at=NOON + 5) for n in range(20, 30)], [objective()])
    trace_ids += [item["trace_id"] for page in pages for item in page]
    assert trace_ids == newest_first(first)


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
def test_a_selection_lists_exactly_its_requests(
    busy: Api, records: list[RequestRecord], selection: dict[str, str]
) -> None:
    found = listed(busy, limit=1000, **selection)
    assert found == newest_first(chosen(records, **selection))
    assert found


@pytest.mark.parametrize("verdict", ["met", "missed", "undetermined"])
@pytest.mark.parametrize("name", ["", "chat", "long"])
def test_a_verdict_is_that_of_the_objective_or_the_overall_one(
    busy: Api, records: list[RequestRecord], verdict: str, name: str
) -> None:
    expected = [item for item in records if verdicts_of(item).get(name) == verdict]
    found = listed(busy, limit=1000, verdict=verdict, objective=name)
    assert found == newest_first(expected)
    assert found


@pytest.mark.parametrize("status", Status)
def test_a_status_lists_exactly_its_requests(
    busy: Api, records: list[RequestRecord], status: Status
) -> None:
    expected = [item for item in records if item.status is status]
    assert listed(busy, limit=1000, status=status.value) == newest_first(expected)


@pytest.mark.parametrize("latency", ["ttft", "tpot", "e2e"])
def test_the_worst_of_all_that_match_come_first(
    busy: Api, records: list[RequestRecord], latency: str
) -> None:
    worst = {item.trace_id: getattr(item, f"{latency}_s") for item in chosen(records, model="qwen")}
    known = sorted((value for value in worst.values() if value is not None), reverse=True)
    page = busy.query("requests", worst=latency, model="qwen", limit=20)
    assert [worst[item["trace_id"]] for item in page["items"]] == known[:20]
    assert page["next"] is None


def test_limits_on_input_length_include_their_edges(
    busy: Api, records: list[RequestRecord]
) -> None:
    lengths = sorted(item.input_tokens for item in records if item.input_tokens is not None)
    low, high = lengths[len(lengths) // 4], lengths[len(lengths) // 2]
    expected = [item for item in records if low <= (item.input_tokens or -1) <= high]
    found = listed(busy, limit=1000, min_input_tokens=low, max_input_tokens=high)
    assert found == newest_first(expected)
    assert found


@pytest.mark.parametrize("measure", ["ttft_s", "tpot_s", "e2e_s"])
def test_a_lower_limit_on_latency_omits_faster_and_unknown_ones(
    busy: Api, records: list[RequestRecord], measure: str
) -> None:
    known = sorted(value for item in records if (value := getattr(item, measure)) is not None)
    limit_s = known[len(known) // 2]
    expected = [item for item in records if (getattr(item, measure) or 0.0) >= limit_s]
    found = listed(busy, limit=1000, **{f"min_{measure}": repr(limit_s)})
    assert found == newest_first(expected)


def test_a_time_range_includes_its_start_and_excludes_its_end(api: Api) -> None:
    api.store([record(n, started_at=NOON + n / 4) for n in range(5)], [objective()])
    found = listed(api, started_from=iso(NOON + 0.25), started_until=iso(NOON + 0.75))
    assert found == [f"{n:032x}" for n in (2, 1)]


def test_a_time_may_have_any_zone_and_is_utc_by_default(api: Api) -> None:
    api.store([record(1, started_at=NOON - 1), record(2, started_at=NOON)], [objective()])
    for zone, hours in {"": 0.0, "Z": 0.0, "+00:00": 0.0, "+02:00": 2.0, "-11:30": -11.5}.items():
        local = datetime.fromtimestamp(NOON + 3600 * hours, UTC).replace(tzinfo=None)
        assert listed(api, started_from=f"{local.isoformat()}{zone}") == [f"{2:032x}"], zone


def test_extreme_times_and_numbers_are_accepted(api: Api) -> None:
    api.store([record(1)], [objective()])
    for name, value, count in (
        ("started_from", "0001-01-01T00:00:00+14:00", 1),
        ("started_until", "9999-12-31T23:59:59-14:00", 1),
        ("started_from", "9999-12-31T23:59:59-14:00", 0),
        ("started_until", "0001-01-01T00:00:00+14:00", 0),
        ("min_ttft_s", "1e308", 0),
        ("min_ttft_s", "inf", 0),
        ("min_ttft_s", "0", 1),
    ):
        assert len(listed(api, **{name: value})) == count, (name, value)


# Refusals


def cursor(text: str | bytes) -> str:
    return urlsafe_b64encode(text if isinstance(text, bytes) else text.encode()).decode()


FORGED: list[str | bytes] = [
    " ", "1", "1 2 3", "a b", "nan 1", "inf 1", "-inf 1", "1e300 1", "-1 1", "1 -1", "1 1e3",
    "1 1.5", "1 99999999999999999999", "1 " + "9" * 5000, "[1, 2]", "[" * 20000, b"\xff\xfe 1",
    "253402300801 1", "1\0 1",
]  # fmt: skip
HOSTILE_CURSORS = ["abc", "====", "é", "\0", " ", "AAAA", *(cursor(text) for text in FORGED)]


@pytest.mark.parametrize(
    ("path", "cursors"),
    [
        ("requests", HOSTILE_CURSORS),
        ("events", HOSTILE_CURSORS[-3:]),
        ("gpus/GPU-1", HOSTILE_CURSORS[-3:]),
    ],
    ids=["requests", "events", "gpus"],
)
def test_a_forged_cursor_is_refused(busy: Api, path: str, cursors: list[str]) -> None:
    for forged in cursors:
        refusal = busy.refusal(path, cursor=forged)
        assert refusal == (422, "cursor: no page gave out this cursor; start without one"), forged


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ({"limit": "0"}, "limit: Input should be greater than or equal to 1 (got '0')"),
        ({"limit": "1001"}, "limit: Input should be less than or equal to 1000 (got '1001')"),
        ({"limit": "many"}, "limit: Input should be a valid integer"),
        ({"limit": "-1"}, "limit: "),
        ({"verdict": "good"}, "verdict: Input should be 'met', 'missed' or 'undetermined' (got 'g"),
        ({"status": "200"}, "status: Input should be 'ok', 'error', 'timeout', 'cancelled', 'thro"),
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
def test_an_invalid_filter_is_refused_with_a_sentence(
    busy: Api, filters: dict[str, str], reason: str
) -> None:
    status, sentence = busy.refusal("requests", **filters)
    assert status == 422
    assert sentence.startswith(reason)


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
    **{"error": "timeout", "streamed": False, "response_id": "resp_1"},
    **{"requested_model": "lama", "requested_tenant": "someone", "reasoning_s": 0.75},
    **{"media_parts": 2, "media_bytes": 2**40, "priority": -7},
    **{"end_user": "u-1", "workload": "batch", "session": "s-1"},
}
ENGINE_VIEW: dict[str, Any] = {
    **dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "holdback_s"), 0.0625),
    **{"request_id": "chatcmpl-1", "status": "ok"},
}


def engine_key(name: str) -> str:
    """Return the API field of a value in `EngineView`."""
    return name if name == "holdback_s" else f"engine_{name}"


def engine_phases_s(item: dict[str, float]) -> float:
    """Queue, prefill and decode together."""
    return sum(item[f"{name}_s"] for name in ("queue", "prefill", "decode"))


_LATER = (
    *("prefill_flops", "prefill_kv_bytes", "decode_flops", "decode_kv_bytes"),
    *("gpu_hours", "priced_at", "explained_at"),
)
# Fields of a record that a response has under other names, or not at all.
_NOT_SHOWN = {"proxied", "engine_view", "received_at"}


def test_a_request_has_every_stored_value(api: Api) -> None:
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
    item = api.query("requests/request-1")
    assert (item.pop("others"), item.pop("explanation")) == ([], None)
    del item["views"]
    assert set(RequestRecord._fields) - _NOT_SHOWN <= item.keys()
    assert (item.pop("counted"), item.pop("part"), item.pop("settles_at")) == (True, False, None)
    assert [item.pop(name) for name in _LATER] == [None] * 7
    assert {name: item.pop(name) for name in PROXY_VIEW} == PROXY_VIEW
    assert {name: item.pop(engine_key(name)) for name in ENGINE_VIEW} == ENGINE_VIEW
    assert item.pop("gaps") is None
    front_and_rest_s = item.pop("front_s") + item.pop("rest_s")
    assert engine_phases_s(item) + front_and_rest_s == pytest.approx(stored.e2e_s)
    times = {name: unix(item.pop(name)) for name in ("started_at", "ended_at")}
    assert times == {"started_at": NOON + 0.123456, "ended_at": NOON + 1.654321}
    assert item.pop("verdicts") == {"chat": "missed", "fast": "missed"}
    assert item.pop("verdict") == "missed"
    assert item == {name: getattr(stored, name) for name in item}


def test_unknown_values_of_a_request_are_null(api: Api) -> None:
    unknown = {
        name: None
        for name in RequestRecord._field_defaults
        if name not in ("request_id", "clock_skew_s", "proxied", "engine_view")
    }
    api.store([record(1, **unknown)], [])
    item = api.query("requests/request-1")
    names = {*unknown, *ProxyView._fields, *map(engine_key, EngineView._fields), "settles_at"}
    assert {item[name] for name in names} == {None}
    assert (item["verdict"], item["verdicts"]) == ("undetermined", {})


def test_requests_with_the_same_id_are_all_returned(api: Api) -> None:
    spans = [record(n, request_id="same", started_at=NOON + n) for n in range(3)]
    api.store([*spans, record(9)], [objective()])
    item = api.query("requests/same")
    assert item["trace_id"] == f"{2:032x}"
    assert [other["trace_id"] for other in item["others"]] == [f"{1:032x}", f"{0:032x}"]
    assert item["others"][0].keys() < item.keys()


def test_a_response_with_the_engines_times_has_both_views_without_a_span(api: Api) -> None:
    view = EngineView(status=Status.OK, ttft_s=0.0625, tpot_s=0.25, e2e_s=0.5)
    of_proxy = record(1, vantage=Vantage.PROXY, proxied=ProxyView(), engine_view=view)
    without = record(2, vantage=Vantage.PROXY, proxied=ProxyView())
    api.store([of_proxy, without], [])
    views = api.query("requests/request-1")["views"]
    assert views["proxy"]["span_id"] == of_proxy.span_id
    assert views["engine"] == {
        **{"request_id": None, "span_id": None, "status": "ok"},
        **{"ttft_s": 0.0625, "tpot_s": 0.25, "e2e_s": 0.5},
    }
    assert api.query("requests/request-2")["views"]["engine"] is None


def test_requests_are_found_by_what_their_clients_said(api: Api) -> None:
    said = [
        ProxyView(end_user="ann", workload="nightly", session="s-1", priority=0),
        ProxyView(end_user="ann", workload="chat", session="s-2", priority=-1),
        ProxyView(end_user="bob", workload="chat", session="s-3"),
    ]
    api.store(
        [record(n, vantage=Vantage.PROXY, proxied=view) for n, view in enumerate(said, start=1)], []
    )

    def found(**filters: str) -> set[str]:
        return {item["request_id"] for item in api.query("requests", **filters)["items"]}

    assert found(user="ann") == {"request-1", "request-2"}
    assert found(workload="chat") == {"request-2", "request-3"}
    assert found(session="s-3") == {"request-3"}
    assert found(priority="0") == {"request-1"}
    assert found(user="ann", workload="chat") == {"request-2"}
    assert api.refusal("requests", priority=str(2**31))[0] == 422


HOSTILE_IDS = [
    "a/b", "/", "a//b", "../../etc/passwd", "a%2Fb", "100%", "größe", "日本", "a b", "?x=1", "#x",
    "<script>alert(1)</script>", "' OR 1=1 --", "\\", '"', "%00", ".", "openapi.json",
]  # fmt: skip


def test_an_id_may_be_any_text(api: Api) -> None:
    stored = [record(n, request_id=request_id) for n, request_id in enumerate(HOSTILE_IDS)]
    api.store(stored, [objective()])
    for item in stored:
        # HTTP clients remove a single dot from a path.
        body = api.query(f"requests/{quote(str(item.request_id), safe='').replace('.', '%2E')}")
        assert (body["request_id"], body["trace_id"]) == (item.request_id, item.trace_id)
        assert body["others"] == []
    assert {item["request_id"] for item in api.query("requests")["items"]} == set(HOSTILE_IDS)


@pytest.mark.parametrize("request_id", ["no-such-id", "request-", "%25", "request_1", "x" * 5000])
def test_an_unknown_id_is_not_found(busy: Api, request_id: str) -> None:
    status, sentence = busy.refusal(f"requests/{request_id}")
    assert status == 404
    assert sentence.endswith("is stored")


def test_an_id_with_a_nul_character_is_refused(busy: Api) -> None:
    assert busy.refusal("requests/a%00b") == (
        422,
        "request_id: no name holds a NUL character (got 'a\\x00b')",
    )


def test_hostile_names_are_returned_unchanged_as_json(api: Api) -> None:
    name = '<img src=x onerror="alert(1)">'
    api.store([record(1, model=name, tenant=name, finish_reason=name)], [objective()])
    response = api.get("/api/v1/requests", model=name)
    assert response.headers["Content-Type"] == "application/json"
    (item,) = response.json()["items"]
    assert (item["model"], item["tenant"], item["finish_reason"]) == (name, name, name)


def test_a_span_tells_which_request_with_an_id_is_meant(api: Api) -> None:
    """Also if the newest hundred requests with this id are others."""
    api.store([record(n, request_id="same", started_at=NOON + n) for n in range(150)], [])
    for number in range(3):
        item = api.query("requests/same", span_id=f"{number:016x}")
        assert item["trace_id"] == f"{number:032x}"
        assert len(item["others"]) == 99
    missing = api.get("/api/v1/requests/same", span_id="f" * 16)
    assert missing.status_code == 404
    assert missing.json()["detail"] == f"no request 'same' with the span '{'f' * 16}' is stored"


def test_the_span_of_the_proxy_finds_the_joined_request(api: Api) -> None:
    seen = {"proxy_span_id": "a" * 16, "engine_view": EngineView("chatcmpl-1", Status.OK)}
    joined = record(1, vantage=Vantage.JOINED, **seen)
    api.store([joined, record(2, request_id="request-1", started_at=NOON + 9)], [])
    assert api.query("requests/request-1", span_id="a" * 16)["trace_id"] == joined.trace_id


def test_a_request_without_an_id_is_found_by_its_trace(api: Api) -> None:
    api.store([record(1, request_id=None)], [])
    assert api.query(f"requests/{1:032x}")["request_id"] is None


def test_a_request_is_found_by_each_of_its_ids(api: Api) -> None:
    client, engine, response = ids = ("mine", "chatcmpl-mine-0", "resp_1")
    views = {
        "proxied": ProxyView(response_id=response),
        "engine_view": EngineView(engine, Status.OK),
    }
    both = record(1, request_id=client, **views)
    api.store([both._replace(vantage=Vantage.JOINED, proxy_span_id="a" * 16), record(9)], [])
    for request_id in ids:
        found = api.query(f"requests/{request_id}")
        assert (found["trace_id"], found["request_id"]) == (both.trace_id, client)
        assert (found["response_id"], found["others"]) == (response, [])
