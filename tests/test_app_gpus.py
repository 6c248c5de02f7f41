"""The running agent on a machine with GPUs, and on one without."""

from pathlib import Path

import pytest

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.nvml.fake_driver import build, gpu_uuid


def agent_in(folder: Path, ports: AgentPorts, **environment: str) -> AgentProcess:
    """An agent whose engine is not there."""
    told = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__URL": f"sqlite:///{folder / 'goodput.db'}",
        "GOODPUT_NVML__POLL_INTERVAL": "0.2s",
        **environment,
    }
    engine = f"http://127.0.0.1:{free_port()}"
    return AgentProcess(["run", "--engine", engine], folder, ports.listen, told)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that shows one GPU."""
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


def page_with(agent: AgentProcess, name: str) -> str:
    """The metrics page, once it shows a metric."""

    def shown() -> str:
        page = agent.api.page()
        return page if name in page else ""

    return eventually(shown, within_s=WITHIN_S, what=f"{name} on the page")


def test_gpus_are_on_the_metrics_page_by_uuid(tmp_path: Path, driver: Path) -> None:
    with agent_in(tmp_path, AgentPorts.free(), LD_LIBRARY_PATH=str(driver)) as agent:
        page = page_with(agent, "gpu_memory_used_bytes")
    assert total(page, "gpu_up", gpu=gpu_uuid(0)) == 1
    assert total(page, "gpu_memory_total_bytes", gpu=gpu_uuid(0)) > 0


def test_without_nvml_the_agent_runs_on_and_says_so(tmp_path: Path) -> None:
    with agent_in(tmp_path, AgentPorts.free()) as agent:
        page = page_with(agent, "llm_agent_gpu_failures_total")
    assert "gpu_memory_used_bytes" not in page
    assert "NVML" in agent.log()


def test_reading_gpus_can_be_switched_off(tmp_path: Path, driver: Path) -> None:
    ports = AgentPorts.free()
    environment = {"LD_LIBRARY_PATH": str(driver), "GOODPUT_NVML__ENABLED": "false"}
    with agent_in(tmp_path, ports, **environment) as agent:
        page = agent.api.page()
    assert "gpu_up" not in page
    assert "llm_agent_gpu_failures_total" not in page
