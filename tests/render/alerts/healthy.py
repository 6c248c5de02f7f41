"""A fleet that works: every series that a rule looks at, as it is on a good day."""

from tests.render.alerts.cases import AGENT, ENGINE, GPU, MODEL, Series
from tests.render.alerts.objective_cases import histogram

_COUNTERS = {
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="met"}}': 98,
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="missed"}}': 1,
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="undetermined"}}': 1,
    f'llm_requests_total{{{MODEL},status="ok"}}': 100,
    f'llm_requests_total{{{MODEL},status="cancelled"}}': 9,
    f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': 100,
    f"llm_engine_steps_total{{{MODEL}}}": 900,
    f"llm_engine_preemptions_total{{{MODEL}}}": 1,
    f"llm_engine_prefix_cache_query_tokens_total{{{MODEL}}}": 9000,
    f"llm_engine_prefix_cache_hit_tokens_total{{{MODEL}}}": 4000,
    f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': 100,
    f'llm_agent_scrapes_total{{{ENGINE},outcome="ok"}}': 12,
    f'gpu_throttled_seconds_total{{{GPU},reason="sw_power_cap"}}': 50,
    f'gpu_ecc_errors_total{{{GPU},severity="corrected",since="driver_load"}}': 1,
}
_LEVELS = {
    f"llm_engine_up{{{ENGINE}}}": "1",
    f"llm_engine_awake{{{MODEL}}}": "1",
    f"llm_engine_requests_running{{{MODEL}}}": "40",
    f"llm_engine_requests_waiting{{{MODEL}}}": "3",
    f"llm_engine_kv_cache_usage_ratio{{{MODEL}}}": "0.9",
    f"llm_agent_store_waiting_rows{{{AGENT}}}": "20",
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

MINUTES = 120


def fleet(growth: str, *, load: str | None = None) -> Series:
    """The fleet, each counter growing as `growth` says: STEP is its own step, HOUR sixty of them.

    `load` takes the place of what runs and waits.
    """
    series = {name: _grown(growth, step) for name, step in _COUNTERS.items()}
    series |= {name: f"{level}x{MINUTES}" for name, level in _LEVELS.items()}
    for name, (labels, bound) in _HISTOGRAMS.items():
        series |= histogram(name, labels, {bound: _grown(growth, 98)}, _grown(growth, 100))
    if load is not None:
        for name in ("running", "waiting"):
            series[f"llm_engine_requests_{name}{{{MODEL}}}"] = load
    return series


def _grown(growth: str, step: int) -> str:
    return growth.replace("STEP", str(step)).replace("HOUR", str(60 * step))
