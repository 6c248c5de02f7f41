"""Facts of recorded expositions, and histograms that are merged."""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Metric
from agent.catalog.reasons import ExpositionFault
from agent.errors import ExpositionUnreadable
from agent.records.engine import HistogramSnapshot
from agent.sources.engines.exposition import SeriesValue
from agent.sources.engines.translate import (
    MAX_LABEL_SETS,
    TranslatedExposition,
    dialects_of,
    merged_histogram,
)
from tests.sources.engines.fixture_pages import body, translated_body, translated_page

# What strangers sent.
FOREIGN = Path(__file__).parents[2] / "data" / "foreign"


def fact_of(translated: TranslatedExposition, metric: Metric, *labels: str) -> float | None:
    return translated.facts.get((metric.name, labels))


def _by_reason(translated: TranslatedExposition, metric: Metric) -> dict[str, float]:
    return {
        reason: value
        for (name, labels), value in translated.facts.items()
        if name == metric.name
        for reason in labels
    }


# Facts of each page by metric and labels; None where the page does not give them.
FACTS: dict[str, dict[tuple[Any, ...], Any]] = {
    "vllm-0.32.0": {
        (fact.REQUESTS_RUNNING,): 4,
        (fact.REQUESTS_WAITING,): 2,
        (fact.REQUESTS_WAITING_BY_REASON, "capacity"): 2,
        (fact.REQUESTS_WAITING_BY_REASON, "deferred"): 0,
        (fact.KV_CACHE_USAGE,): pytest.approx(0.003663, rel=1e-3),
        (fact.INPUT_TOKENS,): 4592,
        (fact.INPUT_TOKENS_BY_SOURCE, "local_cache_hit"): 3584,
        (fact.CACHED_INPUT_TOKENS,): 3584,
        (fact.OUTPUT_TOKENS,): 1793,
        (fact.PREFIX_CACHE_QUERY_TOKENS,): 4592,
        (fact.PREFIX_CACHE_HIT_TOKENS,): 3584,
        (fact.REQUESTS_FINISHED, "length"): 11,
        (fact.REQUESTS_FAILED, "5xx"): 12,
        (fact.REQUESTS_FAILED, "2xx"): None,
        (fact.ADMISSION_REJECTIONS, "max_num_queued_reqs"): 12,
        (fact.STEPS,): 495,
        (fact.STEP_TOKENS,): 2801,
        (fact.ESTIMATED_GPU_FLOPS,): 22474534912,
        (fact.AWAKE,): 1,
        (fact.KV_BLOCKS,): 4096,
        (fact.KV_BLOCK_TOKENS,): 128,
        (fact.KV_CAPACITY_TOKENS,): 524288,
        (fact.DATA_PARALLEL_RANKS,): 1,
        (fact.FRONTEND, "python"): 1,
        (fact.FRONTEND, "rust"): None,
    },
    "vllm-0.32.0-dp2": {
        (fact.DATA_PARALLEL_RANKS,): 2,
        (fact.REQUESTS_RUNNING,): 3 + 3,
        (fact.INPUT_TOKENS,): 1841 + 1827,
        (fact.STEPS,): 166 + 168,
        (fact.REQUESTS_FINISHED, "length"): 3 + 3,
        # The label already holds the blocks of both engines; the tokens are each engine's own.
        (fact.KV_BLOCKS,): 8192,
        (fact.KV_CAPACITY_TOKENS,): 8192 * 128,
        (fact.FRONTEND, "python"): 1,
        (fact.FRONTEND, "rust"): None,
    },
    # The fullest rank.
    "vllm-0.33.0-dp4": {(fact.KV_CACHE_USAGE,): 0.9},
    # The estimate was not switched on.
    "vllm-0.32.0-idle": {
        (fact.ESTIMATED_GPU_FLOPS,): None,
        (fact.ESTIMATED_GPU_READ_BYTES,): None,
        (fact.OUTPUT_TOKENS,): 0,
    },
    # Two spellings on one page.
    "vllm-0.9.2": {
        (fact.KV_CACHE_USAGE,): 0.25,
        (fact.PREFIX_CACHE_QUERY_TOKENS,): 960,
        (fact.PREFIX_CACHE_HIT_TOKENS,): 320,
    },
    "vllm-0.10.2": {
        (fact.KV_CACHE_USAGE,): 0.25,
        (fact.PREFIX_CACHE_QUERY_TOKENS,): 960,
        (fact.PREFIX_CACHE_HIT_TOKENS,): 320,
    },
    "vllm-0.8.5": {(fact.KV_CACHE_USAGE,): 0.25, (fact.PREFIX_CACHE_HIT_TOKENS,): 20},
    # Before the engine label.
    "vllm-0.8.5-v0": {(fact.REQUESTS_RUNNING,): 3, (fact.DATA_PARALLEL_RANKS,): None},
    # It sleeps.
    "vllm-0.12.0": {(fact.AWAKE,): 0},
    "vllm-0.32.0-ray": {(fact.REQUESTS_RUNNING,): 3, (fact.OUTPUT_TOKENS,): 500},
    # A router's series do not count.
    "vllm-0.12.0-with-router": {
        (fact.REQUESTS_RUNNING,): 3,
        (fact.REQUESTS_WAITING,): 0,
        (fact.PREFIX_CACHE_QUERY_TOKENS,): 960,
    },
    # Ten requests had finished, a client had aborted one, and ten ran or waited.
    "vllm-0.33.0-rust": {
        (fact.FRONTEND, "rust"): 1,
        (fact.FRONTEND, "python"): None,
        (fact.REQUESTS_RUNNING,): 8,
        (fact.REQUESTS_WAITING_BY_REASON, "capacity"): 2,
        (fact.REQUESTS_FINISHED, "length"): 10,
        (fact.REQUESTS_FINISHED, "abort"): 1,
        (fact.INPUT_TOKENS,): 543,
        (fact.KV_TRANSFERS_FAILED,): 0,
        (fact.KV_BLOCKS,): None,
        (fact.AWAKE,): None,
    },
    # Both connectors, added.
    "vllm-0.33.0-transfer": {
        (fact.KV_TRANSFERS_FAILED,): 2 + 1,
        (fact.KV_TRANSFER_BYTES,): 9 * 2**20,
        (fact.KV_OFFLOAD_CAPACITY_TOKENS,): 32768,
        (fact.KV_OFFLOAD_CAPACITY_BYTES,): 8 * 2**30,
        (fact.FRONTEND, "python"): 1,
        (fact.FRONTEND, "rust"): None,
    },
    # The older names of the same loads are there, too.
    "vllm-0.32.0-offload": {
        (fact.KV_OFFLOAD_LOAD_TIME,): 0.75,
        (fact.KV_OFFLOAD_LOAD_BYTES,): 1400,
        (fact.KV_OFFLOAD_TIER_READ_TIME, "fs"): 0.125,
        (fact.SPEC_DECODE_DRAFTS,): 6,
        (fact.SPEC_DECODE_ACCEPTED_BY_POSITION, "0"): 4,
        (fact.SPEC_DECODE_ACCEPTED_BY_POSITION, "2"): 1,
    },
    # Tensor ranks and priorities that repeat the total are not added to it; kinds are.
    "sglang-0.5.23": {
        (fact.REQUESTS_RUNNING,): 4,
        (fact.REQUESTS_WAITING,): 1,
        (fact.PREEMPTIONS,): 3,
        (fact.KV_CAPACITY_TOKENS,): 16000,
        (fact.INPUT_TOKENS,): 2000 + 300,
        (fact.CACHED_INPUT_TOKENS,): 400 + 60,
        (fact.REQUESTS_FINISHED, ""): 18 + 2,
        # From one series.
        (fact.PREFIX_CACHE_HIT_TOKENS,): 200 + 50 + 50,
        (fact.PREFIX_CACHE_QUERY_TOKENS,): 700 + 200 + 50 + 50,
    },
    # Where prefill and decode are apart, requests wait for memory and for their KV, too.
    "sglang-0.5.23-decode": {(fact.REQUESTS_RUNNING,): 0, (fact.REQUESTS_WAITING,): 200 + 12},
    "sglang-0.5.23-ray": {
        (fact.REQUESTS_RUNNING,): 7,
        (fact.REQUESTS_WAITING,): 3,
        (fact.KV_CACHE_USAGE,): 0.42,
        (fact.REQUESTS_FINISHED, ""): 310,
    },
    "sglang-0.4.0": {(fact.OUTPUT_TOKENS,): 900},
    # A data rank whose lowest tensor rank is not 0.
    "sglang-0.5.23-dp2": {
        (fact.REQUESTS_RUNNING,): 4 + 6,
        (fact.KV_CACHE_USAGE,): pytest.approx(0.6),
        (fact.DATA_PARALLEL_RANKS,): 2,
    },
    "tgi-3.3.7": {
        (fact.REQUESTS_RUNNING,): 5,
        (fact.INPUT_TOKENS,): 12000,
        (fact.REQUESTS_FAILED, "generation"): 4,
        (fact.REQUESTS_FAILED, "incomplete"): 5,
        (fact.REQUESTS_FAILED, "overloaded"): None,
        (fact.ADMISSION_REJECTIONS, "overloaded"): 2,
        (fact.ADMISSION_REJECTIONS, "generation"): None,
    },
    "trtllm-1.3.0": {
        (fact.KV_CACHE_USAGE,): 0.62,
        (fact.REQUESTS_FINISHED, "stop"): 95,
        (fact.REQUESTS_FAILED, "500"): 1,
        (fact.REQUESTS_FAILED, "400"): None,
        (fact.MAX_RUNNING_REQUESTS,): 64,
    },
    # Two requests run and three wait; those that finished had drafts.
    "llamacpp-11434": {
        (fact.REQUESTS_RUNNING,): 2,
        (fact.REQUESTS_WAITING,): 3,
        (fact.INPUT_TOKENS,): 59 + 88,
        (fact.CACHED_INPUT_TOKENS,): 88,
        (fact.OUTPUT_TOKENS,): 60,
        (fact.STEPS,): 35,
        (fact.STEP_TOKENS,): 59 + 60,
        (fact.SPEC_DECODE_DRAFTS,): 15,
        (fact.SPEC_DECODE_DRAFT_TOKENS,): 42,
        (fact.SPEC_DECODE_ACCEPTED_BY_POSITION, "2"): 12,
        (fact.REQUESTS_FINISHED,): None,
    },
    "trtllm-1.1.0": {(fact.REQUESTS_FINISHED, "stop"): 4, (fact.REQUESTS_FINISHED, "length"): 3},
}


@pytest.mark.parametrize("page", FACTS)
def test_a_page_gives_its_facts(page: str) -> None:
    found = translated_page(page)
    values = {key: fact_of(found, *key) for key in FACTS[page]}
    assert values == FACTS[page]


@pytest.mark.parametrize(
    ("page", "model", "started_at"),
    [
        ("vllm-0.32.0", "tiny-llama", 1795231551.33),
        ("vllm-0.33.0-rust", "tiny-llama", None),
        ("vllm-0.8.5-v0", "org/model-8b", ...),
        ("vllm-0.32.0-ray", "org/model-8b", ...),
        ("sglang-0.4.0", "org/model-8b", ...),
        ("tgi-3.3.7", None, ...),
        ("trtllm-1.3.0", "org/model-8b", ...),
        ("trtllm-1.1.0", None, ...),
        ("llamacpp-11434", None, None),
    ],
)
def test_a_page_names_its_model_and_its_start(
    page: str, model: str | None, started_at: Any
) -> None:
    found = translated_page(page)
    assert found.model == model
    assert started_at in (..., found.process_started_at)


@pytest.mark.parametrize(
    ("page", "metric", "count", "total"),
    [
        ("vllm-0.32.0-dp2", fact.INTER_TOKEN_LATENCY, 487 + 496, None),
        ("vllm-0.9.2", fact.INTER_TOKEN_LATENCY, 490, None),
        ("vllm-0.10.2", fact.INTER_TOKEN_LATENCY, 490, None),
        ("vllm-0.8.5", fact.INTER_TOKEN_LATENCY, 490, None),
        ("vllm-0.32.0-ray", fact.TIME_TO_FIRST_TOKEN, 10, None),
        ("vllm-0.33.0-rust", fact.TIME_TO_FIRST_TOKEN, 19, None),
        ("vllm-0.33.0-transfer", fact.KV_TRANSFER_TIME, 6 + 3, 6 * 0.02 + 3 * 0.06),
        ("vllm-0.33.0-transfer", fact.KV_OFFLOAD_PROMOTION_TIME, 8, 2.1),
        ("sglang-0.5.23", fact.QUEUE_TIME, 12, None),
        ("sglang-0.5.23", fact.TIME_TO_FIRST_TOKEN, 18 + 2, None),
        ("sglang-0.4.0", fact.TIME_PER_OUTPUT_TOKEN, 46, None),
        ("tgi-3.3.7", fact.REQUEST_DURATION, 40, None),
        ("trtllm-1.3.0", fact.PREFILL_TIME, 100, None),
        ("trtllm-1.1.0", fact.TIME_TO_FIRST_TOKEN, 7, None),
        ("trtllm-1.1.0", fact.TIME_PER_OUTPUT_TOKEN, 7, None),
        ("trtllm-1.1.0", fact.QUEUE_TIME, 7, None),
        ("trtllm-1.1.0", fact.REQUEST_DURATION, 7, 13.3),
    ],
)
def test_a_page_gives_its_histograms(
    page: str, metric: Metric, count: float, total: float | None
) -> None:
    found = translated_page(page).histograms[metric.name]
    assert found.counts[-1] == count
    assert total is None or found.sum == pytest.approx(total)


@pytest.mark.parametrize(
    ("page", "metric", "labels", "value"),
    [
        # Of two spellings the newest.
        (
            b'vllm:gpu_cache_usage_perc{engine="0"} 0.1\n'
            b'vllm:kv_cache_usage_perc{engine="0"} 0.7\n',
            *(fact.KV_CACHE_USAGE, (), 0.7),
        ),
        # A gauge without a total is summed.
        (
            b'sglang:num_running_reqs{priority="0",tp_rank="0"} 3\n'
            b'sglang:num_running_reqs{priority="5",tp_rank="0"} 1\n',
            *(fact.REQUESTS_RUNNING, (), 4),
        ),
        # Dynamo 0.7 puts a prefix before the names of TensorRT-LLM 1.1, which has none.
        (
            b'trtllm:request_success_total{finished_reason="stop",model_name="m"} 5.0\n',
            *(fact.REQUESTS_FINISHED, ("stop",), 5),
        ),
        # An older build of llama.cpp's server counts computed prompt tokens alone.
        (b"llamacpp:prompt_tokens_total 128\n", *(fact.INPUT_TOKENS, (), 128)),
        # Rank 9 is lower than rank 10.
        (
            b'sglang:num_running_reqs{tp_rank="10"} 10\nsglang:num_running_reqs{tp_rank="9"} 9\n',
            *(fact.REQUESTS_RUNNING, (), 9),
        ),
        # One of two connectors.
        (
            b'vllm:mooncake_num_failed_transfers_total{engine="0"} 4\n',
            *(fact.KV_TRANSFERS_FAILED, (), 4),
        ),
        # A reason that nobody has seen yet.
        (
            b'vllm:request_success_total{engine="0",finished_reason="moonlight"} 2\n',
            *(fact.REQUESTS_FINISHED, ("moonlight",), 2),
        ),
        # A number that the engine does not know yet.
        (
            b'vllm:cache_config_info{engine="0",num_gpu_blocks="None",block_size="16"} 1\n',
            *(fact.KV_BLOCKS, (), None),
        ),
        (
            b'vllm:cache_config_info{engine="0",num_gpu_blocks="None",block_size="16"} 1\n',
            *(fact.KV_BLOCK_TOKENS, (), 16),
        ),
    ],
)
def test_rows_give_a_fact(
    page: bytes, metric: Metric, labels: tuple[str, ...], value: float | None
) -> None:
    assert fact_of(translated_body(page), metric, *labels) == value


def test_a_real_histogram_keeps_the_engines_own_buckets() -> None:
    ttft = translated_page("vllm-0.32.0").histograms[fact.TIME_TO_FIRST_TOKEN.name]
    assert ttft.bounds[:3] == (0.001, 0.005, 0.01)
    assert (ttft.bounds[-1], ttft.counts[-1]) == (inf, 15)
    assert ttft.sum == pytest.approx(6.617, rel=1e-3)
    times = translated_page("vllm-0.33.0-transfer").histograms[fact.KV_TRANSFER_TIME.name]
    assert times.counts[times.bounds.index(0.025)] == 6
    assert fact.TIME_PER_OUTPUT_TOKEN.name not in translated_page("vllm-0.8.5").histograms


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


def test_requests_that_tensorrt_llm_cannot_parse_are_no_failures_of_it() -> None:
    """Its server counts 400 alone, in one place, so what really failed is unknown."""
    counted = [line for line in body("trtllm-1.3.0").splitlines() if b'http_code="500"' not in line]
    assert any(b'http_code="400"' in line for line in counted)
    assert _by_reason(translated_body(b"\n".join(counted) + b"\n"), fact.REQUESTS_FAILED) == {}


@pytest.mark.parametrize(
    "page",
    [
        body("router-production-stack"),
        b"process_start_time_seconds 1.7e9\n",
        # Names without a prefix, without the label of TensorRT-LLM.
        b"request_success_total 3\n",
        b'request_success_total{model_name="x"} 3\n',
        b'request_success_total{engine_type="gateway"} 3\n',
    ],
)
def test_a_page_without_an_engines_series_is_no_engines(page: bytes) -> None:
    with pytest.raises(ExpositionUnreadable, match="no series of") as caught:
        translated_body(page)
    assert caught.value.reason == "no_known_series"


def test_a_page_of_two_models_names_neither() -> None:
    page = b'vllm:num_requests_running{engine="0",model_name="a"} 1\n'
    assert translated_body(page).model == "a"
    assert translated_body(page + page.replace(b'"a"', b'"b"')).model is None


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


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'vlm' is unknown: use one of \['auto', 'vllm', "):
        dialects_of("vlm")


def test_a_fact_with_thousands_of_labels_has_a_bounded_number_and_the_same_sum() -> None:
    page = "vllm:num_requests_running 1\n" + "".join(
        f'vllm:request_success_total{{finished_reason="r{n}"}} 1\n' for n in range(5000)
    )
    reasons = _by_reason(translated_body(page.encode()), fact.REQUESTS_FINISHED)
    assert len(reasons) == MAX_LABEL_SETS + 1
    assert reasons["other"] == 5000 - MAX_LABEL_SETS


Rank = tuple[list[float], list[float]]

seconds = st.integers(0, 50).map(lambda tenths: tenths / 10)
ranks_of_engines = st.lists(
    st.tuples(st.lists(seconds, max_size=30), st.lists(seconds, unique=True, max_size=8)),
    min_size=1,
    max_size=4,
)


def buckets(rank: int, observations: list[float], bounds: list[float]) -> list[SeriesValue]:
    """A rank's buckets, its whole bounds spelled both ways in turn."""
    spelled = {f"{bound:g}" if rank % 2 else str(bound): bound for bound in bounds} | {"+Inf": inf}
    return [
        SeriesValue({"engine": str(rank), "le": le}, float(sum(o <= bound for o in observations)))
        for le, bound in spelled.items()
    ]


def merged(ranks: list[Rank]) -> HistogramSnapshot | None:
    sums = [SeriesValue({"engine": str(n)}, sum(seen)) for n, (seen, _) in enumerate(ranks)]
    every = [
        bucket for n, (seen, bounds) in enumerate(ranks) for bucket in buckets(n, seen, bounds)
    ]
    return merged_histogram(every, sums)


@given(ranks_of_engines)
def test_ranks_merge_into_the_histogram_of_all_their_observations(ranks: list[Rank]) -> None:
    everything = [value for seen, _ in ranks for value in seen]
    shared = sorted(set.intersection(*({*bounds, inf} for _, bounds in ranks)))
    snapshot = merged(ranks)
    assert snapshot is not None
    assert snapshot.bounds == tuple(shared)
    assert snapshot.counts == tuple(sum(o <= bound for o in everything) for bound in shared)
    assert snapshot.sum == pytest.approx(sum(everything))


def test_a_bucket_one_behind_the_bucket_below_it_is_lifted() -> None:
    torn = [
        SeriesValue({"le": "1"}, 5.0),
        SeriesValue({"le": "2"}, 4.0),
        SeriesValue({"le": "+Inf"}, 6.0),
    ]
    snapshot = merged_histogram(torn, [SeriesValue({}, 1.0)])
    assert snapshot is not None
    assert snapshot.counts == (5.0, 5.0, 6.0)


@pytest.mark.parametrize(
    ("incomplete", "sums"),
    [
        pytest.param([{"le": "1"}], [1.0], id="no-last-bucket"),
        pytest.param([{"le": "1"}, {"le": "+Inf"}], [], id="no-sum"),
        pytest.param([{"le": "one"}, {"le": "+Inf"}], [1.0], id="bound-is-no-number"),
        pytest.param([{"le": "NaN"}, {"le": "+Inf"}], [1.0], id="bound-is-nan"),
        pytest.param([{"ge": "1"}, {"le": "+Inf"}], [1.0], id="no-bound"),
        pytest.param(
            [{"le": "+Inf", "engine": "0"}, {"le": "1", "engine": "1"}], [1.0], id="one-rank-cut"
        ),
    ],
)
def test_an_incomplete_histogram_is_none(
    incomplete: list[dict[str, str]], sums: list[float]
) -> None:
    broken = [SeriesValue(labels, 1.0) for labels in incomplete]
    assert merged_histogram(broken, [SeriesValue({}, value) for value in sums]) is None


def test_what_an_engine_counts_below_zero_is_absent_and_counted() -> None:
    """SGLang's issue 39706: inter-token latencies that were counted backwards."""
    negative = translated_body((FOREIGN / "67-sglang-pd-negative-itl.prom").read_bytes())
    assert fact.INTER_TOKEN_LATENCY.name not in negative.histograms
    assert negative.dropped == {ExpositionFault.VALUE_NEGATIVE: 1}
    assert fact_of(negative, fact.REQUESTS_RUNNING) == 3
    assert fact_of(negative, fact.REQUESTS_WAITING) == 1
    ttft = negative.histograms[fact.TIME_TO_FIRST_TOKEN.name]
    assert ttft.sum / ttft.counts[-1] == pytest.approx(0.3)


@given(st.sampled_from([-1.0, -1e-9, -60.0]), st.integers(0, 3))
def test_a_negative_value_never_counts(value: float, place: int) -> None:
    lines = [
        "vllm:num_requests_running 3",
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 1',
        'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 2',
        "vllm:time_to_first_token_seconds_sum 0.5",
    ]
    lines[place] = f"{lines[place].rpartition(' ')[0]} {value}"
    found = translated_body("\n".join([*lines, ""]).encode())
    assert found.dropped == {ExpositionFault.VALUE_NEGATIVE: 1}
    known = {name for name, _ in found.facts} | found.histograms.keys()
    assert len(known) == 1


def test_an_engine_under_triton_names_its_model() -> None:
    page = b'vllm:num_requests_running{model="llama",version="1"} 2\n'
    assert translated_body(page).model == "llama"
    both = b'vllm:num_requests_running{model="backend",model_name="llama"} 2\n'
    assert translated_body(both).model == "llama"


QUEUES = (
    "num_queue_reqs",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
)


@given(
    st.dictionaries(st.sampled_from(QUEUES), st.integers(-9, 99)),
    st.sampled_from(["sglang:", "ray_sglang_"]),
)
def test_the_waiting_requests_are_those_of_all_queues_and_negative_counts_are_none(
    waiting: Mapping[str, int], prefix: str
) -> None:
    lines = [f'{prefix}{name}{{tp_rank="0"}} {count}' for name, count in waiting.items()]
    found = translated_body("\n".join([f"{prefix}num_running_reqs 1", *lines, ""]).encode())
    known = [count for count in waiting.values() if count >= 0]
    assert found.facts.get((fact.REQUESTS_WAITING.name, ())) == (sum(known) if known else None)
    negative = len(waiting) - len(known)
    assert found.dropped == ({ExpositionFault.VALUE_NEGATIVE: negative} if negative else {})
