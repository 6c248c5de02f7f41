"""Logs that strangers sent, each as the log of an engine that the running agent sees die."""

from pathlib import Path
from typing import Any

import pytest

from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

FOREIGN = Path(__file__).parent / "data" / "foreign"
CAUSES = {
    "50-sglang-watchdog.log": "Watchdog timeout (self.watchdog_timeout=300)",
    "52-vllm-nccl-collective-timeout.log": "Watchdog caught collective operation timeout: WorkNCCL"
    "(SeqNum=203441, OpType=GATHER",
}
ILLEGAL_ACCESS = (
    "[TensorRT-LLM][ERROR] CUDA runtime error in cudaEventSynchronize(get()): an illegal memory "
    "access was encountered\n"
)
PAGES = {"50": "sglang-0.5.23", "52": "vllm-0.32.0"}


def death(folder: Path, page: bytes, lines: str) -> dict[str, Any]:
    """The event of an engine that writes these lines and goes away, as the API has it."""
    log = folder / "engine.log"
    log.write_text("INFO: it works\n")
    engine = EngineServer()
    with engine:
        engine.answers("/metrics", page)
        engine.answers("/health", b"")
        configured = {"name": "chat", "url": engine.url, "log": str(log), "scrape_interval": "0.3s"}
        settings = {"engines": [configured], "nvml": {"enabled": False}}
        with AgentProcess.with_settings(folder, AgentPorts.free(), settings) as agent:
            with log.open("a") as written:
                written.write(lines)
            engine.stop()
            found = eventually(
                lambda: [
                    each
                    for each in agent.api.events(window="1h")
                    if each["kind"] in ("ENGINE_DEAD", "GPU_FAULT")
                ],
                within_s=WITHIN_S,
                what="its death",
            )
    (event,) = found
    return dict(event)


@pytest.mark.parametrize("name", CAUSES)
def test_the_death_of_an_engine_names_its_cause(tmp_path: Path, name: str) -> None:
    event = death(tmp_path, body(PAGES[name[:2]]), (FOREIGN / name).read_text())
    assert (event["kind"], event["confidence"]) == ("ENGINE_DEAD", "certain")
    assert CAUSES[name] in event["evidence"]["log_line"]


def test_an_illegal_access_in_tensorrt_llm_is_a_fault_of_the_gpu_and_not_the_abort_after_it(
    tmp_path: Path,
) -> None:
    abort = "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 1.\n"
    event = death(tmp_path, body("vllm-0.32.0"), ILLEGAL_ACCESS + abort)
    assert event["kind"] == "GPU_FAULT"
    assert event["evidence"]["cause_line"] == ILLEGAL_ACCESS.strip()
    assert event["evidence"]["log_line"].startswith("MPI_ABORT was invoked on rank 1")
