"""Estimates of the memory and speed of a model before it runs."""

from dataclasses import replace

import pytest

from agent.analysis.estimate import Estimate, PlannedDeployment, estimate
from agent.analysis.physics import Bound
from agent.catalog.hardware import GpuModel, find_gpu
from agent.records.model import Parallelism
from tests.sources.model_config.published import PUBLISHED, published, read_config


def gpu(name: str) -> GpuModel:
    found = find_gpu(name)
    assert found is not None
    return found


def estimate_on(model: str, gpu_name: str | None = "H100-SXM", /, **options: int) -> Estimate:
    context = options.pop("context", 8192)
    return estimate(
        published(model),
        PlannedDeployment(
            context=context,
            parallelism=Parallelism(**options),
            gpu=None if gpu_name is None else gpu(gpu_name),
        ),
    )


def test_without_a_gpu_only_the_model_is_known() -> None:
    result = estimate_on("llama-3.1-8b", None)
    assert result.parameters == 8_030_261_248
    assert result.kv_bytes_per_token == 131_072
    assert result.kv_bytes_per_request == 131_072 * 8192
    assert result.prefill_flops / 1e12 == pytest.approx(131.9, abs=0.05)
    assert result.decode_flops_per_token / 1e9 == pytest.approx(19.30, abs=0.005)
    unknown = (
        result.gpu,
        result.gpu_memory_bytes,
        result.cache_bytes_per_gpu,
        result.max_concurrent_requests,
        result.min_ttft_s,
        result.min_tpot_s,
        result.prefill_bound,
        result.decode_bound,
        result.full_decode_bound,
    )
    assert set(unknown) == {None}


def test_the_lowest_latencies_reach_the_peaks() -> None:
    result = estimate_on("llama-3.1-8b")
    assert result.min_ttft_s == pytest.approx(result.prefill_flops / 989.4e12)
    assert result.min_tpot_s == pytest.approx(result.decode_bytes_per_token / 3.35e12)
    # All matrices, the cache of the context and of the new token.
    assert result.decode_bytes_per_token == 2 * 7_504_658_432 + 131_072 * 8193
    assert result.prefill_bound is Bound.COMPUTE
    assert result.decode_bound is Bound.BANDWIDTH


def test_tensor_parallelism_halves_ttft_and_tpot_and_stages_only_ttft() -> None:
    alone, pair, stages = (
        estimate_on("llama-3.1-8b"),
        estimate_on("llama-3.1-8b", tensor=2),
        estimate_on("llama-3.1-8b", pipeline=2),
    )
    assert alone.min_ttft_s is not None
    assert alone.min_tpot_s is not None
    assert pair.min_ttft_s == pytest.approx(alone.min_ttft_s / 2)
    assert pair.min_tpot_s == pytest.approx(alone.min_tpot_s / 2)
    assert stages.min_ttft_s == pytest.approx(alone.min_ttft_s / 2)
    assert stages.min_tpot_s == alone.min_tpot_s


def test_replicas_of_a_dense_model_serve_more_requests_but_none_faster() -> None:
    one, four = estimate_on("llama-3.1-8b"), estimate_on("llama-3.1-8b", data=4)
    assert one.max_concurrent_requests is not None
    assert four.max_concurrent_requests == 4 * one.max_concurrent_requests
    assert (four.min_ttft_s, four.min_tpot_s) == (one.min_ttft_s, one.min_tpot_s)
    assert four.gpus == 4


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b", "mixtral-8x7b"])
@pytest.mark.parametrize(("tensor", "data"), [(1, 8), (2, 4), (1, 1), (8, 1)])
def test_replicas_share_the_experts_of_a_request_and_nothing_else(
    name: str, tensor: int, data: int
) -> None:
    """The busiest GPU's bytes, gathered block by block as an engine places them."""
    model, h200 = published(name), gpu("H200-SXM")
    result = estimate_on(name, "H200-SXM", tensor=tensor, data=data)
    head = model.head or model.embedding
    busiest = head.parameters * head.format.bits / 8 / tensor
    for group in model.groups:
        for block in group.blocks:
            read = block.used * block.parameters * block.format.bits / 8
            busiest += group.layers * read / tensor / (data if block.copies > 1 else 1)
        (attention,) = group.attentions
        heads = -(-attention.kv_heads // tensor)
        token = heads * attention.values_per_kv_head * model.cache_bits / 8
        busiest += group.layers * token * (min(8192, attention.window or 8192) + 1)
    assert result.min_tpot_s == pytest.approx(busiest / h200.bandwidth_bytes_per_s)


def test_a_replicated_latent_cache_slows_decode_on_many_gpus() -> None:
    one, eight = (
        estimate_on("deepseek-v3", "H200-SXM"),
        estimate_on("deepseek-v3", "H200-SXM", tensor=8),
    )
    assert eight.decode_bytes_per_token - one.decode_bytes_per_token == 7 * 70_272 * 8193


def test_requests_fit_in_the_memory_that_the_weights_leave() -> None:
    result = estimate_on("llama-3.1-8b")
    left = 0.92 * 85_520_809_984 - 2 * 8_030_261_248
    assert result.cache_bytes_per_gpu == left
    assert result.max_concurrent_requests == left // (131_072 * 8192)


def test_weights_that_do_not_fit_leave_no_room_for_requests() -> None:
    result = estimate_on("llama-3.1-405b")
    assert result.max_concurrent_requests == 0
    assert result.full_decode_bound is None
    assert any("no request" in remark for remark in result.remarks)


def test_memory_is_the_bound_when_the_largest_batch_is_below_the_ridge() -> None:
    assert estimate_on("llama-3.1-70b", tensor=4).full_decode_bound is Bound.CAPACITY
    # A short context leaves room for so many requests that computing binds.
    assert estimate_on("llama-3.1-8b", context=64).full_decode_bound is Bound.COMPUTE


def test_quantised_products_use_the_peak_of_their_precision() -> None:
    plain, fp8 = estimate_on("llama-3.1-8b"), estimate_on("llama-3.1-8b-fp8")
    assert plain.min_ttft_s is not None
    assert fp8.min_ttft_s == pytest.approx(plain.min_ttft_s / 2, rel=1e-3)


def test_weight_only_quantisation_reads_less_and_computes_no_faster() -> None:
    plain, awq = estimate_on("llama-3.1-8b"), estimate_on("llama-3.1-8b-awq-int4")
    assert awq.min_ttft_s == plain.min_ttft_s
    assert awq.min_tpot_s is not None
    assert plain.min_tpot_s is not None
    assert awq.min_tpot_s < plain.min_tpot_s / 2


def test_a_gpu_without_fp8_units_computes_fp8_weights_in_16_bits() -> None:
    a100 = "A100-80GB-SXM"
    assert (
        estimate_on("llama-3.1-8b-fp8", a100).min_ttft_s
        == estimate_on("llama-3.1-8b", a100).min_ttft_s
    )


def test_fp4_on_b300_takes_a_third_of_the_time_of_fp8() -> None:
    """NVIDIA's HGX B300 has 108 PFLOP/s in FP4 and 36 in FP8, dense, over 8 GPUs."""
    config = PUBLISHED["llama-3.1-70b"]["config"]
    times = {}
    for dtype in ("fp4", "fp8", "bf16"):
        model = read_config(config, dtype=dtype)
        on = PlannedDeployment(context=8192, parallelism=Parallelism(), gpu=gpu("B300"))
        times[dtype] = estimate(model, on).min_ttft_s
    assert times["fp4"] is not None
    assert times["fp8"] == pytest.approx(108 / 36 * times["fp4"])
    assert times["bf16"] == pytest.approx(108 / 18 * times["fp4"])


def test_doubts_are_in_the_remarks() -> None:
    assert any(
        "A10G are not well attested" in remark for remark in estimate_on("phi-4", "A10G").remarks
    )
    long = estimate_on("llama-3.1-8b", context=200_000)
    assert any("longest context is 131072" in remark for remark in long.remarks)
    assert estimate_on("llama-3.1-8b").remarks == ()


def test_an_unknown_peak_leaves_times_unknown_and_memory_known() -> None:
    model = read_config(PUBLISHED["llama-3.1-8b"]["config"], dtype="fp32")
    deployment = PlannedDeployment(context=1024, parallelism=Parallelism(), gpu=gpu("H100-SXM"))
    result = estimate(model, deployment)
    assert result.min_ttft_s is None
    assert result.prefill_bound is None
    assert result.max_concurrent_requests
    assert any("peak of H100-SXM in fp32 is unknown" in remark for remark in result.remarks)


def test_the_size_of_the_files_is_the_size_of_the_weights() -> None:
    model = replace(published("llama-3.1-8b"), stored_bytes=20_000_000_000)
    deployment = PlannedDeployment(context=1024, parallelism=Parallelism(tensor=2))
    result = estimate(model, deployment)
    assert result.weight_bytes == 20_000_000_000
    assert result.weight_bytes_per_gpu == 10_000_000_000
