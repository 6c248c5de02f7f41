"""Metrics of the simulator against those of a real vLLM."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, Metric, generate_latest

from agent.simulator.batching import Batch, BatchLoad, Step
from agent.simulator.scenario import Scenario
from agent.simulator.simulated_metrics import HistogramRow, MetricsPage, RepeatedHistogram
from tests.simulator.kit import (
    PLAIN,
    engine_request,
    families,
    finished,
    labelled,
    numbered_requests,
    steps,
    totals,
)

PAGES = Path(__file__).parents[1] / "sources" / "engines" / "pages"

# The recorded engine served a model of 2048 tokens.
LIKE_RECORDED = Scenario.model_validate(
    {"max_model_len": 2048, "input_tokens": {"median": 100, "sigma": 1, "min": 1, "max": 1024}}
)


def _recorded() -> list[Metric]:
    return families((PAGES / "vllm-0.32.0.txt").read_text(encoding="utf-8"))


def _exposition(*batches: Batch, scenario: Scenario = PLAIN) -> str:
    metrics = MetricsPage(scenario)
    for batch in batches:
        for step in steps(batch, until_s=60.0):
            metrics.observe(step)
    return metrics.render().decode()


def test_the_core_series_have_the_texts_labels_and_buckets_of_a_real_vllm() -> None:
    # Of labels that differ between engines, only the names are compared.
    differing = {"model_name"}

    def shapes(parsed: list[Metric]) -> dict[tuple[str, ...], set[tuple[str, frozenset[str]]]]:
        return {
            (family.name, family.type, family.documentation): {
                (
                    sample.name,
                    frozenset(
                        key if key in differing else f"{key}={value}"
                        for key, value in sample.labels.items()
                    ),
                )
                for sample in family.samples
                if family.name != "vllm:cache_config_info"
            }
            for family in parsed
            if family.name.startswith("vllm:")
        }

    assert shapes(families(_exposition(scenario=LIKE_RECORDED))) == shapes(_recorded())


def test_the_cache_configuration_has_the_labels_of_vllm_and_the_scenario_s_size() -> None:
    def config(parsed: list[Metric]) -> dict[str, str]:
        (family,) = (family for family in parsed if family.name == "vllm:cache_config_info")
        return family.samples[0].labels

    simulated = config(families(_exposition(scenario=LIKE_RECORDED)))
    assert set(simulated) == set(config(_recorded()))
    assert (simulated["num_gpu_blocks"], simulated["block_size"]) == ("4096", "16")
    assert simulated["kv_cache_size_tokens"] == "65536"


def test_gauges_show_the_load_after_the_last_step() -> None:
    metrics = MetricsPage(PLAIN)
    metrics.observe(Step(load=BatchLoad(running=3, waiting=2, kv_usage=0.25, deferred=1)))
    text = metrics.render().decode()
    assert totals(text)["vllm:num_requests_running"] == 3
    assert totals(text)["vllm:num_requests_waiting"] == 2
    assert totals(text)["vllm:kv_cache_usage_perc"] == 0.25
    reasons = labelled(text, "vllm:num_requests_waiting_by_reason", "reason")
    assert reasons == {"capacity": 1, "deferred": 1}


def test_a_finished_request_is_counted_once_by_its_reason() -> None:
    stopped = engine_request(prompt_tokens=100, output_tokens=5, max_tokens=200)
    cut = engine_request(prompt_tokens=50, output_tokens=7, max_tokens=7)
    sums = totals(exposition := _exposition(Batch(PLAIN, [stopped, cut])))
    reasons = labelled(exposition, "vllm:request_success_total", "finished_reason")
    assert reasons == {"stop": 1, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    assert sums["vllm:e2e_request_latency_seconds_count"] == 2
    assert sums["vllm:request_prompt_tokens_sum"] == sums["vllm:prompt_tokens_total"] == 150
    assert sums["vllm:request_generation_tokens_sum"] == sums["vllm:generation_tokens_total"] == 12
    assert sums["vllm:request_params_max_tokens_sum"] == 207
    assert sums["vllm:iteration_tokens_total_sum"] == 162
    assert sums["vllm:prefix_cache_queries_total"] == 150
    assert sums["vllm:time_to_first_token_seconds_count"] == 2
    assert sums["vllm:inter_token_latency_seconds_count"] == 4 + 6


def test_a_prompt_queries_the_prefix_cache_at_its_start_and_counts_at_its_first_token() -> None:
    metrics, batch = MetricsPage(PLAIN), Batch(PLAIN, [engine_request(prompt_tokens=700)])
    metrics.observe(next(steps(batch)))
    sums = totals(metrics.render().decode())
    assert sums["vllm:prefix_cache_queries_total"] == 700
    assert sums["vllm:prompt_tokens_total"] == 0
    assert sums["vllm:iteration_tokens_total_count"] == 0


def test_histograms_have_the_latencies_of_the_requests() -> None:
    done = finished(steps(Batch(PLAIN, numbered_requests(PLAIN)), until_s=60.0))
    sums = totals(_exposition(Batch(PLAIN, numbered_requests(PLAIN))))
    assert sums["vllm:request_success_total"] == len(done) > 100
    for name, interval in (
        ("e2e_request_latency", sum(d.e2e_s for d in done)),
        ("request_queue_time", sum(d.queue_s for d in done)),
        ("request_prefill_time", sum(d.prefill_s for d in done)),
        ("request_decode_time", sum(d.decode_s for d in done)),
        ("request_inference_time", sum(d.inference_s for d in done)),
        ("request_time_per_output_token", sum(d.tpot_s for d in done)),
    ):
        assert sums[f"vllm:{name}_seconds_sum"] == pytest.approx(interval), name
    assert sums["vllm:num_preemptions_total"] >= sums["vllm:request_num_preemptions_sum"] > 0


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.5, 1.0, 1.5, 5.0, 7.0, 99.0)), st.integers(1, 9)),
        max_size=20,
    )
)
def test_values_observed_many_times_at_once_are_those_of_a_client_library(
    observed: list[tuple[float, int]],
) -> None:
    edges, text, labels = (1, 5, 10), "Waits.", {"model_name": "m", "engine": "0"}
    theirs, ours = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("waits_s", text, tuple(labels), registry=theirs, buckets=edges)
    repeated = RepeatedHistogram(HistogramRow("waits_s", text, "", lambda _: ()), labels, edges)
    ours.register(repeated)
    child = histogram.labels(**labels)
    for value, times in observed:
        repeated.observe(value, times)
        for _ in range(times):
            child.observe(value)

    def page(registry: CollectorRegistry) -> list[str]:
        lines = generate_latest(registry).decode().splitlines()
        return [line for line in lines if not line.startswith("waits_s_created{")]

    assert page(ours) == page(theirs)
