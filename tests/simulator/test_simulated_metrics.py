from pathlib import Path

import pytest
from prometheus_client import Metric

from agent.simulator.batching import Batch
from agent.simulator.engine_steps import BatchLoad, Step
from agent.simulator.scenario import Scenario
from agent.simulator.simulated_metrics import MetricsPage
from tests.simulator.pages import families, labelled, totals
from tests.simulator.stepping import PLAIN, asked, finished, numbered_requests, steps

PAGES = Path(__file__).parents[1] / "sources" / "engines" / "pages"

# The recorded engine served a model of 2048 tokens.
LIKE_RECORDED = Scenario.model_validate(
    {"max_model_len": 2048, "input_tokens": {"median": 100, "sigma": 1, "min": 1, "max": 1024}}
)


def _recorded() -> list[Metric]:
    return families((PAGES / "vllm-0.32.0.txt").read_text(encoding="utf-8"))


def _page(*batches: Batch, scenario: Scenario = PLAIN) -> str:
    page = MetricsPage(scenario)
    for batch in batches:
        for step in steps(batch, until_s=60.0):
            page.observe(step)
    return page.render().decode()


def _core(page: list[Metric]) -> list[Metric]:
    return [family for family in page if family.name.startswith("vllm:")]


def test_the_page_has_the_core_series_of_a_real_vllm_with_the_same_types_and_help() -> None:
    simulated = _core(families(_page(scenario=LIKE_RECORDED)))
    assert {(family.name, family.type, family.documentation) for family in simulated} == {
        (family.name, family.type, family.documentation) for family in _core(_recorded())
    }


def test_its_series_have_the_labels_and_bucket_bounds_of_a_real_vllm() -> None:
    def shapes(page: list[Metric]) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        # Of what differs between two engines, only the names of the labels are compared.
        own = {"model_name"}
        return {
            (sample.name, frozenset((k, "" if k in own else v) for k, v in sample.labels.items()))
            for family in _core(page)
            for sample in family.samples
            if family.name != "vllm:cache_config_info"
        }

    assert shapes(families(_page(scenario=LIKE_RECORDED))) == shapes(_recorded())


def test_the_cache_configuration_has_the_labels_of_a_real_vllm_and_the_scenarios_size() -> None:
    def config(page: list[Metric]) -> dict[str, str]:
        (family,) = (family for family in page if family.name == "vllm:cache_config_info")
        return family.samples[0].labels

    simulated = config(families(_page(scenario=LIKE_RECORDED)))
    assert set(simulated) == set(config(_recorded()))
    assert (simulated["num_gpu_blocks"], simulated["block_size"]) == ("4096", "16")
    assert simulated["kv_cache_size_tokens"] == "65536"


def test_the_process_start_is_told_so_that_a_restart_shows() -> None:
    assert totals(_page())["process_start_time_seconds"] > 1.6e9


def test_every_series_stands_at_zero_before_the_first_request() -> None:
    sums = totals(_page())
    sums = {name: value for name, value in sums.items() if not name.endswith("_created")}
    assert {name for name, value in sums.items() if value and name.startswith("vllm:")} == {
        "vllm:cache_config_info",
        "vllm:engine_sleep_state",
    }


def test_the_page_names_its_model_as_simulated() -> None:
    page = families(_page())
    models = {s.labels.get("model_name") for family in page for s in family.samples}
    assert models == {None, "simulated-chat-8b"}


def test_gauges_show_the_load_after_the_last_step() -> None:
    page = MetricsPage(PLAIN)
    page.observe(Step(load=BatchLoad(running=3, waiting=2, kv_usage=0.25)))
    text = page.render().decode()
    assert totals(text)["vllm:num_requests_running"] == 3
    assert totals(text)["vllm:num_requests_waiting"] == 2
    assert totals(text)["vllm:kv_cache_usage_perc"] == 0.25
    reasons = labelled(text, "vllm:num_requests_waiting_by_reason", "reason")
    assert reasons == {"capacity": 2, "deferred": 0}


def test_a_finished_request_is_counted_by_its_reason_and_observed_once() -> None:
    stopped = asked(prompt_tokens=100, output_tokens=5, max_tokens=200)
    cut = asked(prompt_tokens=50, output_tokens=7, max_tokens=7)
    sums = totals(page := _page(Batch(PLAIN, [stopped, cut])))
    reasons = labelled(page, "vllm:request_success_total", "finished_reason")
    assert reasons == {"stop": 1, "length": 1, "abort": 0, "error": 0, "repetition": 0}
    assert sums["vllm:e2e_request_latency_seconds_count"] == 2
    assert sums["vllm:request_prompt_tokens_sum"] == sums["vllm:prompt_tokens_total"] == 150
    assert sums["vllm:request_generation_tokens_sum"] == sums["vllm:generation_tokens_total"] == 12
    assert sums["vllm:request_params_max_tokens_sum"] == 207
    assert sums["vllm:iteration_tokens_total_sum"] == 162
    assert sums["vllm:prefix_cache_queries_total"] == 150
    assert sums["vllm:time_to_first_token_seconds_count"] == 2
    assert sums["vllm:inter_token_latency_seconds_count"] == 4 + 6


def test_a_prompt_is_looked_up_when_taken_up_and_counted_when_its_first_token_is_out() -> None:
    page, batch = MetricsPage(PLAIN), Batch(PLAIN, [asked(prompt_tokens=700)])
    page.observe(next(steps(batch)))
    sums = totals(page.render().decode())
    assert sums["vllm:prefix_cache_queries_total"] == 700
    assert sums["vllm:prompt_tokens_total"] == 0
    assert sums["vllm:iteration_tokens_total_count"] == 0


def test_a_leaving_client_is_no_success_but_its_tokens_count_as_in_vllm() -> None:
    leaver = asked(prompt_tokens=100, output_tokens=10, leaves_after_tokens=4)
    sums = totals(_page(Batch(PLAIN, [leaver])))
    assert sums["vllm:request_success_total"] == 0
    assert sums["vllm:e2e_request_latency_seconds_count"] == 0
    assert sums["vllm:request_prompt_tokens_count"] == 0
    assert sums["vllm:prompt_tokens_total"] == 100
    assert sums["vllm:generation_tokens_total"] == 4
    assert sums["vllm:time_to_first_token_seconds_count"] == 1


def test_histograms_hold_the_intervals_of_the_requests() -> None:
    done = finished(steps(Batch(PLAIN, numbered_requests(PLAIN)), until_s=60.0))
    sums = totals(_page(Batch(PLAIN, numbered_requests(PLAIN))))
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
