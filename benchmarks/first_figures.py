"""Seconds from the agent's start to the first right figure, at each step of the setup.

The engine is the real vLLM, and a client asks it all the time. Each step's agent is started as a
user starts it, with a new database and what the earlier steps added. The GPU is a stand-in.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import requests
from playwright.sync_api import Browser

from agent.analysis.setup_steps import StepName
from tests.real_parts.agent_process import AgentOfUser, AgentPorts
from tests.real_parts.chromium import browsing, opened_in
from tests.real_parts.ports import free_port
from tests.real_parts.tiny_model import tiny_model
from tests.real_parts.vllm import PROMPT, SpanExport, Vllm, plugin_environment
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import build

ENGINE = "chat-0"
# The figures of a minute come when it is over and its rows are there.
_WITHIN_S = 240.0
_PAUSE_S, _TOKENS = 0.05, 8
_PAGE_TEXT = "By the engines' own counters and histograms"

# What an agent shows, by its URL; true once the figure is there.
Read = Callable[[AgentOfUser], object]


def _newest(agent: AgentOfUser) -> dict[str, Any]:
    rows: list[dict[str, Any]] = agent.api.json("/api/v1/requests", {"limit": "1"})["items"]
    return rows[0]


def _has_rates(agent: AgentOfUser) -> bool:
    counted = agent.api.summary()["engine_counts"]
    return bool(counted["throughput_rps"] > 0 and counted["latencies_ms"]["ttft"]["p50"]["upper"])


def _in_terminal(agent: AgentOfUser) -> bool:
    command = [sys.executable, "-m", "agent", "top", agent.url, "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return bool(shown["rates"]["requests/s"] > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step: the settings that it adds, and its first figures by their names."""

    name: StepName
    figures: Mapping[str, Read]
    of_engine: Mapping[str, Any] = field(default_factory=dict)
    of_agent: Mapping[str, Any] = field(default_factory=dict)


def _steps(plugin: Path, proxy: int) -> Iterator[Step]:
    yield Step(
        name=StepName.SPANS,
        figures={"a request's phases": lambda agent: _newest(agent)["prefill_s"] is not None},
    )
    yield Step(
        name=StepName.PLUGIN,
        figures={"its cached tokens": lambda agent: _newest(agent)["cached_tokens"] is not None},
        of_engine={"plugin_socket": str(plugin)},
    )
    yield Step(
        name=StepName.PROXY,
        figures={"the user's view": lambda agent: _newest(agent)["vantage"] == "joined"},
        of_agent={"proxy": {"listen": f"127.0.0.1:{proxy}"}},
    )
    yield Step(
        name=StepName.GPU,
        figures={"a GPU's facts": lambda agent: agent.api.items("/api/v1/gpus", {})[0]["facts"]},
        of_engine={"gpus": [0]},
        of_agent={"nvml": {"enabled": True}},
    )
    yield Step(
        name=StepName.PRICE,
        figures={"a bill": lambda agent: agent.api.summary()["cost"]["bill_usd"]},
        of_engine={"gpu_hour_usd": 2.5},
    )
    yield Step(
        name=StepName.MODEL_CONFIG,
        figures={"MFU": lambda agent: agent.api.summary()["mfu"]},
        of_engine={"model_config": str(tiny_model())},
    )


def run() -> bool:
    """Print the seconds of each step; all figures must come."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, ports, proxy = Path(name), AgentPorts.free(), free_port()
        plugin = folder / "vllm.sock"
        build(folder)
        engine = stack.enter_context(
            Vllm(
                folder,
                port=free_port(),
                spans=SpanExport.grpc(ports.grpc),
                service=ENGINE,
                extra=("--enable-prompt-tokens-details",),
                environment=plugin_environment(folder / "plugin", plugin),
            )
        )
        browser = stack.enter_context(browsing())
        with _asked(engine, engine.url):
            # Its spans go to another agent's port.
            _plain(folder, engine, browser)
        seen: dict[str, Any] = {"name": ENGINE, "url": engine.url}
        settings: dict[str, Any] = {"nvml": {"enabled": False}}
        for step in _steps(plugin, proxy):
            seen |= step.of_engine
            settings = {**settings, **step.of_agent, "engines": [seen]}
            url = f"http://127.0.0.1:{proxy}" if "proxy" in settings else engine.url
            own = folder / f"agent with {step.name}"
            own.mkdir()
            agent = AgentOfUser.with_settings(
                own, ports, settings, {"LD_LIBRARY_PATH": str(folder)}
            )
            with _asked(engine, url):
                _measure(step.name, agent, step.figures)
    return True


def _plain(folder: Path, engine: Vllm, browser: Browser) -> None:
    def on_page(agent: AgentOfUser) -> bool:
        with opened_in(browser, agent.url) as there:
            return bool(there.html(_PAGE_TEXT))

    figures: dict[str, Read] = {"API": _has_rates, "page": on_page, "top": _in_terminal}
    agent = AgentOfUser.without_file(folder, AgentPorts.free(), engine.url)
    _measure(StepName.METRICS, agent, figures)


def _measure(step: str, agent: AgentOfUser, figures: Mapping[str, Read]) -> None:
    began_s = time.monotonic()
    with agent:
        after = [f"ready after {time.monotonic() - began_s:.1f} s"]
        for name, read in figures.items():
            eventually(partial(read, agent), within_s=_WITHIN_S, what=f"{step}: {name}")
            after.append(f"{name} after {time.monotonic() - began_s:.1f} s")
    print(f"first figures, {step}: {', '.join(after)}", flush=True)


@contextmanager
def _asked(engine: Vllm, url: str) -> Iterator[None]:
    """Completions, one after the other, until the block ends."""
    ended = threading.Event()

    def ask() -> None:
        body = {"model": engine.model, "prompt": PROMPT, "max_tokens": _TOKENS, "stream": True}
        while not ended.wait(_PAUSE_S):
            # A proxy listens only while its agent runs, and cuts its streams then.
            with suppress(requests.RequestException):
                requests.post(f"{url}/v1/completions", json=body, timeout=_WITHIN_S)

    thread = threading.Thread(target=ask, name="client")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
