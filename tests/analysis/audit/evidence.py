"""Evidence of a deployment where all is well, to change one thing at a time."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from agent.analysis.audit import audit
from agent.analysis.audit.checks import CheckResult
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog.engines import DIALECTS
from agent.catalog.engines.vllm import DURATION_EDGES_S, TPOT_EDGES_S, TTFT_EDGES_S
from agent.catalog.hardware import Precision
from agent.catalog.metric import Kind, Metric
from agent.records.audit import (
    AgentEvidence,
    AuditEvidence,
    CommandLine,
    EngineEvidence,
    LatencyLimits,
    TrialRequest,
)
from agent.records.engine import EngineSample, HistogramSnapshot
from agent.records.gpu import GpuSample
from agent.records.model import LayerGroup, ModelShape, WeightBlock, WeightFormat
from agent.sources.engines.translate import expected_facts
from agent.sources.model_config.quantisation import DTYPE_FORMATS

NOW = 1_795_000_000.0
ENGINE_PIDS = frozenset({41, 42})
LENGTH_EDGES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
STEP_EDGES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
EXPECTED = expected_facts(DIALECTS["vllm"])

_EDGES = {
    fact.TIME_TO_FIRST_TOKEN: TTFT_EDGES_S,
    fact.TIME_PER_OUTPUT_TOKEN: TPOT_EDGES_S,
    fact.REQUEST_DURATION: DURATION_EDGES_S,
}
_FACTS: Mapping[tuple[Metric, tuple[str, ...]], float] = {
    (fact.REQUESTS_RUNNING, ()): 40.0,
    (fact.REQUESTS_WAITING, ()): 2.0,
    (fact.KV_CACHE_USAGE, ()): 0.5,
    (fact.KV_CAPACITY_TOKENS, ()): 524_288.0,
    (fact.PREEMPTIONS, ()): 0.0,
    (fact.PREFIX_CACHE_QUERY_TOKENS, ()): 200_000.0,
    (fact.PREFIX_CACHE_HIT_TOKENS, ()): 80_000.0,
    (fact.REQUESTS_FINISHED, ("stop",)): 900.0,
    (fact.REQUESTS_FINISHED, ("length",)): 0.0,
    (fact.DATA_PARALLEL_RANKS, ()): 1.0,
}


def histogram(values: Sequence[float], edges: Sequence[float]) -> HistogramSnapshot:
    """These values, each counted as Prometheus' client libraries count it."""
    bounds, ordered = (*map(float, edges), inf), sorted(values)
    counts = tuple(float(bisect_right(ordered, bound)) for bound in bounds)
    return HistogramSnapshot(bounds, counts, float(sum(values)))


_HISTOGRAMS = {
    metric.name: histogram([0.1, 0.2], _EDGES.get(metric, TTFT_EDGES_S))
    for metric in DIALECTS["vllm"].facts
    if metric.kind is Kind.HISTOGRAM and metric.name in EXPECTED
}


def sample(changed: Mapping[Any, float | None] | None = None) -> EngineSample:
    """A sample of a vLLM at work; None removes a fact. A key is a metric, or has its labels."""
    facts: dict[Any, float | None] = {
        **{(m, ("some",) * len(m.labels)): 1.0 for m in DIALECTS["vllm"].facts if _is_plain(m)},
        **_FACTS,
        **{k if isinstance(k, tuple) else (k, ()): v for k, v in (changed or {}).items()},
    }
    return EngineSample(
        engine="audited",
        at=NOW,
        dialect="vllm",
        model="tiny-llama",
        facts={
            (m.name, labels): value for (m, labels), value in facts.items() if value is not None
        },
        histograms=dict(_HISTOGRAMS),
        process_started_at=NOW - 3600,
    )


def _is_plain(metric: Metric) -> bool:
    """An expected fact that is a number, and has no value below."""
    has_value = any(metric is each for each, _ in _FACTS)
    return metric.kind is not Kind.HISTOGRAM and metric.name in EXPECTED and not has_value


def gpu(**changed: float) -> GpuSample:
    """A healthy GPU of the engine; `changed` are facts by name, a label after two underscores."""
    facts = {
        (gpu_facts.UTILIZATION.name, ()): 0.95,
        (gpu_facts.ECC_ERRORS.name, ("uncorrected", "driver_load")): 0.0,
        (gpu_facts.ROW_REMAP_FAILED.name, ()): 0.0,
        (gpu_facts.PERSISTENCE.name, ()): 1.0,
        (gpu_facts.ROW_REMAP_PENDING.name, ()): 0.0,
        (gpu_facts.THROTTLE_ACTIVE.name, ("hw_thermal",)): 0.0,
        (gpu_facts.THROTTLE_ACTIVE.name, ("idle",)): 1.0,
    }
    for name, value in changed.items():
        fact_name, *labels = name.split("__")
        facts[fact_name, tuple(labels)] = value
    return GpuSample(
        gpu="GPU-0",
        index=0,
        name="NVIDIA H100 80GB HBM3",
        at=NOW,
        facts=facts,
        processes={42: 10**10},
    )


def model(dtype: str = "bf16") -> ModelShape:
    """A model whose layers have weights in this format."""
    bits, compute = DTYPE_FORMATS[dtype]
    plain = WeightFormat(16, Precision.BF16)
    layer = WeightBlock(name="mlp", parameters=10**9, format=WeightFormat(bits, compute))
    return ModelShape(
        architecture="LlamaForCausalLM",
        embedding=WeightBlock(name="embedding", parameters=10**9, format=plain),
        head=None,
        groups=(LayerGroup(layers=4, attentions=(), blocks=(layer,), vectors=0),),
        vectors=0,
        precision=plain.compute,
        compute=compute,
        cache_bits=plain.bits,
    )


def engine(**changed: Any) -> EngineEvidence:
    """An engine where all is well."""
    good: dict[str, Any] = {
        "url": "http://127.0.0.1:8000",
        "sample": sample(),
        "expected": EXPECTED,
        "cache_config": {
            "enable_prefix_caching": "True",
            "gpu_memory_utilization": "0.92",
            "num_gpu_blocks_override": "None",
        },
        "input_lengths": histogram([150.0] * 900, LENGTH_EDGES),
        "output_lengths": histogram([50.0] * 900, LENGTH_EDGES),
        "step_tokens": histogram([60.0] * 5000, STEP_EDGES),
        "answered": {"2xx": 900.0, "4xx": 2.0},
        "version": "0.33.0",
        "models": ("tiny-llama",),
        "max_model_len": 2048,
        "health": 200,
        "needs_key": True,
        "date_lead_s": 0.0,
    }
    return EngineEvidence(**{**good, **changed})


def command_line(
    *, limits: Mapping[str, int] | None = None, whole: bool = True, **flags: str
) -> CommandLine:
    """A command line; flags without their dashes, with underscores."""
    good = {"otlp_traces_endpoint": "http://127.0.0.1:4317", "shutdown_timeout": "30"}
    given = {f"--{name.replace('_', '-')}": value for name, value in {**good, **flags}.items()}
    return CommandLine(
        flags=given,
        limits={fact.MAX_RUNNING_REQUESTS.name: 64} if limits is None else limits,
        whole=whole,
    )


def trial(**changed: Any) -> TrialRequest:
    """A request whose row was there."""
    good: dict[str, Any] = {
        "request_id": "goodput-agent-check-1",
        "sent_at": NOW,
        "ended_at": NOW + 0.1,
        "waited_s": 0.6,
        "lead_s": 0.0,
    }
    return TrialRequest(**{**good, **changed})


def watched(*left_after_s: float) -> AgentEvidence:
    """An agent that knows 900 requests; of these, clients left some."""
    return AgentEvidence(
        requests=900,
        lengths=((150, 50),) * 900,
        engine_views=900,
        left_after_s=left_after_s,
        plugin=True,
    )


def evidence(**changed: Any) -> AuditEvidence:
    """Evidence of a deployment where all is well."""
    good: dict[str, Any] = {
        "at": NOW,
        "engine": engine(),
        "limits": LatencyLimits(ttft_s=(0.25,), tpot_s=(0.1,), e2e_s=(5.0,)),
        "command_line": command_line(),
        "addresses": frozenset({"0.0.0.0"}),
        "pids": ENGINE_PIDS,
        "gpus": (gpu(),),
        "model": model(),
        "agent": watched(),
        "trial": trial(),
    }
    return AuditEvidence(**{**good, **changed})


def with_engine(**changed: Any) -> AuditEvidence:
    """A good deployment, but for its engine."""
    return evidence(engine=engine(**changed))


def with_facts(changed: Mapping[Any, float | None], **others: Any) -> AuditEvidence:
    """A good deployment, but for facts of its engine."""
    return replace(evidence(**others), engine=engine(sample=sample(changed)))


def result(name: str, of: AuditEvidence) -> CheckResult:
    """The result of the check with this name."""
    return next(line.result for line in audit(of) if line.check.name == name)
