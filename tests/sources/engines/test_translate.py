from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.errors import ExpositionUnreadable
from agent.sources.engines.translate import (
    MAX_LABEL_SETS,
    TranslatedExposition,
    dialects_of,
    wanted_series,
)
from tests.sources.engines.fixture_pages import body, translated_body, translated_page


def fact_of(translated: TranslatedExposition, metric: Metric, *labels: str) -> float | None:
    return translated.facts.get((metric.name, labels))


def _by_reason(translated: TranslatedExposition, metric: Metric) -> dict[str, float]:
    return {
        reason: value
        for (name, labels), value in translated.facts.items()
        if name == metric.name
        for reason in labels
    }


def test_a_real_page_under_load_is_translated_to_our_facts() -> None:
    page = translated_page("vllm-0.32.0")
    assert (page.dialect.engine, page.model) == ("vllm", "tiny-llama")
    assert page.process_started_at == 1795231551.33
    assert fact_of(page, fact.REQUESTS_RUNNING) == 4
    assert fact_of(page, fact.REQUESTS_WAITING) == 2
    assert fact_of(page, fact.REQUESTS_WAITING_BY_REASON, "capacity") == 2
    assert fact_of(page, fact.REQUESTS_WAITING_BY_REASON, "deferred") == 0
    assert fact_of(page, fact.KV_CACHE_USAGE) == pytest.approx(0.003663, rel=1e-3)
    assert fact_of(page, fact.INPUT_TOKENS) == 4592
    assert fact_of(page, fact.INPUT_TOKENS_BY_SOURCE, "local_cache_hit") == 3584
    assert fact_of(page, fact.CACHED_INPUT_TOKENS) == 3584
    assert fact_of(page, fact.OUTPUT_TOKENS) == 1793
    assert fact_of(page, fact.PREFIX_CACHE_QUERY_TOKENS) == 4592
    assert fact_of(page, fact.PREFIX_CACHE_HIT_TOKENS) == 3584
    assert fact_of(page, fact.REQUESTS_FINISHED, "length") == 11
    assert fact_of(page, fact.REQUESTS_FAILED, "5xx") == 12
    assert fact_of(page, fact.REQUESTS_FAILED, "2xx") is None
    assert fact_of(page, fact.ADMISSION_REJECTIONS, "max_num_queued_reqs") == 12
    assert fact_of(page, fact.STEPS) == 495
    assert fact_of(page, fact.STEP_TOKENS) == 2801
    assert fact_of(page, fact.ESTIMATED_GPU_FLOPS) == 22474534912
    assert fact_of(page, fact.AWAKE) == 1
    assert fact_of(page, fact.KV_BLOCKS) == 4096
    assert fact_of(page, fact.KV_BLOCK_TOKENS) == 128
    assert fact_of(page, fact.KV_CAPACITY_TOKENS) == 524288
    assert fact_of(page, fact.DATA_PARALLEL_RANKS) == 1
    assert not page.dropped


def test_a_real_histogram_keeps_the_engines_own_buckets() -> None:
    ttft = translated_page("vllm-0.32.0").histograms[fact.TIME_TO_FIRST_TOKEN.name]
    assert ttft.bounds[:3] == (0.001, 0.005, 0.01)
    assert (ttft.bounds[-1], ttft.counts[-1]) == (inf, 15)
    assert ttft.sum == pytest.approx(6.617, rel=1e-3)


@pytest.mark.parametrize(
    ("said", "width"),
    [
        ("auto", None),
        ("bfloat16", 2),
        ("fp8", 1),
        ("fp8_e5m2", 1),
        ("fp8_ds_mla", pytest.approx(656 / 576)),
        # Of a head with 128 values: a byte or a half for each, and four for their scale.
        ("int8_per_token_head", pytest.approx(132 / 128)),
        ("fp8_per_token_head", pytest.approx(132 / 128)),
        ("int4_per_token_head", pytest.approx(68 / 128)),
        ("nvfp4_4over6", pytest.approx(9 / 16)),
        ("ultraquant_4bit", pytest.approx(136 / 256)),
        ("of_tomorrow", None),
    ],
)
def test_the_cache_is_as_wide_as_the_engine_was_told(said: str, width: float | None) -> None:
    page = body("vllm-0.32.0").replace(b'cache_dtype="auto"', f'cache_dtype="{said}"'.encode())
    assert fact_of(translated_body(page), fact.KV_VALUE_BYTES) == width


def test_each_rank_tells_alone_whether_it_computes() -> None:
    page = translated_page("vllm-0.32.0-dp2")
    assert page.ranks.keys() == {"0", "1"}
    for metric in (fact.STEPS, fact.OUTPUT_TOKENS, fact.REQUESTS_RUNNING):
        alone = [ranks[metric.name, ()] for ranks in page.ranks.values()]
        assert sum(alone) == fact_of(page, metric)
    assert all(ranks[fact.AWAKE.name, ()] == 1 for ranks in page.ranks.values())


@pytest.mark.parametrize("page", ["vllm-0.32.0", "vllm-0.8.5-v0", "tgi-3.3.7"])
def test_a_single_rank_is_the_whole_engine(page: str) -> None:
    assert translated_page(page).ranks == {}


def test_real_data_parallel_engines_are_merged_by_what_each_number_means() -> None:
    page = translated_page("vllm-0.32.0-dp2")
    assert fact_of(page, fact.DATA_PARALLEL_RANKS) == 2
    assert fact_of(page, fact.REQUESTS_RUNNING) == 3 + 3
    assert fact_of(page, fact.INPUT_TOKENS) == 1841 + 1827
    assert fact_of(page, fact.STEPS) == 166 + 168
    assert fact_of(page, fact.REQUESTS_FINISHED, "length") == 3 + 3
    # The label already holds the blocks of both engines; the tokens are each engine's own.
    assert fact_of(page, fact.KV_BLOCKS) == 8192
    assert fact_of(page, fact.KV_CAPACITY_TOKENS) == 8192 * 128
    assert page.histograms[fact.INTER_TOKEN_LATENCY.name].counts[-1] == 487 + 496


def test_of_ratios_the_fullest_rank_stands() -> None:
    assert fact_of(translated_page("vllm-0.33.0-dp4"), fact.KV_CACHE_USAGE) == 0.9


def test_an_estimate_that_was_not_switched_on_is_unknown() -> None:
    page = translated_page("vllm-0.32.0-idle")
    assert fact_of(page, fact.ESTIMATED_GPU_FLOPS) is None
    assert fact_of(page, fact.ESTIMATED_GPU_READ_BYTES) is None
    assert fact_of(page, fact.OUTPUT_TOKENS) == 0


@pytest.mark.parametrize("page", ["vllm-0.9.2", "vllm-0.10.2"])
def test_two_spellings_on_one_page_count_once(page: str) -> None:
    both = translated_page(page)
    assert fact_of(both, fact.KV_CACHE_USAGE) == 0.25
    assert fact_of(both, fact.PREFIX_CACHE_QUERY_TOKENS) == 960
    assert fact_of(both, fact.PREFIX_CACHE_HIT_TOKENS) == 320
    assert both.histograms[fact.INTER_TOKEN_LATENCY.name].counts[-1] == 490


def test_of_two_spellings_the_newest_stands() -> None:
    page = b'vllm:gpu_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="0"} 0.7\n'
    assert fact_of(translated_body(page), fact.KV_CACHE_USAGE) == 0.7


def test_the_oldest_release_is_read_by_its_own_spellings() -> None:
    page = translated_page("vllm-0.8.5")
    assert fact_of(page, fact.KV_CACHE_USAGE) == 0.25
    assert fact_of(page, fact.PREFIX_CACHE_HIT_TOKENS) == 20
    assert page.histograms[fact.INTER_TOKEN_LATENCY.name].counts[-1] == 490
    assert fact.TIME_PER_OUTPUT_TOKEN.name not in page.histograms


def test_an_engine_before_the_engine_label_is_read_too() -> None:
    page = translated_page("vllm-0.8.5-v0")
    assert fact_of(page, fact.REQUESTS_RUNNING) == 3
    assert fact_of(page, fact.DATA_PARALLEL_RANKS) is None
    assert page.model == "org/model-8b"


def test_a_sleeping_engine_is_not_awake() -> None:
    assert fact_of(translated_page("vllm-0.12.0"), fact.AWAKE) == 0


def test_ray_spells_the_same_facts() -> None:
    page = translated_page("vllm-0.32.0-ray")
    assert (page.dialect.engine, page.model) == ("vllm", "org/model-8b")
    assert fact_of(page, fact.REQUESTS_RUNNING) == 3
    assert fact_of(page, fact.OUTPUT_TOKENS) == 500
    assert page.histograms[fact.TIME_TO_FIRST_TOKEN.name].counts[-1] == 10


def test_a_routers_page_is_no_engines_page() -> None:
    with pytest.raises(ExpositionUnreadable) as caught:
        translated_page("router-production-stack")
    assert caught.value.reason == "no_known_series"


def test_a_routers_series_beside_the_engines_do_not_count() -> None:
    page = translated_page("vllm-0.12.0-with-router")
    assert fact_of(page, fact.REQUESTS_RUNNING) == 3
    assert fact_of(page, fact.REQUESTS_WAITING) == 0
    assert fact_of(page, fact.PREFIX_CACHE_QUERY_TOKENS) == 960


def test_tensor_ranks_and_priorities_that_repeat_the_total_are_not_added_to_it() -> None:
    page = translated_page("sglang-0.5.23")
    assert fact_of(page, fact.REQUESTS_RUNNING) == 4
    assert fact_of(page, fact.REQUESTS_WAITING) == 1
    assert fact_of(page, fact.PREEMPTIONS) == 3
    assert fact_of(page, fact.KV_CAPACITY_TOKENS) == 16000
    assert page.histograms[fact.QUEUE_TIME.name].counts[-1] == 12


def test_requests_of_every_kind_and_priority_are_added() -> None:
    page = translated_page("sglang-0.5.23")
    assert fact_of(page, fact.INPUT_TOKENS) == 2000 + 300
    assert fact_of(page, fact.CACHED_INPUT_TOKENS) == 400 + 60
    assert fact_of(page, fact.REQUESTS_FINISHED, "") == 18 + 2
    assert page.histograms[fact.TIME_TO_FIRST_TOKEN.name].counts[-1] == 18 + 2


@given(
    st.lists(st.tuples(st.sampled_from([None, 0, 5, -3]), st.integers(1, 900)), min_size=1),
    st.sampled_from([None, 7]),
)
def test_sglang_counts_each_request_once_whatever_priority_clients_set(
    requests: list[tuple[int | None, int]], default: int | None
) -> None:
    # The labels as TokenizerManager.collect_metrics of SGLang 0.5.23 sets them, which gives
    # requests a default priority where one is configured.
    registry = CollectorRegistry()
    labels = ("model_name", "priority")
    count = Counter("sglang:num_requests_total", "", labels, registry=registry)
    tokens = Counter("sglang:prompt_tokens_total", "", labels, registry=registry)
    ttft = Histogram("sglang:time_to_first_token_seconds", "", labels, registry=registry)
    for asked, prompt_tokens in requests:
        priority = default if asked is None else asked
        values = ("model", "" if priority is None else str(priority))
        count.labels(*values).inc()
        tokens.labels(*values).inc(prompt_tokens)
        ttft.labels(*values).observe(0.1)
    page = translated_body(generate_latest(registry))
    assert fact_of(page, fact.REQUESTS_FINISHED, "") == len(requests)
    assert fact_of(page, fact.INPUT_TOKENS) == sum(prompt for _, prompt in requests)
    assert page.histograms[fact.TIME_TO_FIRST_TOKEN.name].counts[-1] == len(requests)


def test_a_gauge_without_a_total_is_summed() -> None:
    page = (
        b'sglang:num_running_reqs{priority="0",tp_rank="0"} 3\n'
        b'sglang:num_running_reqs{priority="5",tp_rank="0"} 1\n'
    )
    assert fact_of(translated_body(page), fact.REQUESTS_RUNNING) == 4


def test_sglang_before_0_5_tells_its_time_per_output_token_by_another_name() -> None:
    page = translated_page("sglang-0.4.0")
    assert page.model == "org/model-8b"
    assert page.histograms[fact.TIME_PER_OUTPUT_TOKEN.name].counts[-1] == 46
    assert fact_of(page, fact.OUTPUT_TOKENS) == 900


def test_a_data_rank_whose_lowest_tensor_rank_is_not_0_counts() -> None:
    page = translated_page("sglang-0.5.23-dp2")
    assert fact_of(page, fact.REQUESTS_RUNNING) == 4 + 6
    assert fact_of(page, fact.KV_CACHE_USAGE) == pytest.approx(0.6)
    assert fact_of(page, fact.DATA_PARALLEL_RANKS) == 2


def test_rank_9_is_lower_than_rank_10() -> None:
    page = b'sglang:num_running_reqs{tp_rank="10"} 10\nsglang:num_running_reqs{tp_rank="9"} 9\n'
    assert fact_of(translated_body(page), fact.REQUESTS_RUNNING) == 9


def test_prefix_hits_and_lookups_come_from_one_series() -> None:
    page = translated_page("sglang-0.5.23")
    assert fact_of(page, fact.PREFIX_CACHE_HIT_TOKENS) == 200 + 50 + 50
    assert fact_of(page, fact.PREFIX_CACHE_QUERY_TOKENS) == 700 + 200 + 50 + 50


def test_text_generation_inference_is_read_without_labels() -> None:
    page = translated_page("tgi-3.3.7")
    assert (page.dialect.engine, page.model) == ("tgi", None)
    assert fact_of(page, fact.REQUESTS_RUNNING) == 5
    assert fact_of(page, fact.INPUT_TOKENS) == 12000
    assert _by_reason(page, fact.REQUESTS_FAILED) == {"generation": 4, "incomplete": 5}
    assert _by_reason(page, fact.ADMISSION_REJECTIONS) == {"overloaded": 2}
    assert page.histograms[fact.REQUEST_DURATION.name].counts[-1] == 40


def test_tensorrt_llm_is_read() -> None:
    page = translated_page("trtllm-1.3.0")
    assert page.dialect.engine == "trtllm"
    assert page.model == "org/model-8b"
    assert fact_of(page, fact.KV_CACHE_USAGE) == 0.62
    assert fact_of(page, fact.REQUESTS_FINISHED, "stop") == 95
    assert _by_reason(page, fact.REQUESTS_FAILED) == {"500": 1}
    assert fact_of(page, fact.MAX_RUNNING_REQUESTS) == 64
    assert page.histograms[fact.PREFILL_TIME.name].counts[-1] == 100


def test_requests_that_tensorrt_llm_cannot_parse_are_no_failures_of_it() -> None:
    """Its server counts 400 alone, in one place, so what really failed is unknown."""
    counted = [line for line in body("trtllm-1.3.0").splitlines() if b'http_code="500"' not in line]
    assert any(b'http_code="400"' in line for line in counted)
    assert _by_reason(translated_body(b"\n".join(counted) + b"\n"), fact.REQUESTS_FAILED) == {}


def test_tensorrt_llm_without_a_prefix_is_read_and_names_no_model() -> None:
    page = translated_page("trtllm-1.1.0")
    assert (page.dialect.engine, page.model) == ("trtllm", None)
    assert fact_of(page, fact.REQUESTS_FINISHED, "stop") == 4
    assert fact_of(page, fact.REQUESTS_FINISHED, "length") == 3
    for metric in (
        fact.TIME_TO_FIRST_TOKEN,
        fact.TIME_PER_OUTPUT_TOKEN,
        fact.REQUEST_DURATION,
        fact.QUEUE_TIME,
    ):
        assert page.histograms[metric.name].counts[-1] == 7
    assert page.histograms[fact.REQUEST_DURATION.name].sum == pytest.approx(13.3)


@pytest.mark.parametrize("labels", ["", '{model_name="x"}', '{engine_type="gateway"}'])
def test_names_without_a_prefix_are_not_tensorrt_llms_without_its_label(labels: str) -> None:
    with pytest.raises(ExpositionUnreadable, match="no series of"):
        translated_body(f"request_success_total{labels} 3\n".encode())


def test_a_real_page_of_the_frontend_in_rust_is_read() -> None:
    """Ten requests had finished, a client had aborted one, and ten ran or waited."""
    page = translated_page("vllm-0.33.0-rust")
    assert (page.dialect.engine, page.model) == ("vllm", "tiny-llama")
    assert fact_of(page, fact.FRONTEND, "rust") == 1
    assert fact_of(page, fact.FRONTEND, "python") is None
    assert fact_of(page, fact.REQUESTS_RUNNING) == 8
    assert fact_of(page, fact.REQUESTS_WAITING_BY_REASON, "capacity") == 2
    assert fact_of(page, fact.REQUESTS_FINISHED, "length") == 10
    assert fact_of(page, fact.REQUESTS_FINISHED, "abort") == 1
    assert fact_of(page, fact.INPUT_TOKENS) == 543
    assert fact_of(page, fact.KV_TRANSFERS_FAILED) == 0
    assert page.histograms[fact.TIME_TO_FIRST_TOKEN.name].counts[-1] == 19
    # It does not publish these.
    assert fact_of(page, fact.KV_BLOCKS) is fact_of(page, fact.AWAKE) is None
    assert page.process_started_at is None


@pytest.mark.parametrize("page", ["vllm-0.32.0", "vllm-0.32.0-dp2", "vllm-0.33.0-transfer"])
def test_the_frontend_in_python_is_known_also_with_a_connector(page: str) -> None:
    assert fact_of(translated_page(page), fact.FRONTEND, "python") == 1
    assert fact_of(translated_page(page), fact.FRONTEND, "rust") is None


def test_transfers_of_both_connectors_are_added() -> None:
    page = translated_page("vllm-0.33.0-transfer")
    assert fact_of(page, fact.KV_TRANSFERS_FAILED) == 2 + 1
    assert fact_of(page, fact.KV_TRANSFER_BYTES) == 9 * 2**20
    times = page.histograms[fact.KV_TRANSFER_TIME.name]
    assert times.counts[-1] == 6 + 3
    assert times.counts[times.bounds.index(0.025)] == 6
    assert times.sum == pytest.approx(6 * 0.02 + 3 * 0.06)


def test_transfers_of_one_connector_alone_are_read() -> None:
    page = b'vllm:mooncake_num_failed_transfers_total{engine="0"} 4\n'
    assert fact_of(translated_body(page), fact.KV_TRANSFERS_FAILED) == 4


def test_the_tier_for_offloaded_values_is_known() -> None:
    page = translated_page("vllm-0.33.0-transfer")
    assert fact_of(page, fact.KV_OFFLOAD_CAPACITY_TOKENS) == 32768
    assert fact_of(page, fact.KV_OFFLOAD_CAPACITY_BYTES) == 8 * 2**30
    promotions = page.histograms[fact.KV_OFFLOAD_PROMOTION_TIME.name]
    assert promotions.counts[-1] == 8
    assert promotions.sum == pytest.approx(2.1)


def test_a_finish_reason_nobody_has_seen_yet_is_kept() -> None:
    page = b'vllm:request_success_total{engine="0",finished_reason="moonlight"} 2\n'
    assert fact_of(translated_body(page), fact.REQUESTS_FINISHED, "moonlight") == 2


def test_a_number_that_the_engine_has_not_settled_is_unknown() -> None:
    page = b'vllm:cache_config_info{engine="0",num_gpu_blocks="None",block_size="16"} 1\n'
    known = translated_body(page)
    assert fact_of(known, fact.KV_BLOCKS) is None
    assert fact_of(known, fact.KV_BLOCK_TOKENS) == 16


def test_a_page_of_two_models_names_neither() -> None:
    page = b'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
    assert translated_body(page).model == "a"
    assert translated_body(page + page.replace(b'"a"', b'"b"')).model is None


def test_nan_in_one_series_loses_that_series_alone() -> None:
    page = body("vllm-0.32.0").replace(
        b'vllm:num_requests_running{engine="0",model_name="tiny-llama"} 4.0',
        b'vllm:num_requests_running{engine="0",model_name="tiny-llama"} NaN',
    )
    torn = translated_body(page)
    assert fact_of(torn, fact.REQUESTS_RUNNING) is None
    assert fact_of(torn, fact.REQUESTS_WAITING) == 2
    assert torn.dropped == {"value_not_finite": 1}


def test_a_histogram_cut_at_a_line_end_is_dropped_and_counted() -> None:
    whole = body("vllm-0.32.0")
    name = b'vllm:request_decode_time_seconds_bucket{engine="0",le="60.0"'
    torn = translated_body(whole[: whole.index(name)])
    assert fact.DECODE_TIME.name not in torn.histograms
    assert torn.dropped == {"histogram_incomplete": 1}


def test_a_kind_that_is_set_reads_no_other_engine() -> None:
    assert translated_page("sglang-0.5.23", "sglang").dialect.engine == "sglang"
    with pytest.raises(ExpositionUnreadable, match="no series of vllm"):
        translated_page("sglang-0.5.23", "vllm")


def test_a_page_with_only_the_process_on_it_is_no_engine() -> None:
    with pytest.raises(ExpositionUnreadable) as caught:
        translated_body(b"process_start_time_seconds 1.7e9\n")
    assert caught.value.reason == "no_known_series"


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'vlm' is unknown: use one of \['auto', 'vllm', "):
        dialects_of("vlm")


def test_created_series_are_never_asked_for() -> None:
    assert not [name for name in wanted_series(dialects_of("auto")) if name.endswith("_created")]


def test_a_fact_with_thousands_of_labels_has_a_bounded_number_and_the_same_sum() -> None:
    page = "vllm:num_requests_running 1\n" + "".join(
        f'vllm:request_success_total{{finished_reason="r{n}"}} 1\n' for n in range(5000)
    )
    reasons = _by_reason(translated_body(page.encode()), fact.REQUESTS_FINISHED)
    assert len(reasons) == MAX_LABEL_SETS + 1
    assert reasons["other"] == 5000 - MAX_LABEL_SETS
