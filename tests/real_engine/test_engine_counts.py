"""What the real vLLM counts: under 12 loads, its own requests lie inside each of our intervals.

The truth is vLLM's benchmark for requests and tokens, and the engine's spans for latencies.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil, inf

import pytest

from agent.analysis.engine_counts import counts_between
from agent.analysis.engine_figures import CountedEngine, EngineFigures, engine_figures
from agent.analysis.histogram_bounds import Bounds
from agent.analysis.summary import QUANTILES
from agent.records.engine import EngineSample
from agent.sources.engines.engine_source import EngineSource
from tests.real_engine.watching import ENGINE, LIMITS, Row, rows_once_there, settings
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.bench import BenchmarkResult, BenchmarkRunner, Load
from tests.real_parts.collector import Collector
from tests.real_parts.vllm import Vllm
from tests.real_parts.waiting import eventually
from tests.records.making import objective

pytestmark = pytest.mark.timeout(1500)

LOADS = [
    Load(
        name=f"counted-{number}",
        requests_per_s=rate,
        prompts=8 + 4 * (number % 5),
        seed=number,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
    )
    for number, (rate, input_tokens, output_tokens) in enumerate(
        product([20, 80, inf], [16, 200], [8, 40])
    )
]
CHAT = objective(ttft_s=LIMITS.ttft_ms / 1000, tpot_s=LIMITS.tpot_ms / 1000, e2e_s=None)
# A span and a histogram of one request are written at moments of their own.
APART_S = 0.002


@dataclass(frozen=True, slots=True)
class CountedLoad:
    """A load as its client saw it, its requests as the engine's spans say, and what was counted."""

    result: BenchmarkResult
    rows: list[Row]
    figures: EngineFigures


@pytest.fixture(scope="module")
def counted(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    collector: Collector,
    ports: AgentPorts,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[CountedLoad]]:
    """Each load alone, with the engine's page read before and after it."""
    folder = tmp_path_factory.mktemp("counted")
    source = EngineSource(name=ENGINE, url=engine.url)
    with AgentProcess.with_settings(folder, ports, settings(engine, collector)) as agent:
        loads = []
        for load in LOADS:
            own = folder / load.name
            own.mkdir()
            before = read(source)
            (result,) = benchmark.run(engine, [load], LIMITS, own)
            (after,) = eventually(
                lambda: [each for each in [read(source)] if idle(each)],
                within_s=60.0,
                what="the end of the load",
            )
            loads.append((result, figures(before, after)))
        names = {request.request_id for result, _ in loads for request in result.requests}
        rows = {row["request_id"]: row for row in rows_once_there(agent.api, names)}
        yield [
            CountedLoad(result, [rows[each.request_id] for each in result.requests], found)
            for result, found in loads
        ]


def read(source: EngineSource) -> EngineSample:
    sample = source.read(time.time()).sample
    assert sample is not None
    return sample


def idle(sample: EngineSample) -> bool:
    return not sample.fact("llm_engine_requests_running")


def figures(before: EngineSample, after: EngineSample) -> EngineFigures:
    counts = counts_between(before, after)
    assert counts is not None
    found = engine_figures([CountedEngine(model=after.model, counts=counts)], [CHAT])
    assert found is not None
    return found


def test_requests_and_tokens_are_those_of_the_client(counted: list[CountedLoad]) -> None:
    for load in counted:
        found, requests = load.figures, load.result.requests
        assert found.requests == found.completed == len(requests)
        tokens = sum(request.output_tokens for request in requests)
        assert found.output_tokens_per_s == pytest.approx(tokens / found.covered_s)


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2e", "queue", "prefill", "decode"])
def test_each_percentile_of_the_requests_lies_in_its_interval(
    counted: list[CountedLoad], name: str
) -> None:
    for load in counted:
        values_s = sorted(row[f"{name}_s"] for row in load.rows if row[f"{name}_s"] is not None)
        for quantile, bounds in load.figures.latencies[name].quantiles_ms.items():
            true_s = values_s[ceil(QUANTILES[quantile] * len(values_s) - 1e-9) - 1]
            assert lies(bounds, 1000 * true_s), (load.result.load, quantile, true_s, bounds)


def lies(bounds: Bounds, value_ms: float) -> bool:
    within_ms = 1000 * APART_S
    upper = inf if bounds.upper is None else bounds.upper
    return bounds.lower - within_ms <= value_ms <= upper + within_ms


def test_the_share_of_good_requests_lies_in_the_bounds_of_attainment(
    counted: list[CountedLoad],
) -> None:
    for load in counted:
        (found,) = load.figures.attainment
        good = sum(map(is_good, load.rows)) / len(load.rows)
        assert found.lower - 1e-9 <= good <= found.upper + 1e-9, (load.result.load, good, found)


def is_good(row: Row) -> bool:
    assert CHAT.ttft_s is not None
    assert CHAT.tpot_s is not None
    return bool(row["ttft_s"] <= CHAT.ttft_s and (row["tpot_s"] or 0.0) <= CHAT.tpot_s)


def test_no_client_was_faster_than_the_interval_says(counted: list[CountedLoad]) -> None:
    for load in counted:
        seen_s = sorted(request.ttft_s for request in load.result.requests)
        for quantile, bounds in load.figures.latencies["ttft"].quantiles_ms.items():
            true_s = seen_s[ceil(QUANTILES[quantile] * len(seen_s) - 1e-9) - 1]
            assert 1000 * true_s >= bounds.lower
