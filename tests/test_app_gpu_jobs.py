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
from tests.simulated import WITHIN_S, Simulator
from tests.sources.dcgm.exporter_pages import body, page_of, row, uuid_of
from tests.sources.engines.wire import EngineServer
from tests.sources.nvml.fake_driver import build, gpu_uuid


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


def test_gpus_are_in_the_exposition_by_uuid(with_gpus: AgentProcess) -> None:
    page = exposition_with(with_gpus, "gpu_memory_used_bytes")
    for index in (0, 1):
        assert total(page, "gpu_up", gpu=gpu_uuid(index)) == 1
        assert total(page, "gpu_memory_total_bytes", gpu=gpu_uuid(index)) > 0


def test_a_missing_configured_gpu_is_named_at_the_start(
    with_gpus: AgentProcess,
) -> None:
    page = exposition_with_failure(with_gpus, reason="not_there")
    assert total(page, "llm_agent_gpu_failures_total", reason="not_there") == 2
    log = " ".join(with_gpus.log().split())
    assert "engine chat: its GPU 'GPU-nowhere' is not there" in log
    assert "engine chat: its GPU 9 is not there" in log
    assert f"{gpu_uuid(0)} (index 0)" in log


def test_gpus_are_stored_and_on_the_api(with_gpus: AgentProcess) -> None:
    items = stored_gpus(with_gpus)
    assert [item["gpu"] for item in items] == [gpu_uuid(0), gpu_uuid(1)]
    assert items[0]["facts"]["gpu_memory_total_bytes"] > 0


def test_listed_gpus_are_those_of_the_last_poll_and_not_of_the_last_row(
    with_gpus: AgentProcess,
) -> None:
    stored_gpus(with_gpus)

    def is_newer() -> bool:
        listed = requests.get(f"{with_gpus.url}/api/v1/gpus").json()["items"][0]
        rows = requests.get(f"{with_gpus.url}/api/v1/gpus/{listed['gpu']}").json()["items"]
        return bool(listed["at"] > rows[0]["at"] and listed["age_s"] < listed["stale_after_s"])

    eventually(is_newer, within_s=WITHIN_S, what="a sample that is not stored yet")


def test_without_nvml_the_agent_keeps_running_and_logs_the_reason(tmp_path: Path) -> None:
    with agent_in(tmp_path, AgentPorts.free()) as agent:
        page = exposition_with_failure(agent)
    assert "gpu_memory_used_bytes" not in page
    assert "NVML" in agent.log()


def wait_for_polls(agent: AgentProcess) -> None:
    """Wait for a few more polls of the engine."""
    before = total(agent.api.exposition(), "llm_agent_scrapes_total", engine="chat")
    eventually(
        lambda: (
            total(agent.api.exposition(), "llm_agent_scrapes_total", engine="chat") > before + 2
        ),
        within_s=WITHIN_S,
        what="scrapes of the engine",
    )


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


def test_a_fault_of_a_gpu_is_one_of_the_engine_that_owns_it(tmp_path: Path, driver: Path) -> None:
    pipe = DriverPipe(tmp_path)
    with agent_in(tmp_path, AgentPorts.free(), gpus="[1]", **scripted(driver, pipe)) as agent:
        pipe.do("xid 1 79 -1 -1")
        xid = fault_of(agent, gpu_uuid(1))
        page = exposition_with(agent, "gpu_xid_errors_total")
        pipe.do("lose 0 15")
        lost = fault_of(agent, gpu_uuid(0))
    assert f"engine chat: GPU 1 is {gpu_uuid(1)}" in " ".join(agent.log().split())
    assert (xid["engine"], xid["confidence"], xid["evidence"]["xid"]) == ("chat", "certain", 79)
    assert total(page, "llm_engine_events_total", engine="chat", kind="GPU_FAULT") == 1
    # It first falls off the bus; then the driver no longer lists it.
    assert lost["engine"] is None
    assert lost["evidence"]["problem"] in ("gpu_lost", "gpu_missing")


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
    with agent_in(tmp_path, ports, STANDIN_GPUS="2", **library) as agent:
        assert total(exposition_with(agent, "gpu_memory_used_bytes"), "gpu_up") == 2


def test_a_slow_driver_loses_no_gpu_and_settings_are_checked_once_it_answers(
    tmp_path: Path, driver: Path
) -> None:
    """Without persistence mode the first call takes seconds."""
    ports, gpus = AgentPorts.free(), f"[0, {gpu_uuid(1)}, GPU-typo]"
    library = {"LD_LIBRARY_PATH": str(driver), "STANDIN_GPUS": "2"}
    with agent_in(tmp_path, ports, gpus=gpus, **library) as agent:
        stored_gpus(agent)
    pipe = DriverPipe(tmp_path)
    held = {**scripted(driver, pipe), "STANDIN_HELD": "nvmlInitWithFlags"}
    with agent_in(tmp_path, ports, gpus=gpus, **held) as agent:
        page = exposition_with(agent, 'reason="not_answering"')
        assert "gpu_up" not in page
        assert 'reason="not_there"' not in page
        pipe.do("release")
        page = exposition_with(agent, 'reason="not_there"')
        assert total(page, "llm_agent_gpu_failures_total", reason="not_there") == 1
        assert total(exposition_with(agent, "gpu_up"), "gpu_up") == 2
        assert agent.api.events(kind="GPU_FAULT") == []
    # Once in each run.
    assert agent.log().count("is not there;") == 2
    assert "is gone" not in agent.log()


def test_an_exporter_that_starts_late_loses_no_gpu_and_an_engine_gets_no_other_one(
    tmp_path: Path,
) -> None:
    """The driver renumbers the GPUs after the lost one."""
    ports = AgentPorts.free()
    with EngineServer() as exporter:
        settings = {"GOODPUT_DCGM__URL": exporter.url, "GOODPUT_DCGM__POLL_INTERVAL": "0.2s"}
        exporter.answers("/metrics", page_of(*energy(0, 1), *energy(1, 1)))
        with agent_in(tmp_path, ports, **settings) as agent:
            stored_gpus(agent)
        exporter.answers("/metrics", b"", status=503)
        with agent_in(tmp_path, ports, gpus="[0]", **settings) as agent:
            page = exposition_with(agent, "gpu_up")
            assert [f'gpu_up{{gpu="{uuid_of(at)}"}} 0.0' in page for at in (0, 1)] == [True, True]
            assert total(page, "llm_agent_gpu_failures_total", reason="exporter_http_status") > 0
            assert agent.api.events(kind="GPU_FAULT") == []
            exporter.answers("/metrics", page_of(*energy(1, 1, gpu="0")))
            fault = fault_of(agent, uuid_of(0))
            assert (fault["engine"], fault["evidence"]["problem"]) == ("chat", "gpu_missing")
            assert f'gpu_up{{gpu="{uuid_of(0)}"}} 0.0' in agent.api.exposition()


def test_an_index_that_gpus_of_several_hosts_have_is_named_and_a_hanging_exporter_delays_nothing(
    tmp_path: Path,
) -> None:
    with EngineServer() as exporter:
        exporter.answers("/metrics", page_of(*energy(0, 1), *energy(1, 1, gpu="0")))
        settings = {"GOODPUT_DCGM__URL": exporter.url, "GOODPUT_DCGM__POLL_INTERVAL": "0.2s"}
        with agent_in(tmp_path, AgentPorts.free(), gpus="[0]", **settings) as agent:
            page = exposition_with_failure(agent, reason="index_shared")
            exporter.drips("/metrics", b"")
            exposition_with_failure(agent, reason="exporter_timeout")
            failed, scraped = failures_and_scrapes(agent)
            eventually(
                lambda: failures_and_scrapes(agent)[0] > failed,
                within_s=WITHIN_S,
                what="another poll of the exporter",
            )
            # A poll takes 4 s; if scrapes waited for it, there would be one by now.
            assert failures_and_scrapes(agent)[1] >= scraped + 2
    assert total(page, "llm_agent_gpu_failures_total", reason="index_shared") == 1
    assert 'reason="not_there"' not in page
    assert "GPUs of several hosts have the index 0" in agent.log()


def energy(index: int, joules: int, **labels: str) -> list[str]:
    """The samples of a working GPU."""
    return [row("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", 1000 * joules, index, **labels)]


def test_an_engine_without_configured_gpus_has_those_of_its_processes(
    tmp_path: Path, driver: Path
) -> None:
    """Also when one of them is lost and lists no processes."""
    pipe, given = DriverPipe(tmp_path), [sys.executable, "-c", "input()"]
    with (
        EngineServer() as engine,
        subprocess.Popen(given, stdin=subprocess.PIPE) as front,
    ):
        chat = {"name": "chat", "url": engine.url, "scrape_interval": "0.5s", "pids": [front.pid]}
        settings = {"engines": [chat], "nvml": {"poll_interval": "0.2s"}}
        held = {**scripted(driver, pipe), "STANDIN_HELD": "nvmlInitWithFlags"}
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings, held) as agent:
            for index in (0, 1):
                pipe.do(f"process {index} compute {front.pid} 1000000")
            pipe.do("release")
            exposition_with(agent, "gpu_up")
            wait_for_polls(agent)
            pipe.do("xid 0 79 -1 -1")
            first = fault_of(agent, gpu_uuid(0))
            pipe.do("lose 1 15")
            lost = fault_of(agent, gpu_uuid(1))
        front.kill()
    assert (first["engine"], lost["engine"]) == ("chat", "chat")


def test_gpus_can_be_read_from_a_dcgm_exporter(tmp_path: Path, driver: Path) -> None:
    """Its exposition is then the only source, also with a driver."""
    with EngineServer() as exporter:
        exporter.answers("/metrics", body("dcgm-4.5-default"))
        environment = {"GOODPUT_DCGM__URL": exporter.url, "LD_LIBRARY_PATH": str(driver)}
        with agent_in(tmp_path, AgentPorts.free(), **environment) as agent:
            page = exposition_with(agent, "gpu_memory_used_bytes")
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
        wait_for_polls(agent)
        assert total(agent.api.exposition(), "gpu_up") == 0
        pipe.do("release")
        eventually(
            lambda: total(agent.api.exposition(), "gpu_up") == 2, within_s=WITHIN_S, what="the GPUs"
        )


def test_flags_of_the_engine_are_published(tmp_path: Path) -> None:
    given = [sys.executable, "-c", "input()", "--max-num-seqs", "64"]
    with (
        Simulator(tmp_path, grpc=free_port()) as engine,
        subprocess.Popen(given, stdin=subprocess.PIPE) as front,
    ):
        chat = {"name": "chat", "url": engine.url, "scrape_interval": "0.5s", "pids": [front.pid]}
        settings = {"engines": [{**chat, "limits": {"step_tokens": 2048}}]}
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings) as agent:
            page = exposition_with(agent, "llm_engine_max_running_requests")
        front.kill()
    assert total(page, "llm_engine_max_running_requests", engine="chat") == 64
    assert total(page, "llm_engine_max_step_tokens", engine="chat") == 2048
    assert "llm_engine_max_context_tokens" not in page


def test_heavy_preemption_on_a_running_engine_is_pressure_and_nothing_else(
    tmp_path: Path,
) -> None:
    """Traffic at thirty times the speed, with a cache for half of it."""
    overfull = {
        "max_model_len": 1000,
        "arrival_rate": 2.0,
        "input_tokens": {"median": 60, "sigma": 0.6, "min": 10, "max": 600},
        "output_tokens": {"median": 120, "sigma": 0.4, "min": 20, "max": 300},
        "prefill": {"tokens_per_s": 2000.0, "floor_s": 0.1},
        "decode": {"base_s": 0.25, "per_running_s": 0.01},
        "max_num_seqs": 16,
        "max_num_batched_tokens": 800,
        "kv_cache": {"blocks": 100, "block_tokens": 10},
        "abort_ratio": 0.1,
    }
    with Simulator(tmp_path, grpc=free_port(), scenario=overfull) as engine:
        settings = {"engines": [{"name": "chat", "url": engine.url, "scrape_interval": "0.5s"}]}
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings) as agent:
            exposition_with(agent, "llm_engine_preemptions_total")
            eventually(
                lambda: total(agent.api.exposition(), "llm_engine_preemptions_total") > 40,
                within_s=120,
                what="forty preemptions",
            )
            events = eventually(agent.api.events, within_s=120, what="an event")
            kinds = {event["kind"] for event in events}
            page = exposition_with(agent, "llm_engine_cpu_seconds_total")
    assert kinds == {"KV_PRESSURE"}
    assert total(page, "llm_engine_cpu_seconds_total", engine="chat", role="front") > 0
