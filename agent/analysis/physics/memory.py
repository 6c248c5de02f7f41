"""Bytes of weights on a GPU, and how many requests fit beside them."""

from math import floor

from agent.analysis.physics.coefficients import Coefficients
from agent.analysis.physics.parameters import expert_bytes, shared_weight_bytes, weight_bytes
from agent.analysis.physics.traffic import kv_bytes
from agent.records.model import ModelShape, Parallelism


def gpu_weight_bytes(model: ModelShape, parallelism: Parallelism) -> float:
    """Bytes of weights on one GPU, with pipeline stages of equal size.

    Tensor and pipeline parallelism divide all weights, data parallelism only the experts.
    """
    divided = parallelism.tensor * parallelism.pipeline
    shared, experts = shared_weight_bytes(model), expert_bytes(model)
    # The files give the true sum, the shape the experts' part of it.
    scale = weight_bytes(model) / (shared + experts)
    return scale * (shared + experts / parallelism.data) / divided


def requests_that_fit(
    model: Coefficients, context: int, parallelism: Parallelism, *, cache_bytes: float
) -> int:
    """How many requests of this length fit on all replicas; `cache_bytes` are those of one GPU."""
    per_request = kv_bytes(model, context, parallelism.tensor) / parallelism.pipeline
    return parallelism.data * floor(max(cache_bytes, 0.0) / per_request)
