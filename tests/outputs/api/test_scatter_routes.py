"""Requests as dots, and what a box of dots has more of than the rest."""

from datetime import UTC, datetime
from typing import Any

import pytest

from agent.records.request import ProxyView, RequestRecord, Vantage
from agent.store import scatter_queries
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import verdicts_of
from tests.records.making import NOON, objective, record

WINDOW = {"from": str(NOON - 7200), "until": str(NOON + 333)}


def dots_of(found: dict[str, Any]) -> dict[str, set[tuple[float, float]]]:
    return {
        verdict: set(zip(dots["at"], dots["seconds"], strict=True))
        for verdict, dots in found["by_verdict"].items()
    }


@pytest.mark.parametrize("by", ["ttft", "tpot", "e2e"])
def test_a_dot_is_when_a_request_began_and_how_long_it_took(
    busy: Api, records: list[RequestRecord], by: str
) -> None:
    found = busy.query("scatter", by=by, model="qwen", **WINDOW)
    expected: dict[str, set[tuple[float, float]]] = {v: set() for v in found["by_verdict"]}
    for item in records:
        value = getattr(item, f"{by}_s")
        if item.model == "qwen" and value is not None and item.started_at >= NOON - 7200:
            expected[verdicts_of(item)[""]].add((round(item.started_at, 2), round(value, 5)))
    assert dots_of(found) == expected
    assert found["every"] == 1
    assert found["dots"] == sum(map(len, expected.values())) > 0


def test_more_requests_than_dots_are_a_sample_that_says_so(
    busy: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = dots_of(busy.query("scatter", **WINDOW))
    monkeypatch.setattr(scatter_queries, "MAX_DOTS", 100)
    found = busy.query("scatter", **WINDOW)
    assert found["every"] > 1
    assert 50 <= found["dots"] <= 100
    sample = dots_of(found)
    assert all(some <= everything[verdict] for verdict, some in sample.items())
    # Of the whole time: half of the traffic is of its last five minutes.
    late = [sum(at > NOON for at, _ in set().union(*of.values())) for of in (sample, everything)]
    assert late[0] / found["dots"] == pytest.approx(late[1] / 600, abs=0.2)


def test_a_filter_that_leaves_few_requests_shows_all_of_them(
    busy: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"status": "timeout", **WINDOW}
    everything = busy.query("scatter", **few)
    monkeypatch.setattr(scatter_queries, "MAX_DOTS", 100)
    assert busy.query("scatter", **few) == everything


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def test_what_the_requests_in_a_box_have_more_of_is_counted_over_all(api_of_each: Api) -> None:
    api = api_of_each
    slow = [
        record(
            n,
            vantage=Vantage.PROXY,
            tenant="acme" if n < 19 else "small",
            ttft_s=5.0,
            started_at=NOON + n,
            ended_at=NOON + 60,
            input_tokens=100 if n < 10 else 5000,
            proxied=ProxyView(session="the-one"),
        )
        for n in range(20)
    ]
    fast = [
        record(
            100 + n,
            tenant=("acme", "small", None)[n % 3],
            started_at=NOON + n % 60,
            ended_at=NOON + 61,
        )
        for n in range(300)
    ]
    api.store([*slow, *fast, record(999, ttft_s=None, started_at=NOON)], [objective()])
    box = {"box_from": iso(NOON), "box_until": iso(NOON + 30), "box_min_s": "1", "box_max_s": "9"}
    found = api.query("contrast", window="1h", **box)
    assert (found["inside"], found["outside"]) == (20, 300)
    told = [
        (one["dimension"], one["name"], one["inside"], one["outside"]) for one in found["items"]
    ]
    assert told == [
        ("session", "the-one", 20, 0),
        ("tenant", "acme", 19, 100),
        ("input_length", "4k-16k", 10, 0),
    ]
    assert found["items"][1]["outside_share"] == pytest.approx(1 / 3)
    assert api.query("contrast", window="1h", tenant="small", **box)["inside"] == 1


def test_a_box_that_ends_before_it_begins_is_refused(api: Api) -> None:
    box = {"box_from": iso(NOON + 60), "box_until": iso(NOON)}
    assert api.refusal("contrast", **box) == (422, "box_until: the box ends before it begins")
