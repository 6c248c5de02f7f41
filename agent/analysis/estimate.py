"""Estimates a model's memory, work and best latencies on given GPUs, before anything runs."""

from dataclasses import dataclass

from agent.analysis.physics import (
    Bound,
    Coefficients,
    Roof,
    active_parameters,
    bound,
    coefficients,
    decode_kv_bytes,
    decode_token_flops,
    expert_work,
    gpu_weight_bytes,
    kv_bytes,
    kv_bytes_per_token,
    parameters,
    prefill_flops,
    prefill_kv_bytes,
    requests_that_fit,
    step_weight_bytes,
    weight_bytes,
)
from agent.catalog.hardware import GpuModel
from agent.records.model import ModelShape, Parallelism, StoredWeights, Work

NOTE = (
    "an estimate from the model's shape, not a measurement: memory without activations and CUDA "
    "graphs, times without launches, communication and queueing"
)

# What vLLM 0.32 takes by default (--gpu-memory-utilization).
MEMORY_FRACTION = 0.92


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDeployment:
    """The GPUs for a model, and the length of its requests: `context` tokens in all.

    `memory_fraction` is the share of each GPU's memory that the engine may take.
    """

    context: int
    parallelism: Parallelism
    gpu: GpuModel | None = None
    memory_fraction: float = MEMORY_FRACTION


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes are of the whole model unless named for a GPU. What needs an unknown GPU is None.

    `prefill_flops` are those of a prompt of `context` tokens, none of them cached, up to its first
    output token; `decode_flops_per_token` those of one output token at that context.
    `min_ttft_s` and `min_tpot_s` are of one request alone. The bounds of decode are of one request
    alone, and of as many as fit.

    Of a model whose architecture is unknown, what its shape would tell is None.
    """

    architecture: str
    context: int
    gpus: int
    parameters: int | None
    active_parameters: int | None = None
    weight_bytes: int
    kv_bytes_per_token: float | None = None
    kv_bytes_per_request: float | None = None
    prefill_flops: int | None = None
    decode_flops_per_token: int | None = None
    decode_bytes_per_token: float | None = None
    gpu: str | None
    gpu_memory_bytes: int | None
    weight_bytes_per_gpu: float | None = None
    cache_bytes_per_gpu: float | None = None
    max_concurrent_requests: int | None = None
    min_ttft_s: float | None = None
    min_tpot_s: float | None = None
    prefill_bound: Bound | None = None
    decode_bound: Bound | None = None
    full_decode_bound: Bound | None = None
    note: str
    remarks: tuple[str, ...]


def estimate(model: ModelShape, deployment: PlannedDeployment) -> Estimate:
    """All figures of the model on that deployment."""
    found = coefficients(model)
    context, spread = deployment.context, deployment.parallelism
    cache_bytes = _cache_bytes(model, deployment)
    fitting = (
        None
        if cache_bytes is None
        else requests_that_fit(found, context, spread, cache_bytes=cache_bytes)
    )
    best = _Best(model, found, deployment)
    return Estimate(
        architecture=model.architecture,
        context=context,
        gpus=spread.gpus,
        parameters=parameters(model),
        active_parameters=active_parameters(model),
        weight_bytes=weight_bytes(model),
        kv_bytes_per_token=kv_bytes_per_token(found),
        kv_bytes_per_request=kv_bytes(found, context),
        prefill_flops=prefill_flops(found, context),
        decode_flops_per_token=decode_token_flops(found, context),
        decode_bytes_per_token=best.decode(1).bytes_moved,
        gpu=None if deployment.gpu is None else deployment.gpu.name,
        gpu_memory_bytes=None if deployment.gpu is None else deployment.gpu.memory_bytes,
        weight_bytes_per_gpu=gpu_weight_bytes(model, spread),
        cache_bytes_per_gpu=cache_bytes,
        max_concurrent_requests=fitting,
        min_ttft_s=best.ttft_s(),
        min_tpot_s=best.tpot_s(),
        prefill_bound=best.bound_of(best.prefill()),
        decode_bound=best.bound_of(best.decode(1)),
        full_decode_bound=best.full_decode_bound(fitting),
        note=NOTE,
        remarks=(*model.remarks, *_doubts(model, deployment, fitting)),
    )


def estimate_of_weights(weights: StoredWeights, deployment: PlannedDeployment) -> Estimate:
    """The figures of a model of which the weights alone are known.

    The bytes of a decoded token are unknown, because those of its KV cache are.
    """
    spread, gpu = deployment.parallelism, deployment.gpu
    why = () if weights.why_unknown is None else (weights.why_unknown,)
    return Estimate(
        architecture=weights.architecture,
        context=deployment.context,
        gpus=spread.gpus,
        parameters=weights.parameters,
        weight_bytes=weights.stored_bytes,
        gpu=None if gpu is None else gpu.name,
        gpu_memory_bytes=None if gpu is None else gpu.memory_bytes,
        note=NOTE,
        remarks=(*weights.remarks, *why),
    )


def _cache_bytes(model: ModelShape, deployment: PlannedDeployment) -> float | None:
    """Bytes of one GPU that are left for the KV cache; below 0 if the weights do not fit."""
    if deployment.gpu is None:
        return None
    allowed = deployment.gpu.memory_bytes * deployment.memory_fraction
    return allowed - gpu_weight_bytes(model, deployment.parallelism)


def _doubts(
    model: ModelShape, deployment: PlannedDeployment, fitting: int | None
) -> tuple[str, ...]:
    doubts = []
    gpu = deployment.gpu
    if gpu is not None and gpu.confidence == "low":
        doubts.append(f"the peaks of {gpu.name} are not well attested")
    if gpu is not None and gpu.peak(model.compute) is None:
        doubts.append(f"the peak of {gpu.name} in {model.compute} is unknown")
    if model.max_context is not None and deployment.context > model.max_context:
        doubts.append(f"the model's own longest context is {model.max_context} tokens")
    if fitting == 0:
        doubts.append("no request of this length fits beside the weights")
    return tuple(doubts)


class _Best:
    """Best times on the GPUs, with all work spread evenly and nothing waiting."""

    def __init__(
        self, model: ModelShape, found: Coefficients, deployment: PlannedDeployment
    ) -> None:
        self._model = model
        self._coefficients = found
        self._context = deployment.context
        self._spread = deployment.parallelism
        self._gpu = deployment.gpu

    def prefill(self) -> Work:
        weights = step_weight_bytes(self._model, self._context)
        cache = prefill_kv_bytes(self._coefficients, self._context, tensor=self._spread.tensor)
        return Work(prefill_flops(self._coefficients, self._context), weights + cache)

    def decode(self, requests: int) -> Work:
        weights = step_weight_bytes(self._model, requests)
        cache = decode_kv_bytes(self._coefficients, self._context - 1, 2, self._spread.tensor)
        return Work(
            requests * decode_token_flops(self._coefficients, self._context),
            weights + requests * cache,
        )

    def ttft_s(self) -> float | None:
        """Least TTFT. Chunks of a prompt can be in all pipeline stages at once."""
        return self._seconds(self.prefill(), self._context, stages=self._spread.pipeline)

    def tpot_s(self) -> float | None:
        """Least TPOT. A token passes one pipeline stage after the other."""
        return self._seconds(self.decode(1), 1, stages=1)

    def _seconds(self, work: Work, tokens: int, *, stages: int) -> float | None:
        """The least time of the work of one request, in steps of `tokens` tokens.

        Replicas share the experts alone: all else of a request is on the GPUs of one replica.
        """
        roof = self._roof(self._spread.tensor * stages)
        if roof is None:
            return None
        experts = expert_work(self._model, tokens)
        elsewhere = 1 - 1 / self._spread.data
        own = Work(
            work.flops - elsewhere * experts.flops,
            work.bytes_moved - elsewhere * experts.bytes_moved,
        )
        return roof.seconds(own)

    def bound_of(self, work: Work, *, cache_full: bool = False) -> Bound | None:
        """What bounds the work. The number of GPUs scales both roofs alike, so one is enough."""
        roof = self._roof(1)
        return None if roof is None else bound(work, roof, cache_full=cache_full)

    def full_decode_bound(self, fitting: int | None) -> Bound | None:
        """What bounds decode when the cache is full."""
        if not fitting:
            return None
        replica = max(fitting // self._spread.data, 1)
        return self.bound_of(self.decode(replica), cache_full=True)

    def _roof(self, gpus: int) -> Roof | None:
        if self._gpu is None:
            return None
        peak = self._gpu.peak(self._model.compute)
        if peak is None:
            return None
        return Roof(gpus * peak, gpus * self._gpu.bandwidth_bytes_per_s)
