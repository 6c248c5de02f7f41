"""The summary and the time series of a window."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import (
    NOW,
    OBJECTIVES,
    RATES,
    chosen,
    counts,
    ended_within,
    latencies_s,
    quantile_of,
    unix,
)
from tests.records.making import NOON, objective, record

WINDOWS = {
    **{"10s": 10, "1m": 60, "5m": 300, "90m": 5400, "2h": 7200},
    **{"1d": 86400, "7d": 604800, "30d": 2592000, "400d": 34560000},
}
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
SELECTIONS: list[dict[str, str]] = [
    {},
    {"tenant": "acme"},
    {"objective": "chat"},
    {"engine": "chat-1", "model": "llama", "tenant": "acme", "objective": "long"},
]

each_selection = pytest.mark.parametrize(
    "selection", SELECTIONS, ids=lambda chosen: ",".join(chosen.values()) or "all"
)


def requests_in(
    records: list[RequestRecord], summary: dict[str, Any], selection: dict[str, str]
) -> list[RequestRecord]:
    window = unix(summary["window_from"]), unix(summary["window_until"])
    return ended_within(chosen(records, **selection), *window)


def attained(ended: list[RequestRecord], name: str) -> dict[str, Any]:
    """Return the verdicts of an objective on these requests, counted exactly."""
    counted = counts(chosen(ended, objective=name), name)
    del counted["requests"]
    judged = counted["met"] + counted["missed"]
    attainment = counted["met"] / judged if judged else None
    return {"objective": name, **counted, "attainment": attainment}


@pytest.mark.parametrize("window", WINDOWS)
def test_a_window_ends_now_and_is_rounded_to_the_grid(busy: Api, window: str) -> None:
    summary = busy.query("summary", window=window)
    window_from, window_until = unix(summary["window_from"]), unix(summary["window_until"])
    grid_s = {"1d": 60, "7d": 3600, "30d": 86400, "400d": 86400}.get(window, 10)
    assert window_until == NOW
    assert window_from % grid_s == 0
    assert summary["grid_s"] == grid_s
    assert summary["window_s"] == window_until - window_from
    assert abs(summary["window_s"] - WINDOWS[window]) <= grid_s / 2


@pytest.mark.parametrize("window", ["10s", "5m", "30d"])
@each_selection
def test_counts_and_rates_are_exact_for_the_stated_window(
    busy: Api, records: list[RequestRecord], window: str, selection: dict[str, str]
) -> None:
    summary = busy.query("summary", window=window, **selection)
    ended = requests_in(records, summary, selection)
    counted = counts(ended, selection.get("objective", ""))
    assert {name: summary[name] for name in counted} == counted
    names = [selection["objective"]] if "objective" in selection else ["chat", "long"]
    assert summary["by_objective"] == [attained(ended, name) for name in names]
    only = summary["by_objective"][0]["attainment"] if len(names) == 1 else None
    assert summary["attainment"] == only
    rates = {
        "goodput_rps": counted["met"],
        "throughput_rps": sum(item.status == "ok" for item in ended),
        "output_tokens_per_s": sum(item.output_tokens or 0 for item in ended),
    }
    for name, count in rates.items():
        assert summary[name] == pytest.approx(count / summary["covered_s"], rel=1e-12), name


@pytest.mark.parametrize("window", ["5m", "2h"])
@each_selection
def test_percentiles_are_within_the_stated_error_of_the_exact_ones(
    busy: Api, records: list[RequestRecord], window: str, selection: dict[str, str]
) -> None:
    summary = busy.query("summary", window=window, **selection)
    assert summary["relative_error"] == RELATIVE_ERROR
    ended = requests_in(records, summary, selection)
    for name in LATENCIES:
        values_s = latencies_s(ended, name)
        for q in (50, 95, 99):
            assert summary[name][f"p{q}"] == quantile_of(values_s, q / 100), (name, q)


def test_empty_parameters_are_ignored(busy: Api) -> None:
    summary = busy.query("summary", window="5m", engine="", model="", tenant="", objective="")
    assert summary == busy.query("summary") == busy.query("summary", window="5m")


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        ("9s", "window: 9s is not between 10s and 400d"),
        ("401d", "window: 401d is not between 10s and 400d"),
        ("9" * 400 + "d", "is not between"),
        ("", "window: '' is not a duration; write a number and s, m, h, d or w, as in 30d"),
        ("-5m", "window: '-5m' is not a duration"),
        ("5m;DROP TABLE requests", "is not a duration"),
        ("nan", "is not a duration"),
    ],
)
def test_an_invalid_window_is_refused_with_a_sentence(busy: Api, window: str, reason: str) -> None:
    status, sentence = busy.refusal("summary", window=window)
    assert status == 422
    assert reason in sentence


# A window of the past


def iso(at: float, hours: int = 0) -> str:
    return datetime.fromtimestamp(at, timezone(timedelta(hours=hours))).isoformat()


PAST = {
    "both in ISO": {"from": iso(NOON - 1793), "until": iso(NOON - 1199)[:-6] + "Z"},
    "with a time zone": {"from": iso(NOON - 1793, 2), "until": iso(NOON - 1199, -5)},
    "in Unix seconds": {"from": f"{NOON - 1793}", "until": f"{NOON - 1199}"},
    "relative": {"from": f"now-{NOW - NOON + 1793}s", "until": f"now-{NOW - NOON + 1199}s"},
    "begin and length": {"from": f"{NOON - 1793}", "window": "594s"},
    "end and length": {"until": f"{NOON - 1199}", "window": "594s"},
}


@pytest.mark.parametrize("asked", PAST.values(), ids=PAST)
@pytest.mark.parametrize("selection", SELECTIONS[:3], ids=["all", "tenant", "objective"])
def test_a_window_of_the_past_has_what_ended_in_it_on_the_grid_around_it(
    busy: Api,
    records: list[RequestRecord],
    asked: dict[str, str],
    selection: dict[str, str],
) -> None:
    summary = busy.query("summary", **asked, **selection)
    window = unix(summary["window_from"]), unix(summary["window_until"])
    assert window == (NOON - 1800, NOON - 1190)
    ended = requests_in(records, summary, selection)
    assert ended
    counted = counts(ended, selection.get("objective", ""))
    assert {name: summary[name] for name in counted} == counted
    for q in (50, 95, 99):
        assert summary["ttft_ms"][f"p{q}"] == quantile_of(latencies_s(ended, "ttft_ms"), q / 100)


def test_steps_and_groups_of_the_past_add_up_to_its_summary(busy: Api) -> None:
    asked = PAST["both in ISO"]
    summary = busy.query("summary", **asked)
    steps = busy.query("timeseries", **asked, step="1m")["items"]
    assert [unix(step["at"]) - NOON for step in steps] == [60 * n - 1800 for n in range(11)]
    groups = busy.query("breakdown", **asked, by="engine")["groups"]
    for parts in (steps, groups):
        assert sum(part["requests"] for part in parts) == summary["requests"]


def test_a_window_that_is_shorter_than_its_grid_has_one_step(busy: Api) -> None:
    asked = {"from": f"{NOON - 4 * 86400 + 60}", "window": "20m"}
    (step,) = busy.query("timeseries", **asked, step="1h")["items"]
    assert (unix(step["at"]) % 3600, step["window_s"]) == (0, 3600)
    # Sums of shorter times are kept no longer.
    summary = busy.query("summary", **asked)
    assert (unix(summary["window_from"]) % 3600, summary["window_s"]) == (0, 3600)


def test_an_objective_of_the_past_has_its_attainment_and_the_budget_that_was_left_then(
    api: Api, records: list[RequestRecord]
) -> None:
    api.agent.now = NOW
    api.set_objectives(OBJECTIVES)
    api.store(records, OBJECTIVES)
    until = NOON - 1200
    found = api.query("objectives", until=f"{until}", window="20m")["items"]
    for item in found:
        ended = [each for each in records if each.ended_at < until]
        window = ended_within(ended, until - 1200, until)
        expected = attained(window, item["name"])
        assert {name: item[name] for name in ("met", "missed", "attainment")} == {
            name: expected[name] for name in ("met", "missed", "attainment")
        }
        budget = attained(ended, item["name"])
        assert (item["budget"]["met"], item["budget"]["missed"]) == (
            budget["met"],
            budget["missed"],
        )
    assert len(found) == len(OBJECTIVES)


def test_the_budget_of_the_past_is_of_the_sums_that_are_still_kept(api: Api) -> None:
    api.set_objectives([objective("chat", window_s=5400.0)])
    (item,) = api.query("objectives", until="now-4d", window="1h")["items"]
    assert item["budget"]["window_s"] % 3600 == 0


def test_a_window_until_now_is_the_window_before_now(busy: Api) -> None:
    last = busy.query("summary", window="5m")
    assert busy.query("summary", window="5m", until="now") == last
    # As a clock that is ahead says it.
    assert busy.query("summary", window="5m", until=iso(NOW + 30)) == last
    assert busy.query("summary", **{"from": last["window_from"]}) == last


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"from": "yesterday"}, "from: 'yesterday' is not a moment; write ISO 8601"),
        ({"until": "now-5"}, "until: 'now-5' is not a moment"),
        ({"until": "now5"}, "until: 'now5' is not a moment"),
        ({"from": "nan"}, "from: 'nan' is not a moment"),
        ({"from": "now-5m", "until": "now-6m"}, "from: the window must be 10s or longer"),
        ({"from": "9999-12-31"}, "from: the window must be 10s or longer, and end in the past"),
        ({"from": "2020-01-01"}, "from: figures are kept for 400d"),
        ({"from": "now-2h", "until": "now", "window": "1h"}, "window: give two of window, from"),
    ],
)
def test_a_window_that_cannot_be_is_refused_with_a_sentence(
    busy: Api, asked: dict[str, str], reason: str
) -> None:
    status, sentence = busy.refusal("summary", **asked)
    assert status == 422
    assert reason in sentence


# A window that is older than the data


def test_rates_are_over_the_time_since_the_data_begins(api: Api) -> None:
    """2,751 requests in the 46 minutes since an agent's start are one a second, not 0.001."""
    now = api.agent.now
    ages_s = [2750.0 - number for number in range(2751)]
    api.store([record(n, ended_at=now - age_s) for n, age_s in enumerate(ages_s)], [objective()])
    for window in ("30d", "400d", "1d"):
        summary = api.query("summary", window=window)
        assert summary["requests"] == 2751
        assert summary["throughput_rps"] == pytest.approx(1.0, rel=0.01), window
        # The first request ended within the ten seconds of its rollup.
        assert 0 <= now - 2750 - unix(summary["data_from"]) < 10
        assert summary["covered_s"] == now - unix(summary["data_from"])
        assert summary["window_s"] > 86000
    by_engine = api.query("breakdown", by="engine", window="30d")["groups"]
    assert [group["throughput_rps"] for group in by_engine] == [pytest.approx(1.0, rel=0.01)]


def test_an_agent_that_waits_for_its_first_request_has_data(api: Api) -> None:
    now = api.agent.now
    api.store_engine_sample("chat-0", now - 1000)
    api.store([record(ended_at=now - 5)], [objective()])
    summary = api.query("summary", window="1h")
    assert unix(summary["data_from"]) == now - 1000
    assert summary["throughput_rps"] == pytest.approx(1 / 1000)


@pytest.mark.parametrize("engine", ["", "never-seen"])
def test_without_any_data_its_begin_and_all_rates_are_unknown(api: Api, engine: str) -> None:
    if engine:
        api.store([record(engine="chat-0", ended_at=api.agent.now - 5)], [objective()])
    summary = api.query("summary", window="1h", engine=engine)
    assert (summary["data_from"], summary["covered_s"], summary["requests"]) == (None, 0, 0)
    unknown = ("attainment", "error_ratio", "mfu", "mbu", "cost", "causes", *RATES)
    assert [summary[name] for name in unknown] == [None] * len(unknown)
    assert all(summary[name] == {"p50": None, "p95": None, "p99": None} for name in LATENCIES)


STEPS = [
    ("5m", "90s", 90),
    ("5m", "5m", 300),
    ("2h", "7m", 420),
    ("7d", "7d", 604800),
    ("400d", "1d", 86400),
]


@pytest.mark.parametrize(("window", "step", "step_s"), STEPS)
@pytest.mark.parametrize("selection", [{}, {"engine": "chat-0", "objective": "long"}])
def test_steps_follow_each_other_up_to_now_and_count_what_ended_in_them(
    busy: Api,
    records: list[RequestRecord],
    window: str,
    step: str,
    step_s: int,
    selection: dict[str, Any],
) -> None:
    items = busy.query("timeseries", window=window, step=step, **selection)["items"]
    starts = [unix(item["at"]) for item in items]
    assert starts == [starts[0] + index * step_s for index in range(len(starts))]
    assert starts[0] % step_s == 0
    assert starts[-1] <= NOW < starts[-1] + step_s
    members = chosen(records, **selection)
    of_engine = chosen(records, **{k: v for k, v in selection.items() if k == "engine"})
    # The data begins with the ten seconds in which the first request ended.
    begins = min(item.ended_at for item in of_engine) // 10 * 10
    for item, start in zip(items, starts, strict=True):
        until = min(start + step_s, NOW)
        assert item["window_s"] == until - start
        ended = ended_within(members, start, start + step_s)
        counted = counts(ended, selection.get("objective", ""))
        assert {name: item[name] for name in counted} == counted
        covered_s = max(until - max(start, begins), 0)
        rate = pytest.approx(counted["met"] / covered_s) if covered_s else None
        assert (item["covered_s"], item["goodput_rps"]) == (covered_s, rate)


def test_rates_of_steps_before_the_data_are_unknown(api: Api) -> None:
    """An engine that is added in the middle of a step serves a request each second from then on."""
    now = api.agent.now = NOON + 300
    api.store([record(1000, engine="old", ended_at=NOON - 86400)], [objective()])
    api.store([record(n, engine="new", ended_at=NOON + 90 + n) for n in range(210)], [objective()])
    steps = api.query("timeseries", window="5m", step="1m", engine="new")["items"]
    assert [(step["covered_s"], step["throughput_rps"]) for step in steps] == [
        (0, None),
        (30, 1),
        *[(60, 1)] * 3,
    ]
    assert unix(steps[-1]["at"]) + 60 == now
    assert {steps[0][rate] for rate in RATES} == {None}
    assert steps[0]["requests"] == 0
    # The old engine was there, and served nothing.
    idle = api.query("timeseries", window="5m", step="1m", engine="old")["items"]
    assert {step[rate] for step in idle for rate in RATES} == {0}
    both = api.query("timeseries", window="5m", step="1m")["items"]
    assert [step["throughput_rps"] for step in both] == [0, 0.5, 1, 1, 1]


@pytest.mark.parametrize(
    ("window", "step", "reason"),
    [
        ("5m", "0s", "step: 0s is not a multiple of 10s"),
        ("5m", "7s", "step: 7s is not a multiple of 10s, the grid of this window"),
        ("5m", "0.5s", "step: 0.5s is not a multiple of 10s"),
        ("60d", "1h", "step: 1h is not a multiple of 86400s"),
        ("5m", "6m", "step: 6m is longer than the window"),
        ("5m", "9" * 400 + "d", "step: "),
        ("3h", "10s", "step: 10s makes more than 1000 steps of this window"),
        ("5m", "", "step: '' is not a duration"),
        ("1y", "1m", "window: '1y' is not a duration"),
    ],
)
def test_invalid_steps_are_refused_with_a_sentence(
    busy: Api, window: str, step: str, reason: str
) -> None:
    status, sentence = busy.refusal("timeseries", window=window, step=step)
    assert status == 422
    assert sentence.startswith(reason)
