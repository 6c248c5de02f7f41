"""Deployments with one thing changed at their GPUs or ranks, and engines that are not vLLM."""

from dataclasses import replace

from agent.catalog import engine_facts as fact
from agent.records.audit import AuditEvidence, EvidencePart, LatencyLimits
from tests.analysis.audit.cases import (
    FAIL,
    FILE_FLAGS,
    IDLE,
    NO_FLAGS,
    NO_GPUS,
    PASS,
    UNKNOWN,
    WARN,
    AuditCase,
)
from tests.analysis.audit.evidence import (
    STEP_EDGES,
    command_line,
    engine,
    evidence,
    gpu,
    histogram,
    model,
    sample,
    with_engine,
    with_facts,
)

_SMALL_CACHE = {(fact.KV_CAPACITY_TOKENS, ()): 10_000.0}
_A100 = replace(gpu(), name="NVIDIA A100-SXM4-80GB")
_POWER_CAP = {"gpu_throttle_active__sw_power_cap": 1.0, "gpu_clock_max_hertz__sm": 1.98e9}


def _half_idle(tensor: str, pipeline: str, data: str, idle: int = 4) -> AuditEvidence:
    """An engine on four GPUs of a machine that has some more."""
    used = [replace(gpu(), gpu=f"GPU-{place}", index=place) for place in range(4)]
    free = [
        replace(gpu(), gpu=f"GPU-{4 + place}", index=4 + place, processes={})
        for place in range(idle)
    ]
    line = command_line(
        tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, data_parallel_size=data
    )
    return evidence(command_line=line, gpus=(*used, *free))


_QUANTISATION = (
    AuditCase(
        "quantisation", PASS, with_facts(_SMALL_CACHE, model=model("fp8")), "8 bits a weight",
    ),
    AuditCase(
        "quantisation", PASS, evidence(model=model("int4"), gpus=(_A100,)),
        "4.16 bits a weight, products in bf16",
    ),
    AuditCase(
        "quantisation", WARN, with_facts(_SMALL_CACHE), "too small for the traffic",
        "weights in fp8, half as large",
    ),
    AuditCase(
        "quantisation", WARN, with_facts(_SMALL_CACHE, gpus=(_A100,)), "too small for the traffic",
        "weights in int8, half as large",
    ),
    AuditCase(
        "quantisation", WARN, evidence(model=model("fp8"), gpus=(_A100,)),
        "fp8, for which A100", "weights in int8",
    ),
    AuditCase(
        "quantisation", UNKNOWN,
        evidence(model=None, unread={EvidencePart.WEIGHTS: "the settings name no config.json"}),
        "the settings name no config.json", "model_config",
    ),
    AuditCase("quantisation", UNKNOWN, NO_GPUS, "no_library"),
    AuditCase(
        "quantisation", UNKNOWN, evidence(gpus=(replace(gpu(), name="Riva 128"),)), "Riva 128",
    ),
    AuditCase(
        "quantisation", UNKNOWN,
        with_engine(sample=None), "has room beside them is not known",
    ),
)  # fmt: skip

GPU_CASES = (
    *_QUANTISATION,
    AuditCase(
        "parallelism", WARN,
        evidence(command_line=command_line(tensor_parallel_size="2")), "1 GPUs, 2 x 1 x 1",
        "their product must be the number of GPUs",
    ),
    AuditCase(
        "parallelism", WARN, _half_idle("2", "1", "2"), "4 GPUs, 2 x 1 x 2 (tensor, pipeline, "
        "data); 4 more are idle", "--data-parallel-size 4",
    ),
    AuditCase(
        "parallelism", WARN, _half_idle("4", "1", "1", idle=2), "2 more are idle",
        "too few for one more replica",
    ),
    AuditCase("parallelism", UNKNOWN, FILE_FLAGS, "in a file (--config)"),
    AuditCase("parallelism", UNKNOWN, evidence(pids=frozenset({7})), "does not show which GPUs"),
    AuditCase(
        "memory errors", FAIL,
        evidence(gpus=(gpu(gpu_ecc_errors__uncorrected__driver_load=2.0),)), "GPU 0: 2 uncorrected",
        "replace it",
    ),
    AuditCase(
        "memory errors", WARN, evidence(gpus=(gpu(gpu_row_remap_pending=1.0),)),
        "a row is to be replaced", "reset the GPU",
    ),
    AuditCase(
        "clocks held down", FAIL, evidence(gpus=(gpu(gpu_throttle_active__hw_thermal=1.0),)),
        "GPU 0: hw_thermal", "cooling",
    ),
    AuditCase(
        "clocks held down", WARN, evidence(gpus=(gpu(gpu_throttle_active__sw_power_cap=1.0),)),
        "GPU 0: sw_power_cap", "power supply",
    ),
    AuditCase(
        "clocks held down", WARN, evidence(gpus=(gpu(**_POWER_CAP, gpu_clock_hertz__sm=1.485e9),)),
        "GPU 0 at 75 % of its highest clock: sw_power_cap", "power supply",
    ),
    # An H200 that served a model at 300 of 700 W.
    AuditCase(
        "clocks held down", PASS, evidence(gpus=(gpu(**_POWER_CAP, gpu_clock_hertz__sm=1.905e9),)),
        "GPU 0 at 96 % of its highest clock: sw_power_cap",
    ),
    AuditCase("clocks held down", UNKNOWN, evidence(gpus=()), "no GPU is there"),
    AuditCase(
        "persistence mode",
        WARN,
        evidence(gpus=(gpu(gpu_persistence_mode=0.0),)),
        "off for GPU 0",
        "nvidia-persistenced",
    ),
    AuditCase(
        "utilisation", WARN, evidence(gpus=(gpu(gpu_utilization_ratio=0.3),)),
        "30 %", "--max-num-batched-tokens",
    ),
    AuditCase("utilisation", UNKNOWN, IDLE, "no request waits now"),
    AuditCase(
        "CUDA graphs", WARN, evidence(command_line=command_line(enforce_eager="")), "off",
        "remove --enforce-eager",
    ),
    AuditCase("CUDA graphs", UNKNOWN, NO_FLAGS, "not on this machine"),
)  # fmt: skip

_RANKS = (fact.DATA_PARALLEL_RANKS, ())

RANK_CASES = (
    # 50 requests in the caches of four ranks: each rank has room for 12.
    AuditCase(
        "size for the traffic", WARN,
        with_facts({(fact.KV_CAPACITY_TOKENS, ()): 10_000.0, _RANKS: 4.0}),
        "50.0 of the mean 200 tokens; --max-num-seqs 64 on each of 4 ranks",
        "lower --max-num-seqs to 12",
    ),
    AuditCase(
        "--max-num-seqs", WARN,
        with_facts(
            {(fact.REQUESTS_RUNNING, ()): 256.0, (fact.KV_CACHE_USAGE, ()): 0.2, _RANKS: 4.0}
        ),
        "256 of 256 run now, 2 wait, KV cache 20 % full", "raise --max-num-seqs above 64",
    ),
    # A step of one of eight ranks may have 64 requests in it, and had as many.
    AuditCase(
        "--max-num-seqs", PASS,
        with_engine(
            sample=sample({_RANKS: 8.0}), step_tokens=histogram([64.0] * 1000, STEP_EDGES)
        ),
        "40 of 512 run now",
    ),
)  # fmt: skip

_SGLANG = replace(sample(), dialect="sglang")
_WITHOUT_OUTPUT = replace(sample({(fact.OUTPUT_TOKENS, ()): None}), dialect="sglang")

ENGINE_CASES = (
    AuditCase(
        "expected series", WARN, with_engine(sample=_WITHOUT_OUTPUT),
        "1 of 26 absent: llm_engine_output_tokens", "its metrics were renamed: report it",
    ),
    AuditCase(
        "bucket edges", WARN,
        evidence(engine=engine(sample=_SGLANG), limits=LatencyLimits(tpot_s=(0.03,))),
        "tpot 0.03 s is between the edges 0.025 and 0.05",
        'as edges, if the engine lets you choose them: {"inter_token_latency"',
    ),
    AuditCase("speculation depth", UNKNOWN, with_engine(sample=_SGLANG), "does not contain it"),
)  # fmt: skip
