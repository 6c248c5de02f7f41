"""Weights on each GPU, and requests that fit into its cache."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics.coefficients import coefficients, expert_bytes, weight_bytes
from agent.analysis.physics.flops_and_bytes import gpu_weight_bytes, requests_that_fit
from agent.records.model import Parallelism
from tests.sources.model_config.published import published

LLAMA_70B = published("llama-3.1-70b")
QWEN_MOE = published("qwen3-235b-a22b")
WAYS = st.sampled_from([1, 2, 4, 8])


@given(WAYS, WAYS)
def test_tensor_and_pipeline_parallelism_divide_all_weights(tensor: int, pipeline: int) -> None:
    for model in (LLAMA_70B, QWEN_MOE):
        spread = Parallelism(tensor=tensor, pipeline=pipeline)
        assert gpu_weight_bytes(model, spread) * spread.gpus == pytest.approx(weight_bytes(model))


def test_each_replica_holds_a_dense_model_and_experts_are_shared() -> None:
    replicas = Parallelism(data=4)
    assert gpu_weight_bytes(LLAMA_70B, replicas) == weight_bytes(LLAMA_70B)
    shared = weight_bytes(QWEN_MOE) - expert_bytes(QWEN_MOE)
    assert gpu_weight_bytes(QWEN_MOE, replicas) == pytest.approx(
        shared + expert_bytes(QWEN_MOE) / 4
    )


@pytest.mark.parametrize(
    ("spread", "fitting"),
    [
        # 10 GB of cache on each GPU, 327,680 bytes a token and so 1.31 GB a request.
        (Parallelism(), 7),
        (Parallelism(tensor=2), 14),
        (Parallelism(tensor=8), 59),
        (Parallelism(tensor=16), 59),
        (Parallelism(pipeline=2), 14),
        (Parallelism(tensor=2, pipeline=2, data=3), 87),
    ],
)
def test_how_many_requests_fit_into_the_cache(spread: Parallelism, fitting: int) -> None:
    sums = coefficients(LLAMA_70B)
    assert requests_that_fit(sums, 4000, spread, cache_bytes=9.8e9) == fitting


@pytest.mark.parametrize("cache_bytes", [0.0, -5e9, 1e6])
def test_no_request_fits_without_cache_memory(cache_bytes: float) -> None:
    sums = coefficients(LLAMA_70B)
    assert requests_that_fit(sums, 4000, Parallelism(), cache_bytes=cache_bytes) == 0


@pytest.mark.parametrize("way", ["tensor", "pipeline", "data"])
def test_a_model_is_spread_over_at_least_one_gpu(way: str) -> None:
    with pytest.raises(ValueError, match=f"{way} parallelism is 0"):
        Parallelism(**{way: 0})
