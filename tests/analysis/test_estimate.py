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
    assert result.prefill_flops == pytest.approx(131.9e12, abs=0.05e12)
    assert result.decode_flops_per_token == pytest.approx(19.30e9, abs=0.005e9)
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
    assert result.prefill_flops is not None
    assert result.decode_bytes_per_token is not None
    assert result.min_ttft_s == pytest.approx(result.prefill_flops / 989.4e12)
    assert result.min_tpot_s == pytest.approx(result.decode_bytes_per_token / 3.35e12)
    # All matrices, the cache of the context and of the new token.
    assert result.decode_bytes_per_token == 2 * 7_504_658_432 + 131_072 * 8193
    assert result.prefill_bound is Bound.COMPUTE
    assert result.decode_bound is Bound.BANDWIDTH


def test_stages_halve_the_ttft_and_replicas_serve_more_requests_but_none_faster() -> None:
    one = estimate_on("llama-3.1-8b")
    stages, four = (estimate_on("llama-3.1-8b", **more) for more in ({"pipeline": 2}, {"data": 4}))
    assert stages.min_ttft_s == pytest.approx((one.min_ttft_s or 0) / 2)
    assert stages.min_tpot_s == one.min_tpot_s
    assert four.max_concurrent_requests == 4 * (one.max_concurrent_requests or 0)
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


@pytest.mark.parametrize(
    ("name", "on", "ttft_times", "tpot_below"),
    [
        # The peak of its precision, if the GPU has units for it.
        ("llama-3.1-8b-fp8", "H100-SXM", 1 / 2, 0.6),
        ("llama-3.1-8b-fp8", "A100-80GB-SXM", 1, 0.6),
        # Weight-only quantisation reads less and computes no faster.
        ("llama-3.1-8b-awq-int4", "H100-SXM", 1, 0.5),
    ],
)
def test_quantised_weights_take_less_time(
    name: str, on: str, ttft_times: float, tpot_below: float
) -> None:
    plain, quantised = estimate_on("llama-3.1-8b", on), estimate_on(name, on)
    assert quantised.min_ttft_s == pytest.approx(ttft_times * (plain.min_ttft_s or 0), rel=1e-3)
    assert (quantised.min_tpot_s or 0) < tpot_below * (plain.min_tpot_s or 0)


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
