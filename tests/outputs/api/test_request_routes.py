"""Lists of requests in pages, and single requests."""

from base64 import urlsafe_b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR, bin_of
from agent.analysis.verdicts import Judge
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.traffic import NOW, chosen, unix, verdicts_of
from tests.records.making import NOON, objective, record


def newest_first(records: list[RequestRecord]) -> list[str]:
    """Return trace ids, latest start first; of equal starts, the last stored first."""
    stored = sorted(enumerate(records), key=lambda pair: (pair[1].started_at, pair[0]))
    return [item.trace_id for _, item in reversed(stored)]


def listed(api: Api, **filters: Any) -> list[str]:
    return [item["trace_id"] for page in api.pages("requests", **filters) for item in page]


@pytest.mark.parametrize("limit", [7, 600])
def test_pages_hold_every_request_once_and_the_newest_first(
    busy: Api, records: list[RequestRecord], limit: int
) -> None:
    pages = list(busy.pages("requests", limit=limit))
    assert [item["trace_id"] for page in pages for item in page] == newest_first(records)
    assert {len(page) for page in pages[:-1]} <= {limit}
    assert len(busy.query("requests")["items"]) == 100


@pytest.mark.parametrize(
    ("filters", "chosen"),
    [
        ({"engine": "chat-0"}, lambda item: item.engine == "chat-0"),
        ({"model": "llama"}, lambda item: item.model == "llama"),
        ({"tenant": "acme"}, lambda item: item.tenant == "acme"),
        ({"objective": "long"}, lambda item: "long" in verdicts_of(item)),
        ({"verdict": "met"}, lambda item: verdicts_of(item)[""] == "met"),
        (
            {"verdict": "missed", "objective": "long"},
            lambda item: verdicts_of(item).get("long") == "missed",
        ),
        ({"status": "timeout"}, lambda item: item.status is Status.TIMEOUT),
        ({"min_ttft_s": "0.2"}, lambda item: (item.ttft_s or 0) >= 0.2),
        ({"min_tpot_s": "0.02"}, lambda item: (item.tpot_s or 0) >= 0.02),
        ({"min_e2e_s": "1"}, lambda item: (item.e2e_s or 0) >= 1),
        (
            {"min_ttft_s": "0.1", "max_ttft_s": "0.2"},
            lambda item: 0.1 <= (item.ttft_s or 0) <= 0.2,
        ),
        ({"max_tpot_s": "0.01"}, lambda item: item.tpot_s is not None and item.tpot_s <= 0.01),
        ({"max_e2e_s": "0.5"}, lambda item: item.e2e_s is not None and item.e2e_s <= 0.5),
        (
            {"min_input_tokens": "300", "max_input_tokens": "900"},
            lambda item: 300 <= (item.input_tokens or 0) <= 900,
        ),
    ],
    ids=lambda each: ",".join(each) if isinstance(each, dict) else "",
)
def test_a_filter_lists_exactly_its_requests(
    busy: Api,
    records: list[RequestRecord],
    filters: dict[str, str],
    chosen: Callable[[RequestRecord], bool],
) -> None:
    found = listed(busy, limit=1000, **filters)
    assert found == newest_first([item for item in records if chosen(item)])
    assert found


def test_a_window_lists_the_requests_that_arrived_in_it(
    busy: Api, records: list[RequestRecord]
) -> None:
    def arrived(begin: float, end: float) -> list[str]:
        return newest_first([item for item in records if begin <= item.started_at < end])

    half_an_hour = arrived(NOW - 1800, NOW)
    assert listed(busy, limit=1000, window="30m") == half_an_hour
    assert len(half_an_hour) < len(records)
    earlier = {"from": "now-90m", "until": "now-60m"}
    assert listed(busy, limit=1000, **earlier) == arrived(NOW - 5400, NOW - 3600)
    # Both say when: a request has to arrive in both.
    since = datetime.fromtimestamp(NOW - 900, UTC).isoformat()
    assert listed(busy, limit=1000, window="30m", started_from=since) == arrived(NOW - 900, NOW)


@pytest.mark.parametrize("latency", ["ttft", "tpot", "e2e"])
def test_the_worst_of_all_that_match_come_first(
    busy: Api, records: list[RequestRecord], latency: str
) -> None:
    worst = {item.trace_id: getattr(item, f"{latency}_s") for item in chosen(records, model="qwen")}
    known = sorted((value for value in worst.values() if value is not None), reverse=True)
    found = listed(busy, worst=latency, model="qwen", limit=20)
    assert [worst[trace] for trace in found] == known


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize(
    ("key", "column"),
    [("started", "started_at"), ("queue", "queue_s"), ("output_tokens", "output_tokens")],
)
def test_pages_in_any_order_hold_every_request_with_the_value_once(
    busy: Api, records: list[RequestRecord], key: str, column: str, order: str
) -> None:
    pages = list(busy.pages("requests", sort=key, order=order, limit=70))
    rows = [item for page in pages for item in page]
    values = [unix(item[column]) if key == "started" else item[column] for item in rows]
    assert values == sorted(values, reverse=order == "desc")
    known = {item.trace_id for item in records if getattr(item, column) is not None}
    assert len(rows) == len(known)
    assert {item["trace_id"] for item in rows} == known


def test_a_cursor_of_another_order_is_refused(busy: Api) -> None:
    cursor_of_newest = busy.query("requests", limit=1)["next"]
    cursor_of_worst = busy.query("requests", limit=1, worst="ttft")["next"]
    for given in (
        {"worst": "ttft", "cursor": cursor_of_newest},
        {"sort": "ttft", "order": "asc", "cursor": cursor_of_worst},
        {"cursor": cursor_of_worst},
    ):
        assert busy.refusal("requests", **given)[0] == 422, given
    assert busy.refusal("requests", worst="ttft", sort="e2e")[0] == 422


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
    "filters",
    [
        *({"limit": limit} for limit in ("0", "1001", "many", "-1")),
        {"verdict": "good"},
        {"status": "200"},
        {"started_from": "yesterday"},
        {"started_until": "2026-13-01"},
        {"min_ttft_s": "-0.1"},
        {"min_tpot_s": "nan"},
        {"engine": "a\0b"},
        {"objective": "o" * 257},
        {"priority": str(2**31)},
        {"verdict": "x", "min_e2e_s": "-1", "limit": "0"},
    ],
    ids=str,
)
def test_every_invalid_filter_is_named_in_the_refusal(busy: Api, filters: dict[str, str]) -> None:
    status, sentence = busy.refusal("requests", **filters)
    assert status == 422
    assert [part.partition(": ")[0] for part in sentence.split("; ")] == list(filters)


def test_a_refusal_says_what_is_valid_and_what_was_given(busy: Api) -> None:
    _, sentence = busy.refusal("requests", verdict="good")
    assert sentence == "verdict: Input should be 'met', 'missed' or 'undetermined' (got 'good')"


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
    return name if name == "holdback_s" else f"engine_{name}"


def test_a_request_has_every_stored_value(api: Api) -> None:
    stored = record(
        1,
        tenant="acme",
        route="/v1/chat",
        vantage=Vantage.JOINED,
        status=Status.TIMEOUT,
        started_at=NOON + 0.123456,
        ended_at=NOON + 1.654321,
        max_gap_s=0.25,
        cached_tokens=64,
        http_status=504,
        cost_usd=0.25,
        proxy_span_id="00f067aa0ba902b7",
        proxied=ProxyView(**PROXY_VIEW),
        engine_view=EngineView(**ENGINE_VIEW | {"status": Status.OK}),
    )
    api.store([stored], [objective("chat"), objective("fast", ttft_s=0.01)])
    item = api.query("requests/request-1")
    same = stored._asdict()
    # Under other names, or not shown at all.
    for name in ("proxied", "engine_view", "received_at", "started_at", "ended_at"):
        del same[name]
    same |= PROXY_VIEW | {engine_key(name): value for name, value in ENGINE_VIEW.items()}
    same |= {"verdict": "missed", "verdicts": {"chat": "missed", "fast": "missed"}}
    same |= {"counted": True, "part": False, "settles_at": None, "explanation": None}
    assert {name: item[name] for name in same} == same
    assert unix(item["started_at"]) == NOON + 0.123456
    assert unix(item["ended_at"]) == NOON + 1.654321
    parts = ("queue", "prefill", "decode", "front", "rest")
    assert sum(item[f"{part}_s"] for part in parts) == pytest.approx(stored.e2e_s)


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


def test_a_request_leads_to_its_trace_if_the_settings_say_where(tmp_path: Path) -> None:
    url = "https://tempo.example/t/{trace_id}?span={span_id}"
    with open_api(tmp_path, trace_url=url) as api:
        api.store([record(1)], [])
        found = api.query("requests/request-1")
    assert found["trace_url"] == f"https://tempo.example/t/{1:032x}?span={1:016x}"


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
    assert busy.refusal("requests/a%00b")[0] == 422


def test_hostile_names_are_returned_unchanged_as_json(api: Api) -> None:
    name = '<img src=x onerror="alert(1)">'
    api.store([record(1, model=name, tenant=name, finish_reason=name)], [objective()])
    response = api.get("/api/v1/requests", model=name)
    assert response.headers["Content-Type"] == "application/json"
    (item,) = response.json()["items"]
    assert (item["model"], item["tenant"], item["finish_reason"]) == (name, name, name)


def test_a_span_tells_which_request_with_an_id_is_meant(api: Api) -> None:
    """Also if the newest hundred requests with this id are others."""
    seen = {"proxy_span_id": "a" * 16, "engine_view": EngineView("chatcmpl-1", Status.OK)}
    joined = record(151, request_id="same", vantage=Vantage.JOINED, **seen)
    several = [record(n, request_id="same", started_at=NOON + n) for n in range(150)]
    api.store([*several, joined, record(152)], [])
    newest = api.query("requests/same")
    assert newest["trace_id"] == f"{149:032x}"
    assert [other["trace_id"] for other in newest["others"][:2]] == [f"{148:032x}", f"{147:032x}"]
    assert newest["others"][0].keys() < newest.keys()
    for span_id, number in ((f"{0:016x}", 0), (f"{2:016x}", 2), ("a" * 16, 151)):
        item = api.query("requests/same", span_id=span_id)
        assert item["trace_id"] == f"{number:032x}"
        assert len(item["others"]) == 99
    missing = api.refusal("requests/same", span_id="f" * 16)
    assert missing == (404, f"no request 'same' with the span '{'f' * 16}' is stored")


def test_a_request_is_found_by_each_of_its_ids(api: Api) -> None:
    client, engine, response = ids = ("mine", "chatcmpl-mine-0", "resp_1")
    views = {
        "proxied": ProxyView(response_id=response),
        "engine_view": EngineView(engine, Status.OK),
    }
    both = record(1, request_id=client, **views)
    without_id = record(8, request_id=None)
    joined = both._replace(vantage=Vantage.JOINED, proxy_span_id="a" * 16)
    api.store([joined, without_id, record(9)], [])
    for request_id in ids:
        found = api.query(f"requests/{request_id}")
        assert (found["trace_id"], found["request_id"]) == (both.trace_id, client)
        assert (found["response_id"], found["others"]) == (response, [])
        assert listed(api, id=request_id) == [both.trace_id]
    assert listed(api, id=both.trace_id) == [both.trace_id]
    assert listed(api, id="min") == []
    assert api.query(f"requests/{without_id.trace_id}")["request_id"] is None


WAIT_S = 10.0
OBJECTIVES = (objective("chat", ttft_s=0.2),)
PROXY_SPAN = "a" * 16
VIEW = ProxyView(
    first_byte_s=0.05,
    first_visible_s=0.4,
    gaps={bin_of(0.02): 97, bin_of(0.05): 2, bin_of(0.5): 1},
    gap_tokens=1,
    input_bytes=512,
    output_bytes=2048,
    error="client_gone",
    choices=1,
    streamed=True,
    ttft_limit_s=0.3,
    tpot_limit_s=0.04,
)


def proxy_record(**given: Any) -> RequestRecord:
    """Return the record of the proxy for a request with a late first token."""
    values: dict[str, Any] = {
        "span_id": PROXY_SPAN,
        "vantage": Vantage.PROXY,
        "request_id": "mine",
        "ttft_s": 0.35,
        "e2e_s": 0.75,
        "max_gap_s": 0.5,
        "proxied": VIEW,
    }
    return record(1, **(values | given))


def engine_record(child: int = 0) -> RequestRecord:
    """Return the record of the engine for that request, or for one of its choices."""
    return record(
        1, span_id=f"{child:016x}", parent_span_id=PROXY_SPAN, request_id=f"chatcmpl-mine-{child}"
    )


@pytest.fixture
def joining(api: Api) -> Api:
    api.join(Judge(OBJECTIVES), WAIT_S)
    return api


def test_a_joined_request_has_both_views(joining: Api) -> None:
    """The limit and the status are those of the client; other choices are parts of it."""
    joining.store(
        [proxy_record(status=Status.TIMEOUT), engine_record(), engine_record(1)], OBJECTIVES
    )
    item = joining.query("requests/mine")
    assert item["others"] == []
    assert (item["vantage"], item["counted"], item["part"]) == ("joined", True, False)
    assert item["views"] == {
        "proxy": {
            "request_id": "mine",
            "span_id": PROXY_SPAN,
            "status": "timeout",
            "ttft_s": 0.35,
            "tpot_s": 0.02,
            "e2e_s": 0.75,
        },
        "engine": {
            "request_id": "chatcmpl-mine-0",
            "span_id": f"{0:016x}",
            "status": "ok",
            "ttft_s": 0.1,
            "tpot_s": 0.02,
            "e2e_s": 0.5,
        },
    }
    assert item["holdback_s"] == pytest.approx(0.25)
    assert (item["ttft_s"], item["engine_ttft_s"]) == (0.35, 0.1)
    assert (item["ttft_limit_s"], item["verdict"]) == (0.3, "missed")
    assert (item["status"], item["engine_status"]) == ("timeout", "ok")
    assert joining.query("requests/chatcmpl-mine-0")["request_id"] == "mine"
    part = joining.query("requests/chatcmpl-mine-1")
    assert (part["vantage"], part["part"], part["counted"]) == ("engine", True, False)
    assert (part["views"]["proxy"], part["views"]["engine"]["span_id"]) == (None, f"{1:016x}")
    summary = joining.query("summary", window="10m")
    assert (summary["requests"], summary["missed"], summary["error_ratio"]) == (1, 1, 1.0)


def test_a_request_has_the_fields_of_the_proxy_and_a_summary_of_gaps(joining: Api) -> None:
    joining.store([proxy_record()], OBJECTIVES)
    (item,) = joining.query("requests")["items"]
    gaps = item["gaps"]
    assert (gaps["count"], gaps["max_s"]) == (100, 0.5)
    assert gaps["p50_s"] == pytest.approx(0.02, rel=2 * RELATIVE_ERROR)
    assert gaps["p99_s"] == pytest.approx(0.05, rel=2 * RELATIVE_ERROR)
    expected = VIEW._asdict()
    del expected["gaps"]
    assert {name: item[name] for name in expected} == expected


def test_a_waiting_request_is_listed_and_not_counted(joining: Api) -> None:
    joining.store([proxy_record(), record(9)], OBJECTIVES)
    items = {item["request_id"]: item for item in joining.query("requests")["items"]}
    waiting = items["mine"]
    assert (waiting["counted"], waiting["part"]) == (False, False)
    assert unix(waiting["settles_at"]) == pytest.approx(NOON + 0.6 + WAIT_S)
    assert joining.query("summary", window="10m")["requests"] == 1
    joining.settle(NOON + 0.6 + WAIT_S)
    item = joining.query("requests/mine")
    assert (item["counted"], item["settles_at"]) == (True, None)
    assert joining.query("summary", window="10m")["requests"] == 2
