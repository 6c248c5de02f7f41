"""The API shows what engines counted themselves, beside the figures of requests with a row."""

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from agent.catalog import engine_facts as fact
from agent.records.engine import HistogramSnapshot
from agent.records.engine_counts import EngineCounts, GaugeSum
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import unix
from tests.records.making import NOON, objective, record

RATES = ("goodput_rps", "throughput_rps", "input_tokens_per_s", "output_tokens_per_s")
CHAT = objective(ttft_s=0.5, tpot_s=None, e2e_s=4.0)


def counts(requests: float = 20.0, running: float = 2.0) -> EngineCounts:
    """Five seconds in which so many requests ended."""
    part = requests / 20.0
    return EngineCounts(
        covered_s=5.0,
        counters={
            (fact.REQUESTS_FINISHED.name, ("stop",)): 15.0 * part,
            (fact.REQUESTS_FINISHED.name, ("abort",)): 5.0 * part,
            (fact.INPUT_TOKENS.name, ()): 1000.0 * part,
            (fact.CACHED_INPUT_TOKENS.name, ()): 250.0 * part,
            (fact.OUTPUT_TOKENS.name, ()): 500.0 * part,
        },
        gauges={
            (fact.REQUESTS_RUNNING.name, ()): GaugeSum(running * 5.0, 5.0, running),
            (fact.KV_CACHE_USAGE.name, ()): GaugeSum(2.0, 5.0, 0.7),
        },
        histograms={
            fact.TIME_TO_FIRST_TOKEN.name: HistogramSnapshot(
                (0.25, 0.5, 1.0, inf), (10 * part, 18 * part, 20 * part, 20 * part), 6.0 * part
            ),
            fact.REQUEST_DURATION.name: HistogramSnapshot(
                (2.5, 5.0, inf), (6 * part, 15 * part, 15 * part), 45.0 * part
            ),
        },
    )


@pytest.fixture
def now(api: Api) -> float:
    """The time of the newest sample: the begin of a minute is a few seconds ago."""
    api.agent.now = NOON + 300.0 + 7.0
    return api.agent.now


def summary(api: Api, **asked: str) -> dict[str, Any]:
    found: dict[str, Any] = api.get("/api/v1/summary", **asked).json()
    return found


def test_an_engine_that_nobody_traces_has_rates_tokens_and_percentiles(
    api: Api, now: float
) -> None:
    api.store_engine_sample("chat-0", now - 5.0, counts())
    api.store_engine_sample("chat-0", now, counts())
    counted = summary(api)["engine_counts"]
    assert (counted["requests"], counted["completed"], counted["aborted"]) == (40, 30, 10)
    assert counted["throughput_rps"] == pytest.approx(3.0)
    assert counted["output_tokens_per_s"] == pytest.approx(100.0)
    assert counted["cached_ratio"] == pytest.approx(0.25)
    assert (counted["running"], counted["kv_cache_usage_max"]) == (2.0, 0.7)
    assert unix(counted["counted_until"]) == now
    ttft = counted["latencies_ms"]["ttft"]
    assert (ttft["source"], ttft["count"], ttft["mean"]) == ("engine_histogram", 40, 300.0)
    assert ttft["p95"]["lower"] == 500.0
    assert ttft["p95"]["upper"] == 1000.0
    assert "tpot" not in counted["latencies_ms"]
    for selection in ({"tenant": "acme"}, {"objective": "chat"}, {"engine": "chat-1"}):
        assert summary(api, **selection)["engine_counts"] is None


def test_rates_of_requests_are_unknown_until_rows_show_them_and_attainment_has_bounds(
    api: Api, now: float
) -> None:
    api.set_objectives([CHAT])
    api.store_engine_sample("chat-0", now, counts())
    found = summary(api)
    assert [found[name] for name in RATES] == [None] * len(RATES)
    assert found["engine_counts"]["rows_ratio"] == 0.0
    # 18 of 20 had their first token in time; of 15, 6 surely and perhaps all ended in time.
    (attained,) = found["engine_counts"]["attainment"]
    assert attained["lower"] == pytest.approx(0.9 + 6 / 15 - 1)
    assert (attained["objective"], attained["upper"]) == ("chat", pytest.approx(0.9))
    api.store([record(n, ended_at=now - 2.0) for n in range(1, 16)], [CHAT])
    found = summary(api)
    assert found["throughput_rps"] > 0
    assert found["engine_counts"]["rows_ratio"] == pytest.approx(0.75)


def test_rates_of_an_idle_engine_are_zero(api: Api, now: float) -> None:
    api.store_engine_sample("chat-0", now - 120.0)
    api.store_engine_sample("chat-0", now, counts(requests=0.0, running=0.0))
    found = summary(api)
    assert [found[name] for name in RATES] == [0.0] * len(RATES)
    assert found["engine_counts"]["latencies_ms"] == {}


def test_steps_of_whole_minutes_have_counts_of_their_own(api: Api, now: float) -> None:
    for ago in (125.0, 65.0, 5.0):
        api.store_engine_sample("chat-0", now - ago, counts())
    steps = api.get("/api/v1/timeseries", window="3m", step="1m").json()["items"]
    found = [each["engine_counts"] and each["engine_counts"]["requests"] for each in steps]
    assert sorted(found, key=str) == sorted([20.0, 20.0, 20.0, *[None] * (len(steps) - 3)], key=str)
    api.store([record(1, ended_at=now - 2.0)], [CHAT])
    steps = api.get("/api/v1/timeseries", window="3m", step="1m").json()["items"]
    assert [each["engine_counts"] for each in steps] == [None] * len(steps)


def saving() -> EngineCounts:
    """The same with 100 tokens loaded from outside the GPU, and 100 drafts of 3 tokens."""
    plain = counts()
    added: dict[tuple[str, tuple[str, ...]], float] = {
        (fact.EXTERNAL_CACHE_QUERY_TOKENS.name, ()): 400.0,
        (fact.EXTERNAL_CACHE_HIT_TOKENS.name, ()): 100.0,
        (fact.KV_OFFLOAD_LOAD_TIME.name, ()): 0.5,
        (fact.SPEC_DECODE_DRAFTS.name, ()): 100.0,
        (fact.SPEC_DECODE_DRAFT_TOKENS.name, ()): 300.0,
        (fact.SPEC_DECODE_ACCEPTED_TOKENS.name, ()): 120.0,
        (fact.SPEC_DECODE_ACCEPTED_BY_POSITION.name, ("0",)): 80.0,
        (fact.SPEC_DECODE_ACCEPTED_BY_POSITION.name, ("1",)): 40.0,
    }
    prefill = HistogramSnapshot((1.0, inf), (20.0, 20.0), 15.0)
    return replace(
        plain,
        counters={**plain.counters, **added},
        histograms={**plain.histograms, fact.PREFILL_TIME.name: prefill},
    )


def test_what_loads_and_drafts_save_is_shown_by_engine(api: Api, now: float) -> None:
    api.store_engine_sample("chat-0", now, saving())
    api.store_engine_sample("chat-1", now, counts())
    (found,) = summary(api)["engine_counts"]["savings"]
    assert found["engine"] == "chat-0"
    assert found["offload"] == {
        "query_tokens": 400.0,
        "hit_tokens": 100.0,
        "hit_ratio": 0.25,
        "saved_s": pytest.approx(100 * 15 / 750),
        "load_s": 0.5,
        "verdict": "pays",
    }
    drafts = found["speculation"]
    assert (drafts["mean_accepted_length"], drafts["acceptance_ratio"]) == (2.2, 0.4)
    assert drafts["accepted_ratio_by_position"] == {"0": 0.8, "1": 0.4}
    assert (drafts["speedup"], drafts["verdict"]) == (None, "unknown")
