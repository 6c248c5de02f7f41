"""The figures by engine, model, tenant and input length, against the summary and the requests."""

from collections import Counter
from itertools import accumulate
from math import ceil
from typing import Any, get_args

import pytest

from agent.analysis.input_lengths import INPUT_LENGTHS, input_length_of
from agent.analysis.quantiles import RELATIVE_ERROR
from agent.records.queries import Dimension
from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import chosen, counts, ended_within, exact, unix
from tests.records.making import objective, record

DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
SELECTIONS: list[dict[str, str]] = [
    {},
    {"engine": "chat-0", "model": "qwen"},
    {"tenant": "acme", "objective": "long"},
]

each_dimension = pytest.mark.parametrize("by", DIMENSIONS)
each_selection = pytest.mark.parametrize(
    "selection", SELECTIONS, ids=lambda chosen: ",".join(chosen.values()) or "all"
)


def value_of(item: RequestRecord, by: Dimension) -> str | None:
    """The group that a request belongs to."""
    if by == "input_length":
        return input_length_of(item.input_tokens)
    value: str | None = getattr(item, by)
    return value


def groups(told: dict[str, Any]) -> dict[str | None, dict[str, Any]]:
    """The groups of an answer by what they have in common."""
    named = {group["group"]: group for group in told["groups"]}
    assert len(named) == len(told["groups"])
    return named


@each_dimension
@each_selection
def test_each_group_has_the_counts_and_percentiles_of_its_own_requests(
    busy: Api, records: list[RequestRecord], by: Dimension, selection: dict[str, str]
) -> None:
    told = busy.ask("breakdown", by=by, window="2h", **selection)
    window = unix(told["window_from"]), unix(told["window_until"])
    meant: dict[str | None, list[RequestRecord]] = {}
    for item in ended_within(chosen(records, **selection), *window):
        meant.setdefault(value_of(item, by), []).append(item)
    named = groups(told)
    assert named.keys() == meant.keys()
    for name, of in meant.items():
        counted = counts(of, selection.get("objective", ""))
        assert {key: named[name][key] for key in counted} == counted
        for latency in LATENCIES:
            values_s = [getattr(item, latency.replace("_ms", "_s")) for item in of]
            for q in (50, 95, 99):
                wanted = exact(values_s, q / 100)
                near = pytest.approx(wanted, rel=RELATIVE_ERROR * (1 + 1e-9), abs=0.0011)
                assert named[name][latency][f"p{q}"] == (None if wanted is None else near)


@pytest.mark.parametrize("by", ["engine", "model", "tenant"])
def test_a_group_has_the_figures_of_a_summary_of_it_alone(busy: Api, by: Dimension) -> None:
    told = groups(busy.ask("breakdown", by=by, window="2h"))
    named = {name: figures for name, figures in told.items() if name is not None}
    assert named
    for name, figures in named.items():
        summary = busy.ask("summary", window="2h", **{by: name})
        own = {"group": name, "histograms": None}
        assert figures == own | {key: summary[key] for key in figures.keys() - own.keys()}


def test_input_lengths_are_told_apart_at_their_edges(api: Api) -> None:
    lengths = (0, 1023, 1024, 4095, 4096, 16383, 16384, 65535, 65536, 10**6, None)
    ended_at = api.around.now - 1
    api.store(
        [
            record(n, input_tokens=tokens, ttft_s=0.1 * (n + 1), ended_at=ended_at)
            for n, tokens in enumerate(lengths)
        ],
        [objective()],
    )
    told = groups(api.ask("breakdown"))
    requests = {name: group["requests"] for name, group in told.items()}
    assert requests == dict.fromkeys(INPUT_LENGTHS, 2) | {None: 1}
    assert told["4k-16k"]["ttft_ms"]["p99"] == pytest.approx(600, rel=RELATIVE_ERROR)
    assert told["4k-16k"]["ttft_ms"]["p50"] == pytest.approx(500, rel=RELATIVE_ERROR)


def test_the_busiest_groups_come_first_and_those_left_out_are_counted(api: Api) -> None:
    tenants = ("calm", "busy", "busy", "busy", "fair", "fair")
    ended_at = api.around.now - 1
    api.store(
        [record(n, tenant=tenant, ended_at=ended_at) for n, tenant in enumerate(tenants)],
        [objective()],
    )
    told = api.ask("breakdown", by="tenant")
    assert [group["group"] for group in told["groups"]] == ["busy", "fair", "calm"]
    assert told["left_out"] == 0
    told = api.ask("breakdown", by="tenant", limit="1")
    assert ([group["group"] for group in told["groups"]], told["left_out"]) == (["busy"], 2)


def test_histograms_of_agents_add_up_to_the_percentiles_of_all(
    busy: Api, records: list[RequestRecord]
) -> None:
    """As of agents that do not share a database: here, of engines."""
    asked = busy.ask("breakdown", by="engine", window="2h", histograms="true")
    counts: Counter[int] = Counter()
    zeros = 0
    for group in asked["groups"]:
        told = group["histograms"]["ttft_s"]
        assert told["scale"] == 6
        zeros += told["zero_count"]
        counts.update(dict(enumerate(told["bucket_counts"], told["offset"])))
    ended = ended_within(records, unix(asked["window_from"]), unix(asked["window_until"]))
    values = sorted(item.ttft_s for item in ended if item.ttft_s is not None)
    assert zeros + sum(counts.values()) == len(values)
    rank = ceil(0.99 * len(values))
    places = accumulate(counts[index] for index in sorted(counts))
    bucket = next(i for i, n in zip(sorted(counts), places, strict=True) if n + zeros >= rank)
    assert 2 ** (bucket / 64) <= values[rank - 1] <= 2 ** ((bucket + 1) / 64)
    (without, *_) = busy.ask("breakdown", window="2h")["groups"]
    assert without["histograms"] is None


def test_an_answer_says_what_it_is_about_and_is_empty_where_nothing_was_asked(
    api: Api, busy: Api
) -> None:
    summary = busy.ask("summary", window="2h")
    told = busy.ask("breakdown", by="model", window="2h")
    stated = ("window_from", "window_until", "window_s", "relative_error")
    assert told.keys() == {*stated, "by", "groups", "left_out"}
    assert {name: told[name] for name in stated} == {name: summary[name] for name in stated}
    assert told["by"] == "model"
    assert (api.ask("breakdown")["groups"], api.ask("breakdown")["by"]) == ([], "input_length")


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"by": "tenants"}, "by"), ({"window": "401d"}, "window"), ({"limit": "0"}, "limit")],
)
def test_what_cannot_be_answered_is_refused_with_a_sentence(
    busy: Api, asked: dict[str, str], said: str
) -> None:
    status, sentence = busy.refusal("breakdown", **asked)
    assert status == 422
    assert sentence.startswith(f"{said}: ")


@pytest.fixture
def priced(api: Api) -> list[RequestRecord]:
    """Requests with a price, after one from before the window and before some without."""
    ended_at = api.around.now - 1
    facts = [
        {"tenant": tenant, "input_tokens": tokens, "engine": engine, "ended_at": ended_at}
        for tenant in ("acme", "umbrella", None)
        for tokens in (100, 1024, None)
        for engine in ("chat-0", "chat-1")
    ]
    told = [record(number, **each) for number, each in enumerate(facts, start=1)]
    before = record(99, tenant="acme", ended_at=ended_at - 3600)
    api.store([before, *told], [objective()])
    api.price([before, *told[:-4]])
    return told[:-4]


@each_dimension
@pytest.mark.parametrize("engine", [None, "chat-1"])
def test_groups_cost_what_their_requests_do(
    api: Api, priced: list[RequestRecord], by: Dimension, engine: str | None
) -> None:
    selection = {} if engine is None else {"engine": engine}
    told = api.ask("breakdown", by=by, cost="true", **selection)
    for name, group in groups(told).items():
        of = [item for item in chosen(priced, **selection) if value_of(item, by) == name]
        assert group["cost"] == {
            "requests": len(of),
            "cost_usd": pytest.approx(sum(usd(item) for item in of)) if of else None,
            "gpu_hours": pytest.approx(sum(usd(item) / 4 for item in of)) if of else None,
        }


def usd(item: RequestRecord) -> float:
    """What a test's request costs, by its number, at 4 dollars an hour."""
    return int(item.trace_id, 16) / 8


def test_costs_are_told_where_they_are_asked_for(api: Api, priced: list[RequestRecord]) -> None:
    assert priced
    assert {group["cost"] for group in api.ask("breakdown", by="tenant")["groups"]} == {None}


def test_requests_of_an_objective_cost_what_it_covers(
    api: Api, priced: list[RequestRecord]
) -> None:
    told = groups(api.ask("breakdown", by="model", cost="true", objective="chat"))
    assert told["llama"]["cost"]["requests"] == len(priced)
    assert api.ask("breakdown", by="model", cost="true", objective="long")["groups"] == []
