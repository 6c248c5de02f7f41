"""The running agent on a machine with GPUs, and on one without."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.span_sender import SpanSender, request_span
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.dcgm.exporter_pages import body, uuid_of
from tests.sources.engines.fixture_pages import body as engine_body
from tests.sources.engines.wire import EngineServer
from tests.sources.nvml.fake_driver import build, gpu_uuid

ENGINE = engine_body("vllm-0.32.0")


class DriverPipe:
    """A pipe to script a driver that another process has loaded."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "driver.pipe"
        os.mkfifo(self.path)

    def do(self, line: str) -> None:
        """Run a line of script.c in the driver."""
        with self.path.open("w") as pipe:
            pipe.write(f"{line}\n")


def agent_in(
    folder: Path, ports: AgentPorts, *, gpus: str = "[]", **environment: str
) -> AgentProcess:
    """An agent whose engine, with these GPUs, is not running."""
    variables = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__FILE": str(folder / "goodput.db"),
        "GOODPUT_NVML__POLL_INTERVAL": "0.2s",
        **environment,
    }
    url = f"http://127.0.0.1:{free_port()}"
    settings = folder / "agent.yml"
    settings.write_text(
        f"engines: [{{name: chat, url: '{url}', scrape_interval: 0.5s, gpus: {gpus}}}]\n"
    )
    return AgentProcess(["run", "--config", settings], folder, ports.listen, variables)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a driver that shows one GPU."""
    folder = tmp_path_factory.mktemp("driver")
    build(folder)
    return folder


def exposition_with(agent: AgentProcess, name: str) -> str:
    """The exposition, once it contains a metric."""

    def shown() -> str:
        page = agent.api.exposition()
        return page if name in page else ""

    return eventually(shown, within_s=WITHIN_S, what=f"{name} on the page")


def exposition_with_failure(agent: AgentProcess, **labels: str) -> str:
    """The exposition, once it counts a failed read of GPUs."""

    def counted() -> str:
        page = agent.api.exposition()
        return page if total(page, "llm_agent_gpu_failures_total", **labels) else ""

    return eventually(counted, within_s=WITHIN_S, what=f"a failed read {labels}")


def stored_gpus(agent: AgentProcess) -> list[dict[str, Any]]:
    """The stored GPUs, once the agent has stored its samples."""

    def stored() -> list[dict[str, Any]]:
        # The list has samples that are not stored yet.
        gpus = list(requests.get(f"{agent.url}/api/v1/gpus").json()["items"])
        each = [requests.get(f"{agent.url}/api/v1/gpus/{item['gpu']}") for item in gpus]
        return gpus if all(response.ok for response in each) else []

    return eventually(stored, within_s=WITHIN_S, what="stored samples")


@pytest.fixture(scope="module")
def with_gpus(driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """An agent with two GPUs, whose settings name four."""
    folder = tmp_path_factory.mktemp("with-gpus")
    environment = {"LD_LIBRARY_PATH": str(driver), "STANDIN_GPUS": "2"}
    gpus = f"[0, 9, GPU-nowhere, {gpu_uuid(0)}]"
    with agent_in(folder, AgentPorts.free(), gpus=gpus, **environment) as agent:
        yield agent


def test_gpus_are_in_the_exposition_and_on_the_api_by_uuid(with_gpus: AgentProcess) -> None:
    page = exposition_with(with_gpus, "gpu_memory_used_bytes")
    for index in (0, 1):
        assert total(page, "gpu_up", gpu=gpu_uuid(index)) == 1
        assert total(page, "gpu_memory_total_bytes", gpu=gpu_uuid(index)) > 0
    items = stored_gpus(with_gpus)
    assert [item["gpu"] for item in items] == [gpu_uuid(0), gpu_uuid(1)]
    assert items[0]["facts"]["gpu_memory_total_bytes"] > 0


def test_a_missing_configured_gpu_is_named_at_the_start(
    with_gpus: AgentProcess,
) -> None:
    page = exposition_with_failure(with_gpus, reason="not_there")
    assert total(page, "llm_agent_gpu_failures_total", reason="not_there") == 2
    log = " ".join(with_gpus.log().split())
    assert "engine chat: its GPU 'GPU-nowhere' is not there" in log
    assert "engine chat: its GPU 9 is not there" in log
    assert f"{gpu_uuid(0)} (index 0)" in log


def test_without_nvml_the_agent_keeps_running_and_logs_the_reason(tmp_path: Path) -> None:
    with agent_in(tmp_path, AgentPorts.free()) as agent:
        page = exposition_with_failure(agent)
    assert "gpu_memory_used_bytes" not in page
    assert "NVML" in agent.log()


def wait_for_polls(agent: AgentProcess, engine: str) -> None:
    """Wait for a few more polls of the engine."""

    def scrapes() -> float:
        return total(agent.api.exposition(), "llm_agent_scrapes_total", engine=engine)

    before = scrapes()
    eventually(lambda: scrapes() > before + 2, within_s=WITHIN_S, what="scrapes of the engine")


def failures_and_scrapes(agent: AgentProcess) -> tuple[float, float]:
    """The counts of failed GPU reads and of scrapes of the engine."""
    page = agent.api.exposition()
    scrapes = total(page, "llm_agent_scrapes_total", engine="chat")
    return total(page, "llm_agent_gpu_failures_total"), scrapes


def fault_of(agent: AgentProcess, gpu: str) -> dict[str, Any]:
    """The first fault of this GPU that the agent reports."""

    def faults() -> list[dict[str, Any]]:
        return [event for event in agent.api.events(kind="GPU_FAULT") if event["gpu"] == gpu]

    return eventually(faults, within_s=WITHIN_S, what=f"a fault of {gpu}")[0]


def scripted(driver: Path, pipe: DriverPipe) -> dict[str, str]:
    """The environment of an agent that has two GPUs of this driver."""
    return {
        "LD_LIBRARY_PATH": str(driver),
        "STANDIN_GPUS": "2",
        "STANDIN_PIPE": str(pipe.path),
    }


def test_a_fault_of_a_gpu_is_one_of_the_engine_that_is_configured_with_it_or_runs_on_it(
    tmp_path: Path, driver: Path
) -> None:
    pipe = DriverPipe(tmp_path)
    works = [sys.executable, "-c", "sum(range(10_000_000)); input()", "--max-num-seqs", "64"]
    with EngineServer() as engine, subprocess.Popen(works, stdin=subprocess.PIPE) as front:
        engine.answers("/metrics", ENGINE)
        every = {"url": engine.url, "scrape_interval": "0.5s"}
        settings = {
            "engines": [
                {"name": "chat", "gpus": [1], "pids": [os.getpid()], **every},
                {"name": "batch", "pids": [front.pid], "limits": {"step_tokens": 2048}, **every},
            ],
            "nvml": {"poll_interval": "0.2s"},
        }
        held = {**scripted(driver, pipe), "STANDIN_HELD": "nvmlInitWithFlags"}
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings, held) as agent:
            pipe.do(f"process 0 compute {front.pid} 1000000")
            pipe.do("release")
            exposition_with(agent, "gpu_up")
            wait_for_polls(agent, "batch")
            pipe.do("xid 1 79 -1 -1")
            xid = fault_of(agent, gpu_uuid(1))
            page = exposition_with(agent, "gpu_xid_errors_total")
            # A lost GPU lists no processes.
            pipe.do("lose 0 15")
            lost = fault_of(agent, gpu_uuid(0))
        front.kill()
    assert f"engine chat: GPU 1 is {gpu_uuid(1)}" in " ".join(agent.log().split())
    assert (xid["engine"], xid["confidence"], xid["evidence"]["xid"]) == ("chat", "certain", 79)
    assert total(page, "llm_engine_events_total", engine="chat", kind="GPU_FAULT") == 1
    assert lost["engine"] == "batch"
    # It first falls off the bus; then the driver no longer lists it.
    assert lost["evidence"]["problem"] in ("gpu_lost", "gpu_missing")
    assert total(page, "llm_engine_cpu_seconds_total", engine="batch", role="front") > 0
    assert total(page, "llm_engine_max_running_requests", engine="batch") == 64
    assert total(page, "llm_engine_max_step_tokens", engine="batch") == 2048
    assert "llm_engine_max_context_tokens" not in page


def test_a_lost_gpu_is_reported_also_after_a_restart(tmp_path: Path, driver: Path) -> None:
    ports, library = AgentPorts.free(), {"LD_LIBRARY_PATH": str(driver)}
    with agent_in(tmp_path, ports, STANDIN_GPUS="2", **library) as agent:
        stored_gpus(agent)
    with agent_in(tmp_path, ports, gpus="[1]", STANDIN_GPUS="1", **library) as agent:
        event = fault_of(agent, gpu_uuid(1))
        page = exposition_with(agent, "gpu_memory_used_bytes")
        assert total(page, "gpu_up", gpu=gpu_uuid(0)) == 1
        assert f'gpu_up{{gpu="{gpu_uuid(1)}"}} 0.0' in page
        assert total(page, "llm_agent_gpu_failures_total", reason="gpu_missing") > 0
    assert (event["engine"], event["evidence"]["problem"]) == ("chat", "gpu_missing")
    assert f"GPU {gpu_uuid(1)} (index 1) was there and is gone" in agent.log()


def test_gpus_are_read_from_a_dcgm_exporter_alone_and_one_that_hangs_delays_nothing(
    tmp_path: Path, driver: Path
) -> None:
    with EngineServer() as exporter:
        exporter.answers("/metrics", body("dcgm-4.5-default"))
        settings = {"GOODPUT_DCGM__URL": exporter.url, "GOODPUT_DCGM__POLL_INTERVAL": "0.2s"}
        library = {"LD_LIBRARY_PATH": str(driver)}
        with agent_in(tmp_path, AgentPorts.free(), **settings, **library) as agent:
            page = exposition_with(agent, "gpu_memory_used_bytes")
            exporter.drips("/metrics", b"")
            exposition_with_failure(agent, reason="exporter_timeout")
            failed, scraped = failures_and_scrapes(agent)
            eventually(
                lambda: failures_and_scrapes(agent)[1] >= scraped + 4,
                within_s=WITHIN_S,
                what="further scrapes",
            )
            # A poll takes 4 s; if scrapes waited for it, there would be one for each.
            assert failures_and_scrapes(agent)[0] <= failed + 2
    assert total(page, "gpu_up", gpu=uuid_of(0)) == 1
    assert gpu_uuid(0) not in page


def test_a_driver_that_hangs_delays_no_scrape_and_no_span(tmp_path: Path, driver: Path) -> None:
    pipe, ports = DriverPipe(tmp_path), AgentPorts.free()
    with agent_in(tmp_path, ports, **scripted(driver, pipe)) as agent:
        exposition_with(agent, "gpu_memory_used_bytes")
        pipe.do("hold nvmlDeviceGetFieldValues")
        exposition_with(agent, 'reason="not_answering"')
        sender = SpanSender(ports.grpc)
        assert sender.export([request_span(f"request-{number}") for number in range(100)])
        wait_for_polls(agent, "chat")
        assert total(agent.api.exposition(), "gpu_up") == 0
        pipe.do("release")
        eventually(
            lambda: total(agent.api.exposition(), "gpu_up") == 2, within_s=WITHIN_S, what="the GPUs"
        )
