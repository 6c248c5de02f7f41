"""Requests that engine and proxy saw: the views in responses, and the requests that are counted."""

from typing import Any

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR, bin_of
from agent.analysis.verdicts import Judge
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import NOON, objective, record

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
    """An API over a database in which views are joined."""
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
