"""Percentiles of a real run: ours within what they state, Prometheus' as its buckets make them."""

from dataclasses import replace
from math import inf

import pytest

from agent.analysis.quantiles import RELATIVE_ERROR
from tests.real_engine.percentile_errors import (
    HISTOGRAMS,
    LOADS,
    PERCENTS,
    Measured,
    Percentile,
    interpolated,
    measure,
)
from tests.real_engine.watching import settings
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.bench import BenchmarkRunner
from tests.real_parts.collector import Collector
from tests.real_parts.vllm import Vllm

pytestmark = pytest.mark.timeout(1500)

# The table of the docs is of twice as many requests.
SHORT_LOADS = [replace(load, prompts=load.prompts // 2) for load in LOADS]
# In README.md and docs/percentiles.md.
STATED = 0.0054

EACH_FIGURE = pytest.mark.parametrize("figure", list(HISTOGRAMS))
EACH_PERCENT = pytest.mark.parametrize("percent", PERCENTS)


@pytest.fixture(scope="module")
def measured(
    engine: Vllm,
    benchmark: BenchmarkRunner,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Measured:
    """One run, watched by an agent whose database knows of no other request."""
    folder = tmp_path_factory.mktemp("percentiles")
    with AgentProcess.with_settings(folder, ports, settings(engine, collector)) as agent:
        return measure(engine, agent.api, folder, benchmark, SHORT_LOADS)


def one(measured: Measured, figure: str, percent: int) -> Percentile:
    """One percentile of one figure."""
    return next(
        one for one in measured.percentiles if (one.figure, one.percent) == (figure, percent)
    )


def test_the_agent_publishes_the_error_of_its_percentiles(measured: Measured) -> None:
    assert measured.relative_error == RELATIVE_ERROR
    assert round(RELATIVE_ERROR, 4) == STATED


@EACH_FIGURE
@EACH_PERCENT
def test_a_percentile_of_the_agent_is_within_its_stated_error_of_the_exact_one(
    measured: Measured, figure: str, percent: int
) -> None:
    assert abs(one(measured, figure, percent).agent_error) <= RELATIVE_ERROR


@EACH_FIGURE
def test_the_engines_buckets_count_the_values_that_the_agent_stored(
    measured: Measured, figure: str
) -> None:
    values_s = measured.values_s(figure)
    assert len(values_s) == sum(load.prompts for load in SHORT_LOADS)
    counted = {
        bound: sum(value_s <= bound for value_s in values_s) for bound in measured.buckets[figure]
    }
    assert counted == measured.buckets[figure]


@EACH_FIGURE
@EACH_PERCENT
def test_histogram_quantile_is_exact_to_a_bucket_alone(
    measured: Measured, figure: str, percent: int
) -> None:
    """It returns a point on a line through the bucket, independent of the values in it."""
    percentile = one(measured, figure, percent)
    buckets = measured.buckets[figure]
    prometheus_s, exact_s = percentile.prometheus_ms / 1000, percentile.exact_ms / 1000
    assert prometheus_s == pytest.approx(interpolated(buckets, percent / 100))
    bound = min(bound for bound in buckets if bound >= exact_s)
    assert bound < inf
    below = max((bound for bound in buckets if bound < exact_s), default=0.0)
    assert below <= prometheus_s <= bound
