"""The plugin of vLLM: its time in a step, its socket under load, and the engine's throughput."""

import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import requests
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import PAUSE_S, Sender

from tests.plugins.vllm_counts import finished, iteration, scheduler
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm, plugin_environment, switched_environment
from tests.real_parts.waiting import eventually

TARGET_US = 10.0
STEPS_PER_S, REQUESTS_PER_S = 2000, 1000
LOAD_S = 20
# The speed of a machine changes from second to second: a turn takes about one.
ENGINES, TURNS, _ASKED_IN_TURN = 5, 40, 5
TARGET_APART = 0.01
_IN_A_ROW = 10_000
# One request of many choices: a full batch, with little work for its client and the front.
_CHOICES, _TOKENS = 16, 64
_SWITCHED = Path(__file__).with_name("plugin_switch.py")
_SWITCH_VARIABLE = "GOODPUT_BENCHMARK_SWITCH"
_RECORDS = "llm_engine_plugin_records_total"


def run() -> bool:
    """Print the figures; return whether all targets are met."""
    with tempfile.TemporaryDirectory() as folder:
        socket_met = _socket(Path(folder))
        engine_met = _throughput(Path(folder))
    return socket_met and engine_met


def _agent(folder: Path, engine_url: str) -> tuple[AgentProcess, AgentPorts, Path]:
    folder.mkdir()
    path, ports = folder / "vllm.sock", AgentPorts.free()
    engine = {"name": "chat-0", "url": engine_url, "plugin_socket": str(path)}
    return AgentProcess.with_settings(folder, ports, {"engines": [engine]}), ports, path


def _socket(folder: Path) -> bool:
    agent, _, path = _agent(folder / "socket", f"http://127.0.0.1:{free_port()}")
    with agent, closing(Sender(str(path))) as sender:
        in_a_row_us = _in_a_row(Reporter(sender))
        times_us = _paced(Reporter(sender))
        sent = {"step": STEPS_PER_S * LOAD_S + _IN_A_ROW, "request": REQUESTS_PER_S * LOAD_S}

        def received() -> dict[str, float]:
            sender.send()
            page = agent.api.exposition()
            return {kind: total(page, _RECORDS, kind=kind) for kind in sent}

        eventually(lambda: received() == sent, within_s=30, what=f"{sent}; now {received()}")
        dropped = total(agent.api.exposition(), "llm_engine_plugin_dropped_total")
    typical_us = median(times_us)
    late_us = sorted(times_us)[int(0.99 * len(times_us))]
    print(
        f"plugin, processor time of a step: {in_a_row_us:.1f} us in a row, {typical_us:.1f} us at "
        f"{STEPS_PER_S} steps/s (target under {TARGET_US:.0f} us), 99th percentile "
        f"{late_us:.1f} us\n"
        f"plugin, {STEPS_PER_S} steps/s and {REQUESTS_PER_S} requests/s for {LOAD_S} s: "
        f"{dropped:.0f} records dropped (target 0)"
    )
    return max(in_a_row_us, typical_us) < TARGET_US and dropped == 0


def _in_a_row(reporter: Reporter) -> float:
    """Processor time of a step, the mean of many."""
    step, scheduled = iteration(at=time.time()), scheduler()
    before_s = time.thread_time()
    for _ in range(_IN_A_ROW):
        reporter.step(scheduled, step, 0)
    return 1e6 * (time.thread_time() - before_s) / _IN_A_ROW


def _paced(reporter: Reporter) -> list[float]:
    """Processor time of each step, at the pace of a very busy engine."""
    times_us = []
    began_s, count = time.perf_counter(), STEPS_PER_S * LOAD_S
    scheduled = scheduler()
    for number in range(count):
        ended = (finished(request_id=f"chatcmpl-{number}"),) if number % 2 else ()
        step = iteration(*ended, at=time.time())
        before_s = time.thread_time()
        reporter.step(scheduled, step, 0)
        times_us.append(1e6 * (time.thread_time() - before_s))
        while time.perf_counter() - began_s < number / STEPS_PER_S:
            time.sleep(0.0002)
    return times_us


def _throughput(folder: Path) -> bool:
    """Compare the seconds for the same tokens with and without reports of the plugin.

    Two equal engines may differ by 5 %, so each engine is compared with itself.
    """
    with ExitStack() as stack:
        agent, ports, path = _agent(folder / "engines", f"http://127.0.0.1:{free_port()}")
        stack.enter_context(agent)
        found = [_engine(folder / f"engine-{n}", ports, path) for n in range(ENGINES)]
        steps = total(agent.api.exposition(), _RECORDS, kind="step")
    by_time = [without.took_s / reported.took_s for without, reported in found]
    by_processor = [without.processor_s / reported.processor_s for without, reported in found]
    apart = abs(1 - median(by_time))
    print(
        f"plugin, tokens/s of vLLM while it reports over those while it does not, the median of "
        f"{ENGINES} engines with {TURNS} turns of each: {median(by_time):.3f} (target: at most "
        f"{TARGET_APART} apart), each {' '.join(f'{ratio:.3f}' for ratio in by_time)}; tokens per "
        f"second of processor time: {median(by_processor):.3f}; {steps:.0f} steps reported"
    )
    return apart <= TARGET_APART and steps > 0


def _engine(folder: Path, ports: AgentPorts, path: Path) -> tuple["_Work", "_Work"]:
    """The work of an engine without the plugin's reports and with them, in turns.

    Their order is one, the other twice, and the one again, so that a drift affects both alike.
    """
    folder.mkdir()
    (switch := folder / "switch").write_bytes(b"\0")
    environment = plugin_environment(folder / "installed", path)
    environment |= switched_environment(
        folder / "switched", environment, _SWITCHED, "SwitchedStatLogger"
    )
    environment[_SWITCH_VARIABLE] = str(switch)
    done = [_Work(0.0, 0.0), _Work(0.0, 0.0)]
    spans = SpanExport.grpc(ports.grpc)
    with Vllm(folder, port=free_port(), spans=spans, environment=environment) as engine:
        _work(engine)
        for turn in range(TURNS // 2):
            first = turn % 2
            for on in (first, 1 - first, 1 - first, first):
                with switch.open("r+b") as file:
                    file.write(bytes([on]))
                # What the plugin still keeps of the turn before must not be sent in this one.
                time.sleep(2 * PAUSE_S)
                done[on] += _work(engine)
    return done[0], done[1]


@dataclass(frozen=True, slots=True)
class _Work:
    """Seconds that the same tokens took, and seconds of processor time of front and core."""

    took_s: float
    processor_s: float

    def __add__(self, other: "_Work") -> "_Work":
        return _Work(self.took_s + other.took_s, self.processor_s + other.processor_s)


def _work(engine: Vllm) -> _Work:
    processes = [psutil.Process(pid) for pid in (engine.front_pid, engine.core_pid)]

    def processor_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before_s, began_s = processor_s(), time.perf_counter()
    for _ in range(_ASKED_IN_TURN):
        _ask(engine)
    return _Work(time.perf_counter() - began_s, processor_s() - before_s)


def _ask(engine: Vllm) -> None:
    body: dict[str, Any] = {
        **{"model": engine.model, "prompt": "bacade", "n": _CHOICES},
        **{"max_tokens": _TOKENS, "ignore_eos": True},
    }
    response = requests.post(f"{engine.url}/v1/completions", json=body, timeout=300)
    response.raise_for_status()
    assert response.json()["usage"]["completion_tokens"] == _CHOICES * _TOKENS
