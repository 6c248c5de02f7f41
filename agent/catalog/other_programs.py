"""Programs that are often given in place of an engine, known by the names of their metrics.

Sources: production-stack `src/vllm_router/services/metrics_service/__init__.py`; the endpoint
pickers of gateway-api-inference-extension and llm-d, `pkg/epp/metrics`; dynamo
`lib/runtime/src/metrics/prometheus_names.rs`; litellm `types/integrations/prometheus.py`; SGLang's
gateway, whose names began with `sgl_router_` before `smg_`;
ROCm/device-metrics-exporter `pkg/amdgpu/gpuagent/gpuagent_gpu_metrics.go`.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OtherProgram:
    """A program by the beginnings of its metrics' names."""

    name: str
    metrics: tuple[str, ...]


OTHER_PROGRAMS = (
    # It also has names of vLLM, per `server`.
    OtherProgram(
        "production-stack's router",
        ("vllm:current_qps", "vllm:avg_ttft", "vllm:num_prefill_requests"),
    ),
    OtherProgram("SGLang's router", ("sgl_router_", "smg_", "sglang_router_")),
    OtherProgram("vllm-router", ("vllm_router_",)),
    OtherProgram(
        "llm-d's endpoint picker (EPP)",
        (
            "llm_d_epp_",
            "llm_d_router_epp_",
            "llm_d_inference_scheduler_",
            "inference_pool_",
            "inference_extension_",
            "inference_objective_",
            "inference_model_",
        ),
    ),
    OtherProgram("Dynamo's frontend", ("dynamo_frontend_", "nv_llm_http_service_")),
    OtherProgram("a component of Dynamo", ("dynamo_component_",)),
    OtherProgram("LiteLLM", ("litellm_",)),
    OtherProgram("Ray", ("ray_",)),
    OtherProgram("Envoy", ("envoy_",)),
    OtherProgram("nginx", ("nginx_",)),
    OtherProgram("HAProxy", ("haproxy_",)),
    OtherProgram("Traefik", ("traefik_",)),
    OtherProgram("Knative's queue-proxy", ("queue_average_concurrent_requests",)),
    OtherProgram("dcgm-exporter", ("DCGM_FI_",)),
    OtherProgram(
        "AMD's device-metrics-exporter", ("gpu_gfx_activity", "gpu_total_vram", "amd_gpu_")
    ),
    OtherProgram("node_exporter", ("node_exporter_", "node_cpu_seconds_total")),
    OtherProgram("goodput-agent", ("llm_agent_",)),
    OtherProgram("Prometheus", ("prometheus_tsdb_", "prometheus_build_info")),
)


_NAMES = {name.encode(): each.name for each in OTHER_PROGRAMS for name in each.metrics}
# A metric without a value has a TYPE line alone.
_ANY = re.compile(
    b"^(?:# TYPE )?(" + b"|".join(re.escape(name) for name in _NAMES) + b")", re.MULTILINE
)


def other_program(exposition: bytes) -> str | None:
    """The program whose metrics an exposition without those of an engine has; None if unknown."""
    found = _ANY.search(exposition)
    return None if found is None else _NAMES[found[1]]
