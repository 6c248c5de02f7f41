"""The simulated engines that the `demo` command watches, and the past that it stores of them."""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from urllib.parse import quote

from agent.app.supervising import kept_imports
from agent.errors import AgentError, SettingsInvalid
from agent.http_client import http_session
from agent.settings import EngineSettings, OtlpSettings, Settings, StorageSettings
from agent.settings.access import SecuritySettings, TokenFile
from agent.settings.named_files import read_named_file
from agent.settings.settings_model import ObjectiveSettings
from agent.settings.values import duration_s
from agent.simulator.past_engine import FRAME_S, Frame, frame_of
from agent.simulator.plugin_sender import PATH_VARIABLE
from agent.simulator.scenario import ScriptedFault, load_scenario
from agent.terminal import progress_bar

if TYPE_CHECKING:
    from agent.app.past import PastAgent, SimulatedGpus

_LOG = logging.getLogger(__name__)

# Simulated rows must never be mixed with real ones.
_FILE = "goodput-demo.db"

ENGINES = ("simulator-0", "simulator-1")
SCENARIOS = Path(str(resources.files("agent.simulator") / "scenarios"))
TENANT_HEADER = "X-Tenant"
# The scenarios begin so long before the demo, and their faults come again as often.
PAST_S = 7200.0
GPU_HOUR_USD = 3.5
GPU_POLL_S = 2.0
# Of a live engine. Minutes are computed from samples that are up to three times as far apart.
SCRAPE_EVERY = "15s"
# Those of the scenarios; like vLLM, a simulator does not publish them.
LIMITS = {"running_requests": 8, "step_tokens": 2048}
_PAST = "/simulator/past"
_DRAIN_S = 1.0
_LIVE_WITHIN_S = 10.0
_PAST_WITHIN_S = 60.0
_READ_BYTES = 1 << 20


class SimulatorFailed(AgentError):
    """The simulator's process ended before it listened."""


@dataclass(frozen=True, slots=True)
class Demo:
    """The settings of the demo, and the GPUs of its engines."""

    settings: Settings
    gpus: "SimulatedGpus"


@contextmanager
def simulated_engines(settings: Settings, past_length: str) -> Iterator[Demo]:
    """Run simulated vLLMs in processes of their own, and store their past, such as `2h`."""
    past_s = _past_s(past_length)
    signal.signal(signal.SIGTERM, _exit)
    now = time.time()
    with ExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory(prefix="goodput-demo-"))
        settings = _demo_settings(settings, Path(sockets))
        log_faults(now)
        simulators = [
            stack.enter_context(_simulator(settings, engine, now - PAST_S))
            for engine in settings.engines
        ]
        # It takes as long as the start of the simulators.
        with kept_imports():
            from agent.app.past import PastAgent, SimulatedGpus

        past = PastAgent(settings)
        since = past.newest_at(now - past_s)
        urls = [_announced_url(simulator) for simulator in simulators]
        _LOG.info("SIMULATED: storing %s of past first; what it logs is simulated too", past_length)
        frames = math.ceil((time.time() - since) / FRAME_S)
        with progress_bar("simulating", frames) as done:
            asyncio.run(_store_past(past, dict(zip(ENGINES, urls, strict=True)), since, done))
        proxy = f"http://{settings.proxy.listen}"
        for url in urls:
            with http_session() as session:
                session.post(f"{url}/simulator/live", data=proxy, timeout=_LIVE_WITHIN_S)
        page = f"http://{settings.listen.host}:{settings.listen.port}"
        _LOG.info("SIMULATED: figures of simulators, not of real engines, on the page %s", page)
        yield Demo(_with_urls(settings, urls), SimulatedGpus(urls))


def scenario_file(engine: str) -> Path:
    """The scenario of an engine of the demo."""
    return SCENARIOS / f"{engine.replace('simulator', 'demo')}.yaml"


class ComingFault(NamedTuple):
    """A fault with its next time after the start of the demo, in seconds."""

    after_s: float
    engines: tuple[str, ...]
    fault: ScriptedFault


def coming_faults() -> list[ComingFault]:
    """The next time of each named fault, in their order; one that several engines have is one."""
    found: dict[str, ComingFault] = {}
    for engine in ENGINES:
        for fault in load_scenario(scenario_file(engine)).faults:
            coming = ComingFault(fault.begins_from(PAST_S) - PAST_S, (engine,), fault)
            first = found.setdefault(fault.name, coming)
            if engine not in first.engines:
                found[fault.name] = first._replace(engines=(*first.engines, engine))
    return sorted(found.values(), key=lambda coming: coming.after_s)


def log_faults(now: float) -> None:
    """Log which faults come when, by the clock, and the causes to be found."""
    coming = coming_faults()
    _LOG.info(
        "SIMULATED: %d faults come, one after the other. The page shows their causes under "
        '"Why requests missed", and their events:',
        len(coming),
    )
    for after_s, engines, fault in coming:
        at = time.strftime("%H:%M:%S", time.localtime(now + after_s))
        causes = " or ".join(fault.causes)
        _LOG.info("SIMULATED: %s %s, on %s: %s", at, fault.name, " and ".join(engines), causes)


def _past_s(length: str) -> float:
    try:
        seconds = duration_s(length)
    except ValueError as error:
        raise SettingsInvalid([f"--past: {error}"]) from error
    if seconds > PAST_S:
        raise SettingsInvalid([f"--past: {length} is longer than 2h; give 2h or less"])
    return seconds


@contextmanager
def _simulator(settings: Settings, engine: EngineSettings, origin: float) -> Iterator["Popen[str]"]:
    """Run a simulator. It also ends when this process is killed, which closes its stdin."""
    with Popen(
        [sys.executable, "-m", "agent.simulator", "--port", "0", "--service-name", engine.name,
         "--scenario", str(scenario_file(engine.name)), "--past", repr(origin),
         "--until-stdin-closes", *_span_target(settings.otlp)],
        stdin=PIPE, stdout=PIPE, text=True,
        env={**os.environ, **_span_headers(settings.security),
             PATH_VARIABLE: str(engine.plugin_socket)},
        # Ctrl-C is for the agent alone, which ends it.
        process_group=0,
    ) as process:  # fmt: skip
        assert process.stdin is not None, "the simulator's input was asked for"
        # The workers of the proxy, which end later, must not keep it open.
        os.register_at_fork(after_in_child=process.stdin.close)
        try:
            yield process
        finally:
            # The agent has ended and cannot receive its last spans: nothing to wait for.
            process.kill()


async def _store_past(
    past: "PastAgent", urls: Mapping[str, str], since: float, done: Callable[[], None]
) -> None:
    """Store the past of all engines from a Unix time on, then what became past meanwhile."""
    try:
        for part in (f"?since={since!r}", "?last=1"):
            with ExitStack() as stack:
                streams = {
                    engine: stack.enter_context(_frames(url + _PAST + part))
                    for engine, url in urls.items()
                }
                for frames in zip_longest(*streams.values()):
                    moment = zip(streams, frames, strict=True)
                    await past.take({engine: frame for engine, frame in moment if frame})
                    done()
    finally:
        await past.finish()


@contextmanager
def _frames(url: str) -> Iterator[Iterator[Frame]]:
    with (
        http_session() as session,
        session.get(url, stream=True, timeout=_PAST_WITHIN_S) as response,
    ):
        yield (frame_of(json.loads(line)) for line in response.iter_lines(_READ_BYTES))


def _demo_settings(given: Settings, sockets: Path) -> Settings:
    """The settings with the demo's engines, their price, and a proxy in front of them."""
    spans = _span_target(given.otlp)
    assert spans, "a receiver of spans is on"
    engines = tuple(
        EngineSettings.model_validate(
            {
                "name": name,
                "url": f"http://{name}.invalid",
                "scrape_interval": SCRAPE_EVERY,
                "model_config": str(SCENARIOS / "demo-model.json"),
                "dtype": "fp8",
                "kv_dtype": "bf16",
                "gpus": [index],
                "gpu_hour_usd": GPU_HOUR_USD,
                "limits": LIMITS,
                "plugin_socket": str(sockets / f"{name}.sock"),
                # A simulator's own process says nothing of the engine that it computes.
                "same_machine": False,
            }
        )
        for index, name in enumerate(ENGINES)
    )
    listen = given.proxy.listen or f"127.0.0.1:{_free_port()}"
    tenant_header = given.proxy.tenant_header or TENANT_HEADER
    proxy: dict[str, object] = {"listen": listen, "tenant_header": tenant_header}
    if "drain" not in given.proxy.model_fields_set:
        # A cut simulated response costs nothing.
        proxy["drain"] = _DRAIN_S
    return given.model_copy(
        update={
            "engines": engines,
            "objectives": _objectives(given),
            "storage": _storage(given),
            "proxy": given.proxy.model_copy(update=proxy),
            "nvml": given.nvml.model_copy(update={"enabled": True, "poll_interval": GPU_POLL_S}),
        }
    )


def _objectives(given: Settings) -> tuple[ObjectiveSettings, ...]:
    """Those of the settings, else one that the simulated model usually meets."""
    if "objectives" in given.model_fields_set:
        return given.objectives
    return (ObjectiveSettings(name="chat", ttft_ms=500, tpot_ms=50, target=0.9),)


def _with_urls(settings: Settings, urls: Sequence[str]) -> Settings:
    engines = tuple(
        engine.model_copy(update={"url": url})
        for engine, url in zip(settings.engines, urls, strict=True)
    )
    return settings.model_copy(update={"engines": engines})


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the simulator on SIGTERM, until the agent handles the signal itself."""
    raise SystemExit(0)


def _storage(settings: Settings) -> StorageSettings:
    """Those of the settings, with a file of the demo's own unless they name one."""
    if "file" in settings.storage.model_fields_set:
        return settings.storage
    return settings.storage.model_copy(update={"file": _FILE})


def _span_target(otlp: OtlpSettings) -> tuple[str, ...]:
    """The simulator's options for the receiver of spans that is on."""
    if otlp.grpc is not None:
        return ("--otlp", f"http://{otlp.grpc}")
    if otlp.http is not None:
        return ("--otlp", f"http://{otlp.http}/v1/traces", "--protocol", "http/protobuf")
    raise SettingsInvalid(["otlp: the demo sends spans; set otlp.grpc or otlp.http"])


def _span_headers(security: SecuritySettings) -> dict[str, str]:
    """The variables by which the simulator's exporter sends a token with its spans."""
    if security.tls_certificate is not None:
        raise SettingsInvalid(["security.tls_certificate: the demo sends its spans without TLS"])
    if security.ingest_tokens is None:
        return {}
    TokenFile("security.ingest_tokens", security.ingest_tokens)
    token = read_named_file(security.ingest_tokens).decode("utf-8").split()[0]
    return {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {token}')}"}


def _announced_url(simulator: "Popen[str]") -> str:
    assert simulator.stdout is not None, "the simulator's output was asked for"
    for line in simulator.stdout:
        words = line.split()
        if words[:3] == ["simulator", "listening", "on"]:
            return words[3]
    raise SimulatorFailed(f"the simulator ended with exit code {simulator.wait()}")
