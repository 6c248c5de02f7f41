"""Fleets that work: every series that a rule looks at, as it is on a good day."""

from collections.abc import Mapping

from tests.render.alerts.cases import AGENT, ENGINE, GPU, MODEL, Series
from tests.render.alerts.objective_cases import histogram
from tests.render.alerts.vllm_cases import ON_VLLM, VLLM

# Steps are sums of powers of two: a sum that is off by a bit would be a counter that went down.
_COUNTERS = {
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="met"}}': 98.0,
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="missed"}}': 1.0,
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="undetermined"}}': 1.0,
    f'llm_requests_total{{{MODEL},status="ok"}}': 1000.0,
    f'llm_requests_total{{{MODEL},status="cancelled"}}': 90.0,
    f'llm_requests_total{{{MODEL},status="invalid"}}': 50.0,
    f'llm_requests_total{{{ENGINE},model="unknown",status="invalid"}}': 3.0,
    # Together less than the thousandth that objective chat allows.
    f'llm_requests_total{{{MODEL},status="error"}}': 0.25,
    f'llm_requests_total{{{MODEL},status="timeout"}}': 0.25,
    f'llm_requests_total{{{MODEL},status="throttled"}}': 0.25,
    f"llm_output_tokens_total{{{MODEL}}}": 1_000_000.0,
    f'llm_cost_usd_total{{{MODEL},share="decode"}}': 1.5,
    f'llm_cost_usd_total{{{MODEL},share="idle"}}': 0.5,
    f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': 100.0,
    f'llm_engine_requests_failed_total{{{MODEL},reason="5xx"}}': 4.0,
    f'llm_engine_admission_rejections_total{{{MODEL},reason="queue"}}': 0.75,
    f"llm_engine_steps_total{{{MODEL}}}": 900.0,
    f"llm_engine_preemptions_total{{{MODEL}}}": 1.0,
    f"llm_engine_prefix_cache_query_tokens_total{{{MODEL}}}": 9000.0,
    f"llm_engine_prefix_cache_hit_tokens_total{{{MODEL}}}": 4000.0,
    f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': 1000.0,
    f'llm_agent_spans_total{{{AGENT},outcome="rejected"}}': 9.0,
    f'llm_agent_scrapes_total{{{ENGINE},outcome="ok"}}': 12.0,
    f'llm_agent_exports_refused_total{{{AGENT},reason="busy"}}': 0.25,
    f'llm_agent_forward_dropped_total{{{AGENT},reason="queue_full"}}': 0.25,
    f'llm_agent_proxy_failures_total{{{AGENT},reason="slo_header"}}': 0.25,
    f'llm_agent_store_failures_total{{{AGENT},what="requests"}}': 0.25,
    f'gpu_throttled_seconds_total{{{GPU},reason="sw_power_cap"}}': 50.0,
    f'gpu_throttled_seconds_total{{{GPU},reason="hw_thermal"}}': 5.0,
    f'gpu_ecc_errors_total{{{GPU},severity="corrected",since="driver_load"}}': 1.0,
    f'gpu_nvlink_errors_total{{{GPU},error="crc_flit"}}': 5.0,
    f'gpu_xid_errors_total{{{GPU},xid="31"}}': 0.03125,
}
# What happened long ago, and does not any more.
_PAST = (
    f'gpu_ecc_errors_total{{{GPU},severity="uncorrected",since="driver_load"}}',
    f'gpu_nvlink_errors_total{{{GPU},error="replay"}}',
    f'gpu_xid_errors_total{{{GPU},xid="13"}}',
    *(
        f'llm_engine_events_total{{{ENGINE},kind="{kind}"}}'
        for kind in ("ENGINE_DEAD", "HANG", "CUDA_OOM", "HOST_OOM", "GPU_FAULT", "RESTART")
    ),
)
_LEVELS = {
    f"llm_engine_up{{{ENGINE}}}": "1",
    f"llm_engine_awake{{{MODEL}}}": "1",
    f"llm_engine_requests_running{{{MODEL}}}": "40",
    f"llm_engine_requests_waiting{{{MODEL}}}": "3",
    f"llm_engine_kv_cache_usage_ratio{{{MODEL}}}": "0.9",
    f"llm_agent_store_waiting_rows{{{AGENT}}}": "0",
    f"llm_agent_proxy_waiting_records{{{AGENT}}}": "0",
    f"gpu_up{{{GPU}}}": "1",
    f"gpu_recovery_action{{{GPU}}}": "0",
    f"gpu_row_remap_pending{{{GPU}}}": "0",
    f"gpu_row_remap_failed{{{GPU}}}": "0",
    f"gpu_utilization_ratio{{{GPU}}}": "0.97",
    f"gpu_memory_total_bytes{{{GPU}}}": "100",
    f"gpu_memory_used_bytes{{{GPU}}}": "92",
    f"gpu_memory_free_bytes{{{GPU}}}": "6",
}
_HISTOGRAMS = {
    "gen_ai_server_time_to_first_token_seconds": (f'{MODEL},vantage="engine"', "0.2"),
    "gen_ai_server_time_per_output_token_seconds": (f'{MODEL},vantage="engine"', "0.12"),
    "gen_ai_server_request_duration_seconds": (f'{MODEL},vantage="engine"', "10.0"),
    "llm_request_queue_seconds": (MODEL, "0.1"),
}

_VLLM_COUNTERS = {
    f"vllm:generation_tokens_total{{{VLLM}}}": 5000.0,
    f"vllm:iteration_tokens_total_count{{{VLLM}}}": 900.0,
    f"vllm:num_preemptions_total{{{VLLM}}}": 1.0,
    f'http_requests_total{{{ON_VLLM},status="2xx"}}': 100.0,
    f'http_requests_total{{{ON_VLLM},status="5xx"}}': 4.0,
}
_VLLM_LEVELS = {
    f"vllm:num_requests_running{{{VLLM}}}": "40",
    f"vllm:num_requests_waiting{{{VLLM}}}": "3",
    f"vllm:kv_cache_usage_perc{{{VLLM}}}": "0.9",
    f'vllm:engine_sleep_state{{{VLLM},sleep_state="awake"}}': "1",
}
_VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (VLLM, "0.25"),
    "vllm:request_time_per_output_token_seconds": (VLLM, "0.15"),
    "vllm:e2e_request_latency_seconds": (VLLM, "10.0"),
}

MINUTES = 120


def fleet(growth: str, *, load: str | None = None, past: str = "7x120") -> Series:
    """The fleet; each counter grows by `growth`: STEP is its own step, HOUR sixty of them.

    `load` takes the place of what runs and waits; `past` are counters of what is long over.
    """
    series = {name: _grown(growth, step) for name, step in _COUNTERS.items()}
    series |= dict.fromkeys(_PAST, past)
    series |= {name: f"{level}x{MINUTES}" for name, level in _LEVELS.items()}
    series |= _latencies(_HISTOGRAMS, growth)
    if load is not None:
        for name in ("running", "waiting"):
            series[f"llm_engine_requests_{name}{{{MODEL}}}"] = load
    return series


def vllm_fleet(growth: str, *, load: str | None = None) -> Series:
    """The same of a vLLM that is scraped alone."""
    series = {name: _grown(growth, step) for name, step in _VLLM_COUNTERS.items()}
    series |= {name: f"{level}x{MINUTES}" for name, level in _VLLM_LEVELS.items()}
    series |= _latencies(_VLLM_HISTOGRAMS, growth)
    if load is not None:
        for name in ("running", "waiting"):
            series[f"vllm:num_requests_{name}{{{VLLM}}}"] = load
    return series


def _latencies(histograms: Mapping[str, tuple[str, str]], growth: str) -> Series:
    series: dict[str, str] = {}
    for name, (labels, bound) in histograms.items():
        series |= histogram(name, labels, {bound: _grown(growth, 98)}, _grown(growth, 100))
    return series


def _grown(growth: str, step: float) -> str:
    return growth.replace("STEP", str(step)).replace("HOUR", str(60 * step))
