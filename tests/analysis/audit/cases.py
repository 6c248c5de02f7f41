"""Deployments with one thing changed, and what the check on it finds."""

from dataclasses import replace
from typing import Any

from agent.catalog import engine_facts as fact
from agent.records.audit import (
    AgentEvidence,
    AuditEvidence,
    EvidencePart,
    LatencyLimits,
)
from tests.analysis.audit.deployments import (
    FILE_FLAGS,
    IDLE,
    NO_EXPOSITION,
    NO_FLAGS,
    NO_GPUS,
    NO_STATISTICS,
    OFF,
    AuditCase,
    fails,
    passes,
    unknown,
    warns,
)
from tests.analysis.audit.evidence import (
    command_line,
    engine,
    evidence,
    gpu,
    model,
    sample,
    trial,
    with_engine,
    with_facts,
)
from tests.analysis.audit.traffic_cases import TRAFFIC_CASES


def _cache(dtype: str, **others: Any) -> AuditEvidence:
    return evidence(engine=engine(cache_config={"cache_dtype": dtype}), **others)


_SMALL_CACHE = {fact.KV_CAPACITY_TOKENS: 10_000.0}
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


_RANKS = fact.DATA_PARALLEL_RANKS
_SGLANG = replace(sample(), dialect="sglang")
_TGI = replace(sample(), dialect="tgi")
_WITHOUT_OUTPUT = replace(sample({fact.OUTPUT_TOKENS: None}), dialect="sglang")

_WITHOUT_SPANS = command_line(otlp_traces_endpoint="")

# By the names of the checks. That each passes with the good evidence is a test of its own.
CASES: dict[str, list[AuditCase]] = {
    **TRAFFIC_CASES,
    "prefix caching": [
        fails(
            with_engine(cache_config={"enable_prefix_caching": "False"}),
            "off", "remove --no-enable-prefix-caching",
        ),
        fails(
            evidence(
                engine=engine(cache_config={}),
                command_line=command_line(no_enable_prefix_caching=""),
            ),
            "off", "remove --no-enable-prefix-caching",
        ),
        unknown(NO_EXPOSITION, "no series of a known engine"),
    ],
    "size for the traffic": [
        warns(
            with_facts({fact.KV_CAPACITY_TOKENS: 10_000.0}),
            "50.0 of the mean 200 tokens; --max-num-seqs 64", "lower --max-num-seqs to 50",
        ),
        fails(
            with_facts({fact.KV_CAPACITY_TOKENS: 300.0}),
            "1.5 of the mean 200 tokens", "--gpu-memory-utilization",
        ),
        fails(
            with_engine(cache_config={"num_gpu_blocks_override": "3"}),
            "cut to 3 blocks", "remove --num-gpu-blocks-override",
        ),
        passes(
            with_facts(
                {fact.KV_CAPACITY_TOKENS: None, fact.KV_BLOCKS: 4096.0, fact.KV_BLOCK_TOKENS: 16.0}
            ),
            "65,536 tokens",
        ),
        unknown(with_engine(input_lengths=None, max_model_len=131_072), "no request has finished"),
        # 50 requests in the caches of four ranks: each rank has room for 12.
        warns(
            with_facts({fact.KV_CAPACITY_TOKENS: 10_000.0, _RANKS: 4.0}),
            "50.0 of the mean 200 tokens; --max-num-seqs 64 on each of 4 ranks",
            "lower --max-num-seqs to 12",
        ),
    ],
    "preemptions": [
        warns(with_facts({fact.PREEMPTIONS: 8.0}), "8 in 900", "fp8"),
        fails(with_facts({fact.PREEMPTIONS: 9.0}), "9 in 900", "fp8"),
        unknown(IDLE, "no request has finished"),
    ],
    "usage": [
        fails(with_facts({fact.KV_CACHE_USAGE: 0.95}), "95 %", "fp8"),
        warns(
            with_facts({fact.KV_CACHE_USAGE: 1.0, fact.REQUESTS_WAITING: 0.0}),
            "100 % now, 0 requests wait", "fp8",
        ),
    ],
    "cache dtype": [
        passes(_cache("auto"), "auto, that of the model"),
        passes(_cache("fp8"), "fp8"),
        warns(_cache("fp8_e5m2"), "fp8_e5m2: 2 bits of mantissa", "--kv-cache-dtype fp8"),
        warns(_cache("turboquant_k3v4_nc"), "under 8 bits", "compare the answers"),
        warns(_cache("float16"), "the model computes in bfloat16", "remove --kv-cache-dtype"),
        passes(_cache("float16", command_line=command_line(dtype="half")), "float16"),
        passes(_cache("float16", model=None), "float16"),
        unknown(NO_STATISTICS, OFF),
    ],
    "dtype": [
        passes(evidence(), "not given: that of the model"),
        passes(evidence(command_line=command_line(dtype="auto")), "auto"),
        warns(
            evidence(command_line=command_line(dtype="float32")),
            "float32 on a GPU", "remove --dtype",
        ),
        passes(evidence(command_line=command_line(dtype="float"), gpus=()), "without a GPU"),
        unknown(
            replace(NO_GPUS, command_line=command_line(dtype="float32")), "float32; on a GPU"
        ),
        warns(
            evidence(command_line=command_line(dtype="half")),
            "half, and the model's own is bfloat16", "bfloat16",
        ),
        # It has no unit for bfloat16.
        passes(
            evidence(
                command_line=command_line(dtype="half"), gpus=(replace(gpu(), name="Tesla T4"),)
            ),
            "half",
        ),
        unknown(
            evidence(command_line=command_line(dtype="float16"), model=None),
            "float16; the model's own is not known", "model_config",
        ),
        unknown(FILE_FLAGS, "--config names a file of flags"),
    ],
    "memory fraction": [
        warns(
            with_engine(cache_config={"gpu_memory_utilization": "0.5"}),
            "0.5", "--gpu-memory-utilization 0.85",
        ),
        warns(
            with_engine(cache_config={"gpu_memory_utilization": "0.98"}),
            "0.98", "--gpu-memory-utilization 0.95",
        ),
        unknown(evidence(gpus=()), "the engine has no GPU"),
    ],
    "statistics": [
        fails(NO_EXPOSITION, "no series", "remove --disable-log-stats"),
        fails(NO_STATISTICS, "off, by --disable-log-stats", "remove --disable-log-stats"),
    ],
    "expected series": [
        warns(
            with_facts({fact.OUTPUT_TOKENS: None}),
            "1 of 26 absent: llm_engine_output_tokens", "renamed",
        ),
        unknown(
            with_facts({fact.OUTPUT_TOKENS: None, (fact.REQUESTS_FINISHED, ("stop",)): 0.0}),
            "some come with the first request", "send a request",
        ),
    ],
    "bucket edges": [
        warns(
            evidence(limits=LatencyLimits(ttft_s=(0.2,), e2e_s=(5.0,))),
            "ttft 0.2 s is between the edges 0.1 and 0.25",
            """--custom-histogram-buckets '{"time_to_first_token": [0.001, 0.005, """
            "0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, "
            "10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0]}'",
        ),
        warns(
            evidence(engine=engine(version="0.31.2"), limits=LatencyLimits(tpot_s=(0.005, 100.0))),
            "tpot 0.005 s is between the edges 0 and 0.01; tpot 100 s is above the last edge, 80",
            "vLLM 0.32.0 or newer, with "
            """--custom-histogram-buckets '{"inter_token_latency": [0.005, """,
        ),
        unknown(evidence(limits=LatencyLimits()), "no objective"),
    ],
    "single requests": [
        passes(evidence(), "was there after 0.6 s (by its span)"),
        passes(
            evidence(trial=trial(in_front=True), command_line=_WITHOUT_SPANS),
            "was there after 0.6 s (by the middleware in its front)",
        ),
        passes(evidence(trial=None), "its 900 newest requests"),
        # The plugin is heard of, so spans are not needed.
        passes(evidence(trial=None, command_line=_WITHOUT_SPANS), "its 900 newest requests"),
        unknown(
            evidence(trial=trial(lead_s=None, waited_s=20.0), command_line=_WITHOUT_SPANS),
            "none within 20 s of a request, though its plugin is heard of", "the engine's log",
        ),
        fails(
            evidence(trial=trial(lead_s=None, waited_s=20.0), agent=AgentEvidence()),
            "none within 20 s of a request", "pip install ./plugins/vllm",
        ),
        fails(
            evidence(
                trial=trial(lead_s=None), command_line=_WITHOUT_SPANS, agent=AgentEvidence()
            ),
            "no plugin is heard of, and no span comes without --otlp-traces-endpoint",
            "--otlp-traces-endpoint http://AGENT:4317",
        ),
        unknown(evidence(trial=trial(lead_s=None, problem="HTTP 500")), "HTTP 500"),
        unknown(evidence(trial=trial(lead_s=None), agent=None), "agent", "--agent"),
        unknown(
            evidence(
                trial=None,
                agent=AgentEvidence(plugin=True),
                unread={EvidencePart.REQUEST: "no request was sent"},
            ),
            "no request was sent", "--send-request",
        ),
        warns(
            evidence(trial=None, agent=AgentEvidence(), rust_frontend=True),
            "Rust frontend sends no spans, and loads no plugin", "through the agent's proxy",
        ),
        passes(
            evidence(trial=None, agent=AgentEvidence(proxy_views=7), rust_frontend=True),
            "7 newest requests came through the proxy",
        ),
    ],
    "clocks": [
        warns(evidence(trial=trial(lead_s=-3.0)), "3.0 s behind by the request's row", "chrony"),
        fails(evidence(trial=trial(lead_s=90.0)), "90.0 s ahead by the request's row", "chrony"),
        fails(
            evidence(engine=engine(date_lead_s=-7.5), trial=None),
            "7.5 s behind by HTTP's Date", "chrony",
        ),
        unknown(
            evidence(engine=engine(sample=None, date_lead_s=None), trial=None),
            "no row of a request",
        ),
    ],
    "plugin": [
        warns(
            evidence(agent=AgentEvidence()),
            "has never heard of it", "pip install ./plugins/vllm",
        ),
        warns(evidence(agent=AgentEvidence(plugin=False)), "hears nothing", "pip install"),
        passes(
            evidence(agent=AgentEvidence(plugin=True, in_front=9)), "its rows of 9 newest requests"
        ),
        unknown(evidence(agent=None), "agent"),
        unknown(evidence(agent=AgentEvidence(), rust_frontend=True), "loads no plugin"),
    ],
    "security notices": [
        warns(
            with_engine(version="0.31.0"),
            "GHSA-542m-9234-8gvf (medium", "vLLM 0.32.0 or newer; https://github.com/vllm-project/",
        ),
        fails(
            with_engine(version="0.21.0"),
            "GHSA-94f4-hr76-p5j6 (critical", "vLLM 0.32.0 or newer",
        ),
        unknown(with_engine(version=None), "version"),
    ],
    "access": [
        passes(
            evidence(engine=engine(needs_key=False), addresses=frozenset({"127.0.0.1", "::1"})),
            "which only this machine reaches",
        ),
        warns(
            evidence(engine=engine(needs_key=False), addresses=frozenset({"0.0.0.0", "127.0.0.1"})),
            "no key is needed at 0.0.0.0, 127.0.0.1", "--api-key",
        ),
        unknown(with_engine(needs_key=None), "models"),
        unknown(evidence(engine=engine(needs_key=False), addresses=None), "no key is needed; "),
        warns(
            evidence(engine=engine(needs_key=False), addresses=None, remote=True),
            "we reach it from another machine", "--api-key",
        ),
    ],
    "health": [
        fails(with_engine(health=503), "/health gives 503", "restart"),
        fails(with_engine(health=None), "does not answer", "restart"),
    ],
    "graceful stop": [
        warns(
            evidence(command_line=command_line(shutdown_timeout="0")),
            "0 s: running requests are aborted", "--shutdown-timeout 30",
        ),
        unknown(
            evidence(
                engine=engine(version="0.31.0"), command_line=command_line(shutdown_timeout="")
            ),
            "0.32.0 and newer only",
        ),
    ],
    "quantisation": [
        passes(with_facts(_SMALL_CACHE, model=model("fp8")), "8 bits a weight"),
        passes(
            evidence(model=model("int4"), gpus=(_A100,)),
            "4.16 bits a weight, products in bf16",
        ),
        warns(
            with_facts(_SMALL_CACHE),
            "too small for the traffic", "weights in fp8, half as large",
        ),
        warns(
            with_facts(_SMALL_CACHE, gpus=(_A100,)),
            "too small for the traffic", "weights in int8, half as large",
        ),
        warns(
            evidence(model=model("fp8"), gpus=(_A100,)),
            "fp8, for which A100", "weights in int8",
        ),
        unknown(
            evidence(model=None, unread={EvidencePart.WEIGHTS: "the settings name no config.json"}),
            "the settings name no config.json", "model_config",
        ),
        unknown(NO_GPUS, "no_library"),
        unknown(evidence(gpus=(replace(gpu(), name="Riva 128"),)), "Riva 128"),
        unknown(with_engine(sample=None), "has room beside them is not known"),
    ],
    "parallelism": [
        warns(
            evidence(command_line=command_line(tensor_parallel_size="2")),
            "1 GPUs, 2 x 1 x 1", "their product must be the number of GPUs",
        ),
        warns(
            _half_idle("2", "1", "2"),
            "4 GPUs, 2 x 1 x 2 (tensor, pipeline, data); 4 more are idle", "--data-parallel-size 4",
        ),
        warns(_half_idle("4", "1", "1", idle=2), "2 more are idle", "too few for one more replica"),
        unknown(FILE_FLAGS, "--config names a file of flags"),
        unknown(evidence(pids=frozenset({7})), "does not show which GPUs"),
    ],
    "memory errors": [
        fails(
            evidence(gpus=(gpu(gpu_ecc_errors__uncorrected__driver_load=2.0),)),
            "GPU 0: 2 uncorrected", "replace it",
        ),
        warns(
            evidence(gpus=(gpu(gpu_row_remap_pending=1.0),)),
            "a row is to be replaced", "reset the GPU",
        ),
    ],
    "clocks held down": [
        fails(
            evidence(gpus=(gpu(gpu_throttle_active__hw_thermal=1.0),)),
            "GPU 0: hw_thermal", "cooling",
        ),
        warns(
            evidence(gpus=(gpu(gpu_throttle_active__sw_power_cap=1.0),)),
            "GPU 0: sw_power_cap", "power supply",
        ),
        warns(
            evidence(gpus=(gpu(**_POWER_CAP, gpu_clock_hertz__sm=1.485e9),)),
            "GPU 0 at 75 % of its highest clock: sw_power_cap", "power supply",
        ),
        # An H200 that served a model at 300 of 700 W.
        passes(
            evidence(gpus=(gpu(**_POWER_CAP, gpu_clock_hertz__sm=1.905e9),)),
            "GPU 0 at 96 % of its highest clock: sw_power_cap",
        ),
        unknown(evidence(gpus=()), "no GPU is there"),
    ],
    "persistence mode": [
        warns(
            evidence(gpus=(gpu(gpu_persistence_mode=0.0),)),
            "off for GPU 0", "nvidia-persistenced",
        ),
    ],
    "utilisation": [
        warns(evidence(gpus=(gpu(gpu_utilization_ratio=0.3),)), "30 %", "--max-num-batched-tokens"),
        unknown(IDLE, "no request waits now"),
    ],
    "CUDA graphs": [
        warns(
            evidence(command_line=command_line(enforce_eager="")),
            "off", "remove --enforce-eager",
        ),
        unknown(NO_FLAGS, "not on this machine"),
    ],
}  # fmt: skip

# Engines that are not vLLM.
OTHER_ENGINES: dict[str, list[AuditCase]] = {
    "expected series": [
        warns(
            with_engine(sample=_WITHOUT_OUTPUT),
            "1 of 26 absent: llm_engine_output_tokens", "its metrics were renamed: report it",
        ),
    ],
    "bucket edges": [
        warns(
            evidence(engine=engine(sample=_SGLANG), limits=LatencyLimits(tpot_s=(0.03,))),
            "tpot 0.03 s is between the edges 0.025 and 0.05",
            'as edges, if the engine lets you choose them: {"inter_token_latency"',
        ),
    ],
    "speculation depth": [
        unknown(with_engine(sample=_SGLANG), "does not contain it"),
    ],
    "single requests": [
        fails(
            evidence(
                engine=engine(sample=_SGLANG), agent=AgentEvidence(), trial=trial(lead_s=None)
            ),
            "none within", "pip install ./plugins/vllm beside SGLang",
        ),
        *[warns(
            evidence(engine=engine(sample=replace(sample(), dialect=dialect)), trial=None),
            f"{name} sends no spans that the agent reads, and loads no plugin",
            "let its requests go through the agent's proxy",
        )
        for dialect, name in (
            ("tgi", "Text Generation Inference"),
            ("trtllm", "TensorRT-LLM"),
            ("llamacpp", "llama.cpp"),
        )],
    ],
    "plugin": [
        unknown(evidence(engine=engine(sample=_TGI), agent=AgentEvidence()), "loads no plugin"),
        warns(
            evidence(engine=engine(sample=_SGLANG), agent=AgentEvidence(plugin=False)),
            "hears nothing", "pip install ./plugins/vllm beside SGLang",
        ),
    ],
}  # fmt: skip
