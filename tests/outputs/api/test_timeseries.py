"""Time series: the steps add up to the window."""

from typing import Any

import pytest

from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import NOW, RATES, chosen, counts, ended_within, unix
from tests.records.making import NOON, objective, record

STEPS = [
    ("1m", "10s", 10),
    ("5m", "10s", 10),
    ("5m", "1m", 60),
    ("5m", "90s", 90),
    ("5m", "5m", 300),
    ("2h", "1m", 60),
    ("2h", "7m", 420),
    ("1d", "10m", 600),
    ("7d", "1h", 3600),
    ("7d", "7d", 604800),
    ("14d", "1h", 3600),
    ("30d", "1d", 86400),
    ("400d", "1d", 86400),
]
COUNTED = ("requests", "met", "missed", "undetermined")

each_step = pytest.mark.parametrize(("window", "step", "step_s"), STEPS)


@each_step
def test_steps_follow_each_other_up_to_now(busy: Api, window: str, step: str, step_s: int) -> None:
    items = busy.query("timeseries", window=window, step=step)["items"]
    starts = [unix(item["at"]) for item in items]
    assert starts == [starts[0] + index * step_s for index in range(len(starts))]
    assert starts[0] % step_s == 0
    assert starts[-1] <= NOW < starts[-1] + step_s
    assert [item["window_s"] for item in items[:-1]] == [step_s] * (len(items) - 1)
    assert items[-1]["window_s"] == NOW - starts[-1]


@each_step
@pytest.mark.parametrize("selection", [{}, {"engine": "chat-0", "objective": "long"}])
def test_each_step_counts_the_requests_that_ended_in_it(
    busy: Api,
    records: list[RequestRecord],
    window: str,
    step: str,
    step_s: int,
    selection: dict[str, Any],
) -> None:
    members = chosen(records, **selection)
    of_engine = chosen(records, **{k: v for k, v in selection.items() if k == "engine"})
    # The data begins with the ten seconds in which the first request ended.
    begins = min(item.ended_at for item in of_engine) // 10 * 10
    for item in busy.query("timeseries", window=window, step=step, **selection)["items"]:
        start = unix(item["at"])
        counted = counts(
            ended_within(members, start, start + step_s), selection.get("objective", "")
        )
        assert {name: item[name] for name in COUNTED} == counted
        covered_s = max(min(start + step_s, NOW) - max(start, begins), 0)
        rate = pytest.approx(counted["met"] / covered_s) if covered_s else None
        assert (item["covered_s"], item["goodput_rps"]) == (covered_s, rate)


@pytest.mark.parametrize("window", ["1m", "5m", "2h"])
def test_steps_add_up_to_the_summary(busy: Api, window: str) -> None:
    summary = busy.query("summary", window=window)
    # The step is that of the summary, so that both windows begin at the same second.
    items = busy.query("timeseries", window=window, step="10s")["items"]
    assert items[0]["at"] == summary["window_from"]
    for name in COUNTED:
        assert sum(item[name] for item in items) == summary[name]
    for rate in ("goodput_rps", "throughput_rps", "output_tokens_per_s"):
        added = sum(item[rate] * item["covered_s"] for item in items if item["covered_s"])
        assert added == pytest.approx(summary[rate] * summary["covered_s"])


def test_rates_of_the_last_step_use_its_real_length(api: Api) -> None:
    api.agent.now = NOON + 66
    api.store(
        [record(n, ended_at=NOON + second) for n, second in enumerate((6, 18, 30, 42, 54, 62))],
        [objective()],
    )
    items = api.query("timeseries", window="1m", step="1m")["items"]
    rates = [(item["window_s"], item["goodput_rps"]) for item in items[-2:]]
    assert rates == [(60, pytest.approx(5 / 60)), (6, pytest.approx(1 / 6))]


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


def test_a_step_without_requests_is_listed_with_unknown_latencies(api: Api) -> None:
    items = api.query("timeseries", window="1m", step="10s")["items"]
    assert [item["requests"] for item in items] == [0] * len(items)
    assert {item["attainment"] for item in items} == {None}
    assert items[0]["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


def test_the_default_is_an_hour_in_minutes(busy: Api) -> None:
    assert busy.query("timeseries") == busy.query("timeseries", window="1h", step="1m")


@pytest.mark.parametrize(
    ("window", "step", "reason"),
    [
        ("5m", "0s", "step: 0s is no multiple of 10s, the grid of this window"),
        ("5m", "7s", "step: 7s is no multiple of 10s, the grid of this window"),
        ("5m", "0.5s", "step: 0.5s is no multiple of 10s"),
        ("1d", "10s", "step: 10s is no multiple of 60s, the grid of this window"),
        ("7d", "90s", "step: 90s is no multiple of 3600s"),
        ("60d", "1h", "step: 1h is no multiple of 86400s"),
        ("5m", "6m", "step: 6m is longer than the window"),
        ("5m", "365000d", "step: 365000d is longer than the window"),
        ("5m", "9" * 400 + "d", "step: "),
        ("3h", "10s", "step: 10s makes more than 1000 steps of this window"),
        ("5m", "", "step: '' is no duration"),
        ("5m", "1", "step: '1' is no duration"),
        ("1y", "1m", "window: '1y' is no duration"),
        ("401d", "1d", "window: 401d is not between 10s and 400d"),
    ],
)
def test_invalid_steps_are_refused_with_a_sentence(
    busy: Api, window: str, step: str, reason: str
) -> None:
    status, sentence = busy.refusal("timeseries", window=window, step=step)
    assert status == 422
    assert sentence.startswith(reason)
