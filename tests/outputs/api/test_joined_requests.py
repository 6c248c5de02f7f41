"""Requests that were seen from two places: what is told of each view, and which are counted."""

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


def proxys(**told: Any) -> RequestRecord:
    """What the proxy saw of a request whose first token came late."""
    seen: dict[str, Any] = {
        "span_id": PROXY_SPAN,
        "vantage": Vantage.PROXY,
        "request_id": "mine",
        "ttft_s": 0.35,
        "e2e_s": 0.75,
        "max_gap_s": 0.5,
        "proxied": VIEW,
    }
    return record(1, **(seen | told))


def engines(child: int = 0) -> RequestRecord:
    """What the engine told of it, or of one of its choices."""
    return record(
        1, span_id=f"{child:016x}", parent_span_id=PROXY_SPAN, request_id=f"chatcmpl-mine-{child}"
    )


@pytest.fixture
def joining(api: Api) -> Api:
    """An API beside a writer that joins."""
    api.join(Judge(OBJECTIVES), WAIT_S)
    return api


def test_a_request_of_two_views_is_told_with_both(joining: Api) -> None:
    joining.store([proxys(), engines()], OBJECTIVES)
    told = joining.ask("requests/mine")
    assert told["others"] == []
    assert (told["vantage"], told["counted"], told["part"]) == ("joined", True, False)
    assert told["views"] == {
        "proxy": {
            "request_id": "mine",
            "span_id": PROXY_SPAN,
            "status": "ok",
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
    assert told["holdback_s"] == pytest.approx(0.25)
    assert (told["ttft_s"], told["engine_ttft_s"]) == (0.35, 0.1)
    # The limit is the one that the client asked for.
    assert (told["ttft_limit_s"], told["verdict"]) == (0.3, "missed")
    assert joining.ask("requests/chatcmpl-mine-0")["request_id"] == "mine"


def test_what_only_the_proxy_sees_is_told_and_gaps_in_short(joining: Api) -> None:
    joining.store([proxys()], OBJECTIVES)
    (told,) = joining.ask("requests")["items"]
    gaps = told["gaps"]
    assert (gaps["count"], gaps["max_s"]) == (100, 0.5)
    assert gaps["p50_s"] == pytest.approx(0.02, rel=2 * RELATIVE_ERROR)
    assert gaps["p99_s"] == pytest.approx(0.05, rel=2 * RELATIVE_ERROR)
    plain = VIEW._asdict()
    del plain["gaps"]
    assert {name: told[name] for name in plain} == plain


@pytest.mark.parametrize(
    ("stored", "place", "other"), [(proxys(), "proxy", "engine"), (engines(), "engine", "proxy")]
)
def test_a_view_alone_is_the_only_one(
    joining: Api, stored: RequestRecord, place: str, other: str
) -> None:
    joining.store([stored], OBJECTIVES)
    told = joining.ask(f"requests/{stored.request_id}")
    assert told["views"][other] is None
    assert told["views"][place] == {
        name: getattr(stored, name) for name in ("request_id", "span_id", "ttft_s", "tpot_s")
    } | {"status": stored.status, "e2e_s": stored.e2e_s}


def test_a_request_that_waits_is_listed_and_in_no_figure(joining: Api) -> None:
    joining.store([proxys(), record(9)], OBJECTIVES)
    items = {item["request_id"]: item for item in joining.ask("requests")["items"]}
    waiting = items["mine"]
    assert (waiting["counted"], waiting["part"]) == (False, False)
    assert unix(waiting["settles_at"]) == pytest.approx(NOON + 0.6 + WAIT_S)
    assert joining.ask("summary", window="10m")["requests"] == 1
    joining.settle(NOON + 0.6 + WAIT_S)
    told = joining.ask("requests/mine")
    assert (told["counted"], told["settles_at"]) == (True, None)
    assert joining.ask("summary", window="10m")["requests"] == 2


def test_spans_of_several_choices_are_listed_as_parts_and_counted_as_one(joining: Api) -> None:
    joining.store([engines(0), proxys(), engines(1), engines(2)], OBJECTIVES)
    items = joining.ask("requests")["items"]
    assert sorted((item["vantage"], item["part"], item["counted"]) for item in items) == [
        ("engine", True, False),
        ("engine", True, False),
        ("joined", False, True),
    ]
    told = joining.ask("summary", window="10m")
    assert (told["requests"], told["missed"]) == (1, 1)


def test_how_the_user_saw_it_end_is_what_is_counted(joining: Api) -> None:
    joining.store([proxys(status=Status.TIMEOUT), engines()], OBJECTIVES)
    told = joining.ask("requests/mine")
    assert (told["status"], told["engine_status"]) == ("timeout", "ok")
    assert joining.ask("summary", window="10m")["error_ratio"] == 1.0
