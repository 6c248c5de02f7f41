"""Breakdowns by engine, model, tenant and input length, compared with exact counts."""

from collections import Counter
from collections.abc import Callable
from itertools import accumulate, product
from math import ceil
from operator import itemgetter
from typing import Any, get_args

import pytest

from agent.analysis.tally import INPUT_LENGTHS, OUTPUT_LENGTHS, input_length_of
from agent.records import queries
from agent.records.queries import OF_ROWS, Dimension
from agent.records.request import ProxyView, RequestRecord, Vantage
from agent.store import store_queries
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import (
    NOW,
    OBJECTIVES,
    chosen,
    counts,
    ended_within,
    latencies_s,
    mixed,
    quantile_of,
    unix,
    verdicts_of,
)
from tests.records.making import objective, record

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
SELECTIONS: list[dict[str, str]] = [
    {},
    {"engine": "chat-0", "model": "qwen"},
    {"tenant": "acme", "objective": "long"},
]


def groups(response: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    named = {group["group"]: group for group in response["groups"]}
    assert len(named) == len(response["groups"])
    return named


@pytest.fixture
def proxied(api_of_each: Api) -> list[RequestRecord]:
    sent = [
        item._replace(
            vantage=Vantage.PROXY,
            proxied=ProxyView(
                end_user=(None, "ann", "bob")[number % 3],
                workload=("nightly", "chat")[number // 3 % 2],
                session=f"session-{number // 5}",
                priority=(0, -1, None)[number // 7 % 3],
            ),
        )
        for number, item in enumerate(mixed())
    ]
    api_of_each.store(sent, OBJECTIVES)
    return sent


def members_of(records: list[RequestRecord], by: Dimension) -> dict[Any, list[RequestRecord]]:
    found: dict[Any, list[RequestRecord]] = {}
    for item in records:
        said = getattr(item.proxied, "end_user" if by == "user" else by, None)
        if by == "input_length":
            group = input_length_of(item.input_tokens)
        elif by in OF_ROWS:
            group = None if said is None else str(said)
        else:
            group = getattr(item, by)
        found.setdefault(group, []).append(item)
    return found


def test_each_group_of_rows_has_the_counts_and_percentiles_of_its_own_requests(
    api_of_each: Api, proxied: list[RequestRecord]
) -> None:
    for selection, by in product(SELECTIONS, DIMENSIONS):
        response = api_of_each.query("breakdown", by=by, window="2h", limit="1000", **selection)
        window = unix(response["window_from"]), unix(response["window_until"])
        named = groups(response)
        expected = members_of(ended_within(chosen(proxied, **selection), *window), by)
        assert named.keys() == expected.keys()
        for name, members in expected.items():
            counted = counts(members, selection.get("objective", ""))
            assert {key: named[name][key] for key in counted} == counted
            for latency, q in product(LATENCIES, (50, 95, 99)):
                expected_ms = quantile_of(latencies_s(members, latency), q / 100)
                assert named[name][latency][f"p{q}"] == expected_ms


@pytest.mark.parametrize("by", ["engine", "model", "tenant"])
def test_a_group_has_the_values_of_its_own_summary(busy: Api, by: Dimension) -> None:
    by_name = groups(busy.query("breakdown", by=by, window="2h"))
    named = {name: group for name, group in by_name.items() if name is not None}
    assert named
    for name, group in named.items():
        summary = busy.query("summary", window="2h", **{by: name})
        own: dict[str, Any] = {"group": name, "histograms": None, "budget": None, "cache": None}
        for tokens in ("input_tokens", "output_tokens"):
            rate = summary[f"{tokens}_per_s"]
            own[tokens] = pytest.approx(rate * summary["covered_s"])
        assert group == own | {key: summary[key] for key in group.keys() - own.keys()}


def test_histograms_of_agents_add_up_to_the_percentiles_of_all(
    busy: Api, records: list[RequestRecord]
) -> None:
    """This test uses engines in place of agents with separate databases."""
    response = busy.query("breakdown", by="engine", window="2h", histograms="true")
    counts: Counter[int] = Counter()
    zeros = 0
    for group in response["groups"]:
        histogram = group["histograms"]["ttft_s"]
        assert histogram["scale"] == 6
        zeros += histogram["zero_count"]
        counts.update(dict(enumerate(histogram["bucket_counts"], histogram["offset"])))
    ended = ended_within(records, unix(response["window_from"]), unix(response["window_until"]))
    values = sorted(ttft_s for ttft_s in latencies_s(ended, "ttft_ms") if ttft_s is not None)
    assert zeros + sum(counts.values()) == len(values)
    rank = ceil(0.99 * len(values))
    ranks = accumulate(counts[index] for index in sorted(counts))
    bucket = next(i for i, n in zip(sorted(counts), ranks, strict=True) if n + zeros >= rank)
    assert 2 ** (bucket / 64) <= values[rank - 1] <= 2 ** ((bucket + 1) / 64)
    (without, *_) = busy.query("breakdown", window="2h")["groups"]
    assert without["histograms"] is None


@pytest.mark.parametrize(
    ("parameters", "name"),
    [
        *(({"by": "tenants"}, "by"), ({"window": "401d"}, "window"), ({"limit": "0"}, "limit")),
        # Rows are kept for seven days.
        ({"by": "session", "window": "8d"}, "window"),
        *(({"sort": "color"}, "sort"), ({"sort": "-cost"}, "sort")),
    ],
)
def test_an_invalid_query_is_refused_with_a_sentence(
    busy: Api, parameters: dict[str, str], name: str
) -> None:
    status, sentence = busy.refusal("breakdown", **parameters)
    assert status == 422
    assert sentence.startswith(f"{name}: ")


def p95_ttft_ms(group: dict[str, Any]) -> float | None:
    p95_ms: float | None = group["ttft_ms"]["p95"]
    return p95_ms


@pytest.mark.parametrize(
    ("sort", "value_of"),
    [
        ("group", itemgetter("group")),
        ("-missed", itemgetter("missed")),
        ("attainment", itemgetter("attainment")),
        ("-output_tokens", itemgetter("output_tokens")),
        ("ttft", p95_ttft_ms),
    ],
)
def test_groups_are_sorted_before_the_rest_is_left_out(
    busy: Api, sort: str, value_of: Callable[[dict[str, Any]], Any]
) -> None:
    asked = {"by": "input_length", "window": "2h", "objective": "chat"}
    every = busy.query("breakdown", **asked)["groups"]
    values = sorted(value_of(each) for each in every if value_of(each) is not None)
    expected = values[::-1] if sort.startswith("-") else values
    few = busy.query("breakdown", **asked, sort=sort, limit="2")
    assert [value_of(each) for each in few["groups"]] == expected[:2]
    assert few["left_out"] == len(every) - 2 > 0
    whole = busy.query("breakdown", **asked, sort=sort)["groups"]
    known = [value_of(each) for each in whole if value_of(each) is not None]
    assert known == expected
    assert [value_of(each) for each in whole[: len(known)]] == expected


def test_groups_are_sorted_by_cost_if_it_is_known(api: Api) -> None:
    ended_at = api.agent.now - 1
    rows = [record(n, tenant=f"t-{n % 3}", ended_at=ended_at) for n in range(1, 10)]
    api.store(rows, [objective()])
    api.price(rows)
    found = api.query("breakdown", by="tenant", cost="true", sort="-cost")["groups"]
    costs = [group["cost"]["cost_usd"] for group in found]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_the_busiest_thousand_sessions_have_figures_of_their_own(api: Api) -> None:
    """Each of 1200 sessions has one request, but for ten that have two."""
    sessions = [f"s-{number:04}" for number in (*range(1200), *range(1190, 1200))]
    ended_at = api.agent.now - 1
    sent = [
        record(n, ended_at=ended_at, vantage=Vantage.PROXY, proxied=ProxyView(session=session))
        for n, session in enumerate(sessions, start=1)
    ]
    api.store([*sent, record(9999, ended_at=ended_at)], [objective()])
    api.price(sent)
    with api.counted_statements() as statements:
        response = api.query("breakdown", by="session", cost="true", limit="1000")
    assert len(statements) < 50
    by_name = groups(response)
    requests = [group["requests"] for group in response["groups"]]
    # The group of the rest is the largest one, so two groups of one request are left out.
    assert (requests[0], requests[1:11], set(requests[11:])) == (200, [2] * 10, {1})
    assert (response["groups"][0]["group"], response["left_out"]) == ("other", 2)
    own = {f"s-{number:04}" for number in (*range(990), *range(1190, 1200))}
    assert by_name.keys() - {"other", None} <= own
    rest = [item for item, name in zip(sent, sessions, strict=True) if name not in own]
    assert by_name["other"]["cost"] == {
        "requests": 200,
        "cost_usd": pytest.approx(sum(map(usd, rest))),
        "gpu_hours": pytest.approx(sum(map(usd, rest)) / 4),
    }


def test_a_tenant_has_its_share_of_cached_prompt_tokens(api: Api) -> None:
    """Rows whose engine gave no cached tokens are unknown, and those of others are not its own."""
    ended_at = api.agent.now - 1
    tokens = {"acme": ((1000, 800), (3000, 1000), (500, None)), "globex": ((700, 0),)}
    sent = [
        (tenant, prompt, cached) for tenant, own in tokens.items() for prompt, cached in own
    ] + [("umbrella", 900, None)]
    rows = [
        record(n, tenant=tenant, input_tokens=prompt, cached_tokens=cached, ended_at=ended_at)
        for n, (tenant, prompt, cached) in enumerate(sent, start=1)
    ]
    api.store(rows, [objective()])
    found = groups(api.query("breakdown", by="tenant", cache="true"))
    assert found["acme"]["cache"] == {
        "requests": 2,
        "input_tokens": 4000,
        "cached_tokens": 1800,
        "cached_ratio": 0.45,
    }
    assert found["globex"]["cache"]["cached_ratio"] == 0
    assert found["umbrella"]["cache"] is None
    without = api.query("breakdown", by="tenant")["groups"]
    assert {each["cache"] for each in without} == {None}


def test_a_tenant_has_its_budget_and_a_forecast_at_the_rate_of_the_window(api: Api) -> None:
    rows = [record(number, tenant="acme", ended_at=NOW - 60) for number in (1, 2)]
    api.store([*rows, record(3, tenant="globex", ended_at=NOW - 60)], [])
    api.price(rows)
    api.agent.tenant_budgets |= {"acme": 1000.0, "globex": 5.0}
    of_tenants = groups(api.query("breakdown", by="tenant", cost="true", window="1h"))
    acme = of_tenants["acme"]
    # The two cost an eighth and a quarter of a dollar.
    forecast = 0.375 / acme["covered_s"] * 30 * 86400
    assert acme["budget"] == {
        "usd_per_month": 1000.0,
        "forecast_usd_per_month": pytest.approx(forecast),
        "used_ratio": pytest.approx(forecast / 1000),
    }
    unpriced = {"forecast_usd_per_month": None, "used_ratio": None}
    assert of_tenants["globex"]["budget"] == {"usd_per_month": 5.0, **unpriced}
    without = api.query("breakdown", by="tenant", window="1h")["groups"]
    by_engine = api.query("breakdown", by="engine", cost="true", window="1h")["groups"]
    assert {each["budget"] for each in (*without, *by_engine)} == {None}


def test_the_cost_of_a_group_is_that_of_its_requests(api: Api) -> None:
    """Others have no price, or are before the window."""
    ended_at = api.agent.now - 1
    values = product(("acme", "umbrella", None), (100, 1024, None), ("chat-0", "chat-1"))
    sent = [
        record(number, tenant=tenant, input_tokens=tokens, engine=engine, ended_at=ended_at)
        for number, (tenant, tokens, engine) in enumerate(values, start=1)
    ]
    before = record(99, tenant="acme", ended_at=ended_at - 3600)
    api.store([before, *sent], [objective()])
    priced = sent[:-4]
    api.price([before, *priced])
    selections: list[dict[str, str]] = [{}, {"engine": "chat-1"}]
    for selection, by in product(selections, DIMENSIONS):
        response = api.query("breakdown", by=by, cost="true", **selection)
        expected = members_of(chosen(priced, **selection), by)
        for name, group in groups(response).items():
            members = expected.get(name, [])
            cost = sum(usd(item) for item in members)
            assert group["cost"] == {
                "requests": len(members),
                "cost_usd": pytest.approx(cost) if members else None,
                "gpu_hours": pytest.approx(cost / 4) if members else None,
            }
    # Only where asked for, and of the requests that an objective covers.
    assert {group["cost"] for group in api.query("breakdown", by="tenant")["groups"]} == {None}
    by_name = groups(api.query("breakdown", by="model", cost="true", objective="chat"))
    assert by_name["llama"]["cost"]["requests"] == len(priced)
    assert api.query("breakdown", by="model", cost="true", objective="long")["groups"] == []


def usd(item: RequestRecord) -> float:
    return int(item.trace_id, 16) / 8


def test_lengths_count_each_request_of_a_selection_once(
    busy: Api, records: list[RequestRecord]
) -> None:
    response = busy.query("lengths", window="2h", model="qwen", objective="long")
    recent = ended_within(chosen(records, model="qwen"), NOW - response["window_s"], NOW)
    known = [item for item in recent if item.input_tokens is not None]
    verdicts = Counter(verdicts_of(item).get("long") for item in known)
    for verdict in ("met", "missed"):
        assert sum(item[verdict] for item in response["items"]) == verdicts[verdict] > 0


def test_lengths_of_very_many_requests_are_of_a_sample_that_says_so(
    api_of_each: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_queries, "MOST_BY_LENGTH", 300)
    now = api_of_each.agent.now
    # One a second.
    rows = [record(n, ended_at=now - n, ttft_s=9.0 if n % 4 == 0 else 0.1) for n in range(1, 3001)]
    api_of_each.store(rows, [objective()])
    response = api_of_each.query("lengths", window="50m")
    assert response["one_in"] == pytest.approx(10, abs=1)
    (group,) = response["items"]
    assert 200 <= group["met"] + group["missed"] <= 450
    assert group["attainment"] == pytest.approx(0.75, abs=0.1)
    assert api_of_each.query("lengths", window="4m")["one_in"] == 1


def test_users_of_very_many_requests_have_exact_counts_and_percentiles_of_a_sample(
    api_of_each: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "MOST_TIMED_ROWS", 300)
    now = api_of_each.agent.now
    # One a second, every fourth one slow.
    sent = [
        record(
            n,
            ended_at=now - n,
            vantage=Vantage.PROXY,
            ttft_s=9.0 if n % 4 == 0 else 0.1,
            proxied=ProxyView(end_user="slow" if n % 4 == 0 else "fast"),
        )
        for n in range(1, 3001)
    ]
    api_of_each.store(sent, [objective()])
    whole = api_of_each.query("breakdown", by="user", window="50m", histograms="true")
    ended = ended_within(sent, now - whole["window_s"], now)
    for user, missed in (("slow", True), ("fast", False)):
        group = groups(whole)[user]
        own = [n for item in ended if (n := item.proxied) is not None and n.end_user == user]
        assert group["requests"] == len(own)
        assert group["missed"] == (len(own) if missed else 0)
        assert group["output_tokens"] == 21 * len(own)
        assert group["ttft_ms"]["p95"] == pytest.approx(9000 if missed else 100, rel=0.02)
        assert sum(group["histograms"]["ttft_s"]["bucket_counts"]) == pytest.approx(
            len(own), rel=0.15
        )
    assert whole["times_one_in"] == 10
    assert api_of_each.query("breakdown", by="user", window="4m")["times_one_in"] == 1


def test_a_group_includes_its_lower_edge(api_of_each: Api) -> None:
    tokens = {(1023, 63): ("0-1k", "0-64"), (1024, 64): ("1k-4k", "64-256")}
    tokens |= {(65535, 4095): ("16k-64k", "1k-4k"), (65536, 4096): ("64k+", "4k+")}
    ended_at = api_of_each.agent.now - 1
    rows = [
        record(number, input_tokens=of_input, output_tokens=of_output, ended_at=ended_at)
        for number, (of_input, of_output) in enumerate(tokens)
    ]
    late = record(9, input_tokens=1024, output_tokens=64, ttft_s=9.0, ended_at=ended_at)
    api_of_each.store([*rows, late], [objective()])
    response = api_of_each.query("lengths", window="10m")
    found = {
        (item["input_length"], item["output_length"]): (item["met"], item["missed"])
        for item in response["items"]
    }
    assert found == {group: (1, 0) for group in tokens.values()} | {("1k-4k", "64-256"): (1, 1)}
    assert response["input_lengths"] == list(INPUT_LENGTHS)
    assert response["output_lengths"] == list(OUTPUT_LENGTHS)
    halves = [item["attainment"] for item in response["items"] if item["missed"]]
    assert halves == [0.5]
