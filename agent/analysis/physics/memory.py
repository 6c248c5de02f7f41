"""What a GPU must hold, and how many requests fit beside the weights."""

from math import floor

from agent.analysis.physics.coefficients import Coefficients
from agent.analysis.physics.parameters import expert_bytes, shared_weight_bytes, weight_bytes
from agent.analysis.physics.traffic import kv_bytes
from agent.records.model import ModelShape, Parallelism


def gpu_weight_bytes(model: ModelShape, parallelism: Parallelism) -> float:
    """Bytes of weights on one GPU, stages taken as equal.

    Tensor and pipeline parallelism divide all weights, data parallelism the experts alone.
    """
    divided = parallelism.tensor * parallelism.pipeline
    shared, experts = shared_weight_bytes(model), expert_bytes(model)
    # The files are the truth about the sum, the shape about what experts have of it.
    scale = weight_bytes(model) / (shared + experts)
    return scale * (shared + experts / parallelism.data) / divided


def requests_that_fit(
    model: Coefficients, context: int, parallelism: Parallelism, *, cache_bytes: float
) -> int:
    """How many requests of this length all replicas hold, each GPU with so many bytes of cache."""
    per_request = kv_bytes(model, context, parallelism.tensor) / parallelism.pipeline
    return parallelism.data * floor(max(cache_bytes, 0.0) / per_request)
