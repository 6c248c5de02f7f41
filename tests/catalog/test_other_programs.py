"""Pages of programs that are given in place of an engine: each is named."""

import pytest

from agent.catalog.other_programs import other_program

# The beginnings of pages, in each program's own spelling.
ROUTER_WITHOUT_TRAFFIC = b"""# HELP router_cpu_usage_percent CPU usage percent
# TYPE router_cpu_usage_percent gauge
router_cpu_usage_percent 3.1
# HELP vllm:num_requests_running Number of running requests
# TYPE vllm:num_requests_running gauge
# HELP vllm:current_qps Current Queries Per Second
# TYPE vllm:current_qps gauge
"""
ROUTER = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{server="http://10.0.0.7:8000"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{server="http://10.0.0.7:8000"} 0.0
# TYPE vllm:current_qps gauge
vllm:current_qps{server="http://10.0.0.7:8000"} 1.5
# TYPE vllm:healthy_pods_total gauge
vllm:healthy_pods_total{server="http://10.0.0.7:8000"} 1.0
"""
PAGES = {
    "SGLang's router": b'smg_http_requests_total{method="POST",path="/generate"} 4\n',
    "vllm-router": b"vllm_router_active_workers 2\n",
    "llm-d's endpoint picker (EPP)": b"# TYPE inference_pool_ready_pods gauge\n"
    b'inference_pool_ready_pods{name="pool"} 3\n',
    "Dynamo's frontend": b'go_info 1\ndynamo_frontend_requests_total{model="m"} 4\n',
    "LiteLLM": b'litellm_proxy_total_requests_metric_total{route="/chat/completions"} 1.0\n',
    "nginx": b"nginx_connections_active 2\n",
    "dcgm-exporter": b'DCGM_FI_DEV_GPU_TEMP{gpu="0"} 30\n',
    "AMD's device-metrics-exporter": b'amd_gpu_gfx_activity{gpu_id="0"} 3\n',
    "goodput-agent": b"# HELP llm_agent_info x\nllm_agent_info 1\n",
}


@pytest.mark.parametrize(("program", "page"), PAGES.items(), ids=PAGES)
def test_a_program_is_known_by_its_metrics(program: str, page: bytes) -> None:
    assert other_program(b"python_info 1\n" + page) == program


@pytest.mark.parametrize("page", [ROUTER, ROUTER_WITHOUT_TRAFFIC])
def test_a_router_with_the_names_of_an_engine_is_known(page: bytes) -> None:
    assert other_program(page) == "production-stack's router"


def test_a_program_is_unknown_by_a_label_or_a_word_of_a_help_text() -> None:
    page = b'# HELP a as in vllm:current_qps\na{series="litellm_x"} 1\n'
    assert other_program(page) is None
