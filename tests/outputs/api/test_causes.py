"""Causes of misses in the API: of windows, steps, groups, and one request."""

from typing import Any

import pytest

from agent.catalog.causes import CAUSES, Cause
from agent.records.objective import JudgedRequest
from agent.records.request import ProxyView, RequestRecord, Vantage
from tests.outputs.api.serving import Api
from tests.records.making import NOON, judged, objective, record
from tests.store.explaining import explained, share

KV, BURST, CAP, LONG = (
    Cause.KV_PRESSURE,
    Cause.BURST,
    Cause.SEQUENCE_CAP,
    Cause.LONG_PROMPT,
)
CHAT, SLOW = objective("chat"), objective("slow", ttft_s=0.5)

SLOW_RECORD: dict[str, Any] = {"ttft_s": 1.2, "tenant": "acme"}


def missed(number: int, **given: Any) -> JudgedRequest:
    """A request that missed the objectives `chat` and `slow`."""
    (item,) = judged([record(number, **SLOW_RECORD | given)], [CHAT, SLOW])
    return item


# Two requests now, a third of another tenant two hours before, and one that failed.
NOW_1, NOW_2 = missed(1), missed(2, ended_at=NOON + 61, input_tokens=5000)
BEFORE = missed(3, ended_at=NOON - 7200, tenant="zeta", engine="chat-1", model="qwen")
FAILED = missed(4, status="error")
EXPLAINED = (
    explained(NOW_1, share(KV, 0.75), share(BURST, 0.25), share(KV, 0.7, objective="slow")),
    explained(NOW_2, share(BURST, 0.9), share(CAP, 0.1), share(BURST, 0.7, objective="slow")),
    explained(BEFORE, share(LONG, 1.0), share(KV, 1.0, "e2e"), share(LONG, 0.7, objective="slow")),
    explained(FAILED, share(Cause.ENGINE_FAILURE, None, "failure")),
)


@pytest.fixture
def explaining(api_of_each: Api) -> Api:
    """An API with these requests and their explanations, and one that is not explained yet."""
    records: list[RequestRecord] = [item.judged.record for item in EXPLAINED]
    api_of_each.store([*records, record(9, ttft_s=3.0)], [CHAT, SLOW])
    api_of_each.explain(*EXPLAINED)
    return api_of_each


def shares(figures: dict[str, Any]) -> dict[str, float]:
    return {cause: round(value, 6) for cause, value in figures["causes"].items()}


def test_a_summary_has_the_shares_of_the_excess_seconds(explaining: Api) -> None:
    figures = explaining.query("summary", window="10m")
    assert (figures["missed"], figures["explained"]) == (4, 3)
    assert shares(figures) == {"burst": 0.575, "kv_pressure": 0.375, "sequence_cap": 0.05}
    assert sum(figures["causes"].values()) == pytest.approx(1.0)


def test_each_cause_has_seconds_requests_limits_and_advice(explaining: Api) -> None:
    burst, kv, cap, failure = explaining.query("summary", window="10m")["cause_details"]
    assert (burst["cause"], burst["requests"]) == ("burst", 1)
    assert burst["limits"] == {"ttft": {"requests": 2, "seconds": pytest.approx(1.15)}}
    assert burst["seconds"] == pytest.approx(1.15)
    assert (kv["cause"], kv["requests"]) == ("kv_pressure", 1)
    assert kv["advice"]["part"] == "queue"
    for name in ("meaning", "remedy", "flag", "costs"):
        assert kv["advice"][name] == getattr(CAUSES[KV], name)
    effect, also = CAUSES[KV].effect, CAUSES[KV].also
    assert effect is not None
    assert also is not None
    assert kv["advice"]["effect"] == effect._asdict()
    assert kv["advice"]["also"] == {"change": also.change, "effect": also.effect._asdict()}
    assert kv["advice"]["text"] == CAUSES[KV].text
    assert (cap["cause"], cap["requests"]) == ("sequence_cap", 0)
    assert (failure["cause"], failure["requests"]) == ("engine_failure", 1)
    assert (failure["seconds"], failure["share"]) == (None, None)
    assert failure["limits"] == {"failure": {"requests": 1, "seconds": None}}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"window": "30d", "engine": "chat-1"}, {"kv_pressure": 0.5, "long_prompt": 0.5}),
        (
            {"window": "30d", "model": "llama", "objective": "slow"},
            {"kv_pressure": 0.5, "burst": 0.5},
        ),
        ({"window": "3h", "tenant": "zeta", "objective": "slow"}, {"long_prompt": 1.0}),
    ],
)
def test_causes_are_of_the_window_engine_model_tenant_and_objective(
    explaining: Api, chosen: dict[str, str], expected: dict[str, float]
) -> None:
    assert shares(explaining.query("summary", **chosen)) == expected


def test_a_cause_lists_the_requests_of_which_it_is_the_first(explaining: Api) -> None:
    found = explaining.query("requests", cause="kv_pressure")["items"]
    assert [item["trace_id"] for item in found] == [NOW_1.record.trace_id]
    assert explaining.query("requests", cause="sequence_cap")["items"] == []


def test_a_window_without_explanations_has_no_causes(api: Api) -> None:
    api.store([record(1, ttft_s=3.0)], [CHAT])
    figures = api.query("summary", window="10m")
    assert (figures["explained"], figures["causes"], figures["cause_details"]) == (0, None, [])


def test_a_cause_of_another_version_has_no_advice(api: Api) -> None:
    """An agent of a newer version that shares the database may have stored it."""
    newer: Any = "cosmic_rays"
    api.store([NOW_1.record], [CHAT, SLOW])
    api.explain(explained(NOW_1, share(newer, 1.0)))
    (detail,) = api.query("summary", window="10m")["cause_details"]
    assert (detail["cause"], detail["share"], detail["advice"]) == ("cosmic_rays", 1.0, None)
    (found,) = api.query("requests/request-1")["explanation"]["shares"]
    assert (found["cause"], found["advice"]) == ("cosmic_rays", None)


def test_each_step_has_its_causes(explaining: Api) -> None:
    steps = explaining.query("timeseries", window="10m", step="1m", engine="chat-0")["items"]
    by_step = [shares(step) for step in steps if step["causes"]]
    assert by_step == [{"kv_pressure": 0.75, "burst": 0.25}, {"burst": 0.9, "sequence_cap": 0.1}]
    assert [step["explained"] for step in steps if step["explained"]] == [2, 1]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("tenant", {"acme": "burst", "zeta": "long_prompt"}),
        ("model", {"llama": "burst", "qwen": "long_prompt"}),
        ("input_length", {"0-1k": "kv_pressure", "4k-16k": "burst"}),
    ],
)
def test_each_group_has_its_causes(explaining: Api, by: str, expected: dict[str, str]) -> None:
    groups = explaining.query("breakdown", by=by, window="3h", objective="chat")["groups"]
    of_group = {each["group"]: each["cause_details"] for each in groups}
    # The one that is not explained has no tenant.
    assert {name: found[0]["cause"] for name, found in of_group.items() if found} == expected


def test_groups_that_only_rows_know_have_their_causes(api_of_each: Api) -> None:
    users = {"ann": KV, "bob": BURST, None: CAP}
    sent = [
        missed(n, vantage=Vantage.PROXY, proxied=ProxyView(end_user=user), span_id=f"{n:016x}")
        for n, user in enumerate(users, start=1)
    ]
    api_of_each.store([item.record for item in sent], [CHAT])
    api_of_each.explain(
        *(
            explained(each, share(cause, 1.0))
            for each, cause in zip(sent, users.values(), strict=True)
        )
    )
    groups = api_of_each.query("breakdown", by="user", window="10m")["groups"]
    assert {each["group"]: shares(each) for each in groups} == {
        user: {cause: 1.0} for user, cause in users.items()
    }


def test_a_request_has_its_cause_shares_and_evidence(explaining: Api) -> None:
    item = explaining.query("requests/request-1")
    assert item["cause"] == "kv_pressure"
    assert item["explanation"]["sources"] == ["span", "samples"]
    first, *rest = item["explanation"]["shares"]
    advice = first.pop("advice")
    assert first == {
        "objective": "chat",
        "limit": "ttft",
        "cause": "kv_pressure",
        "excess_s": 0.75,
        "evidence": ["kv_pressure took 0.75 s"],
    }
    assert advice["flag"] == "--gpu-memory-utilization"
    assert [(each["objective"], each["cause"]) for each in rest] == [
        ("chat", "burst"),
        ("slow", "kv_pressure"),
    ]
    listed = explaining.query("requests", limit=10)["items"]
    causes = {each["request_id"]: each["cause"] for each in listed}
    assert (causes["request-4"], causes["request-9"]) == ("engine_failure", None)
