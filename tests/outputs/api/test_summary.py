"""The figures of a window, against the stored requests counted one by one."""

from typing import Any

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.records.objective import Match
from agent.records.request import RequestRecord, Vantage
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import NOW, chosen, counts, ended_within, exact, unix
from tests.records.making import NOON, objective, record

WINDOWS = {
    **{"10s": 10, "1m": 60, "5m": 300, "90m": 5400, "2h": 7200},
    **{"1d": 86400, "7d": 604800, "30d": 2592000, "400d": 34560000},
}
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
KEYS = {
    *("requests", "met", "missed", "undetermined", "attainment", "goodput_rps"),
    *("goodput_tokens_per_s", "throughput_rps", "input_tokens_per_s", "output_tokens_per_s"),
    *("error_ratio", *LATENCIES, "window_from", "window_until", "window_s", "relative_error"),
    *("simulated", "mfu", "mbu", "efficiency", "cost", "causes"),
}
SELECTIONS: list[dict[str, str]] = [
    {},
    {"engine": "chat-0"},
    {"model": "qwen"},
    {"tenant": "acme"},
    {"objective": "chat"},
    {"objective": "long"},
    {"engine": "chat-1", "model": "llama", "tenant": "acme", "objective": "long"},
]

each_selection = pytest.mark.parametrize(
    "selection", SELECTIONS, ids=lambda chosen: ",".join(chosen.values()) or "all"
)


def meant(
    records: list[RequestRecord], told: dict[str, Any], selection: dict[str, str]
) -> list[RequestRecord]:
    """The requests that an answer speaks of, by the window that it states."""
    window = unix(told["window_from"]), unix(told["window_until"])
    return ended_within(chosen(records, **selection), *window)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_ends_now_and_is_as_long_as_asked_but_for_the_grid(busy: Api, window: str) -> None:
    told = busy.ask("summary", window=window)
    window_from, window_until = unix(told["window_from"]), unix(told["window_until"])
    grid_s = {"1d": 60, "7d": 3600, "30d": 86400, "400d": 86400}.get(window, 10)
    assert window_until == NOW
    assert window_from % grid_s == 0
    assert told["window_s"] == window_until - window_from
    assert abs(told["window_s"] - WINDOWS[window]) <= grid_s / 2


@pytest.mark.parametrize("window", WINDOWS)
@each_selection
def test_counts_and_rates_are_exact_for_the_stated_window(
    busy: Api, records: list[RequestRecord], window: str, selection: dict[str, str]
) -> None:
    told = busy.ask("summary", window=window, **selection)
    of = meant(records, told, selection)
    counted = counts(of, selection.get("objective", ""))
    assert {name: told[name] for name in counted} == counted
    judged = counted["met"] + counted["missed"]
    assert told["attainment"] == (counted["met"] / judged if judged else None)
    rates = {
        "goodput_rps": counted["met"],
        "throughput_rps": sum(item.status == "ok" for item in of),
        "output_tokens_per_s": sum(item.output_tokens or 0 for item in of),
    }
    for name, count in rates.items():
        assert told[name] == pytest.approx(count / told["window_s"], rel=1e-12), name


@pytest.mark.parametrize("window", ["1m", "5m", "2h"])
@each_selection
def test_percentiles_are_within_the_stated_error_of_the_exact_ones(
    busy: Api, records: list[RequestRecord], window: str, selection: dict[str, str]
) -> None:
    told = busy.ask("summary", window=window, **selection)
    assert told["relative_error"] == RELATIVE_ERROR
    of = meant(records, told, selection)
    for name in LATENCIES:
        values_s = [getattr(item, name.replace("_ms", "_s")) for item in of]
        for q in (50, 95, 99):
            wanted = exact(values_s, q / 100)
            # Below a microsecond nothing is told apart.
            near = pytest.approx(wanted, rel=RELATIVE_ERROR * (1 + 1e-9), abs=0.0011)
            assert told[name][f"p{q}"] == (None if wanted is None else near), (name, q)


def test_an_answer_has_every_promised_key(api: Api, busy: Api) -> None:
    for told in (api.ask("summary"), busy.ask("summary", window="2h")):
        assert told.keys() == KEYS
        for name in LATENCIES:
            assert list(told[name]) == ["p50", "p95", "p99"]
        assert told["simulated"] is True


def test_the_window_is_five_minutes_where_none_is_asked_for(busy: Api) -> None:
    assert busy.ask("summary") == busy.ask("summary", window="5m")


def test_empty_parameters_are_none(busy: Api) -> None:
    asked = busy.ask("summary", window="5m", engine="", model="", tenant="", objective="")
    assert asked == busy.ask("summary", window="5m")


@pytest.mark.parametrize("wanted", ["engine", "model", "tenant", "objective"])
@pytest.mark.parametrize("name", ["no-such-thing", "%", "_hat", "chat-", "CHAT", "cha", "hat", ","])
def test_a_name_that_nobody_has_selects_nothing(busy: Api, wanted: str, name: str) -> None:
    assert busy.ask("summary", window="2h", **{wanted: name})["requests"] == 0


def test_an_empty_database_knows_nothing_and_says_so(api: Api) -> None:
    told = api.ask("summary")
    assert told["requests"] == 0
    unknown = ("attainment", "error_ratio", "mfu", "mbu", "cost", "causes")
    assert [told[name] for name in unknown] == [None] * len(unknown)
    assert all(told[name] == {"p50": None, "p95": None, "p99": None} for name in LATENCIES)


def test_what_was_not_told_is_null_and_never_zero(api: Api) -> None:
    unseen = dict.fromkeys(("ttft_s", "tpot_s", "e2e_s", "queue_s"))
    silent = record(1, **unseen, input_tokens=None, output_tokens=None, ended_at=api.around.now - 1)
    api.store([silent], [objective()])
    told = api.ask("summary")
    assert (told["requests"], told["undetermined"]) == (1, 1)
    null = ("attainment", "goodput_tokens_per_s", "input_tokens_per_s", "output_tokens_per_s")
    assert [told[name] for name in null] == [None] * len(null)
    assert told["goodput_rps"] == 0


def test_failures_are_a_share_only_where_they_can_be_seen(api: Api) -> None:
    ended_at = api.around.now - 1
    api.store(
        [record(n, status=s, vantage=Vantage.PROXY, ended_at=ended_at, engine="seen")
         for n, s in enumerate(("ok", "ok", "ok", "error"))]
        + [record(9, ended_at=ended_at, engine="unseen")],
        [objective()],
    )  # fmt: skip
    ratio = {name: api.ask("summary", engine=name)["error_ratio"] for name in ("seen", "unseen")}
    assert ratio == {"seen": 0.25, "unseen": None}
    assert api.ask("summary")["error_ratio"] is None


def test_requests_count_by_the_time_they_ended(api: Api) -> None:
    api.around.now = NOON + 60
    api.store(
        [
            record(1, started_at=NOON - 500, ended_at=NOON + 0.001),
            record(2, started_at=NOON - 5, ended_at=NOON - 0.001),
            record(3, started_at=NOON, ended_at=NOON + 59.999),
        ],
        [objective()],
    )
    assert api.ask("summary", window="1m")["requests"] == 2


def test_an_objective_counts_only_the_requests_that_it_covers(api: Api) -> None:
    ended_at = api.around.now - 1
    objectives = [objective("all"), objective("qwen", match=Match(model="qwen"), ttft_s=0.05)]
    records = [
        record(n, model=model, ended_at=ended_at) for n, model in enumerate(["qwen", "llama"])
    ]
    api.store(records, objectives)
    told = {name: api.ask("summary", objective=name) for name in ("all", "qwen")}
    assert [(told[n]["requests"], told[n]["attainment"]) for n in told] == [(2, 1.0), (1, 0.0)]
    # All together, a request is as good as its worst verdict.
    assert api.ask("summary")["attainment"] == 0.5


@pytest.mark.parametrize(
    ("window", "said"),
    [
        ("9s", "window: 9s is not between 10s and 400d"),
        ("0s", "window: 0s is not between"),
        ("401d", "window: 401d is not between 10s and 400d"),
        ("9999999999999w", "window: 9999999999999w is not between"),
        ("9" * 400 + "d", "is not between"),
        ("", "window: '' is no duration; write a number and s, m, h, d or w, as in 30d"),
        ("5", "window: '5' is no duration"),
        ("-5m", "window: '-5m' is no duration"),
        ("5m;DROP TABLE requests", "is no duration"),
        ("nan", "is no duration"),
    ],
)
def test_a_window_that_cannot_be_answered_is_refused_with_a_sentence(
    busy: Api, window: str, said: str
) -> None:
    status, sentence = busy.refusal("summary", window=window)
    assert status == 422
    assert said in sentence
