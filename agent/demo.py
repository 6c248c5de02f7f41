"""The `demo` command: the agent with a simulated engine to watch."""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from importlib.util import find_spec
from urllib.parse import quote

from agent.app import run
from agent.errors import AgentError, SettingsInvalid
from agent.settings import EngineSettings, OtlpSettings, Settings, StorageSettings
from agent.settings.doors import TokenFile
from agent.settings.security_settings import SecuritySettings

_LOG = logging.getLogger(__name__)

# Simulated rows must never be mixed with real ones.
_DATABASE_URL = "sqlite:///goodput-demo.db"


# What the simulator imports and a plain install leaves out: the extra `demo` in pyproject.toml.
EXTRA_PACKAGES = (
    "aiohttp",
    "opentelemetry.exporter.otlp.proto.grpc",
    "opentelemetry.exporter.otlp.proto.http",
)


class SimulatorFailed(AgentError):
    """The simulator's process ended before it listened."""


class DemoNotInstalled(AgentError):
    """The packages of the extra `demo` are not installed."""


async def run_demo(settings: Settings) -> None:
    """Start a simulated vLLM in a process of its own and watch it, until stopped."""
    _require_extra()
    _cancel_on_sigterm()
    simulator = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agent.simulator", "--port", "0",
        "--service-name", "simulator", *_span_target(settings.otlp),
        stdout=PIPE, env={**os.environ, **_span_headers(settings.security)},
    )  # fmt: skip
    try:
        url = await _announced_url(simulator)
        watched = EngineSettings(name="simulator", url=url)
        _LOG.info("SIMULATED: the figures come from a simulator at %s, not from a real engine", url)
        await run(
            settings.model_copy(update={"engines": (watched,), "storage": _storage(settings)}),
            simulated=True,
        )
    finally:
        await _end(simulator)


def _require_extra() -> None:
    missing = [package for package in EXTRA_PACKAGES if find_spec(package) is None]
    if missing:
        raise DemoNotInstalled(
            f"the demo needs {', '.join(missing)}; install it with: pip install "
            f"'goodput-agent[demo]' (in an image: docker build --build-arg EXTRAS=[demo])"
        )


def _storage(settings: Settings) -> StorageSettings:
    """The database: a file of its own, unless the settings have one."""
    if "url" in settings.storage.model_fields_set:
        return settings.storage
    return settings.storage.model_copy(update={"url": _DATABASE_URL})


def _cancel_on_sigterm() -> None:
    """End the simulator on SIGTERM, until the agent handles the signal itself."""
    demo = asyncio.current_task()
    assert demo is not None, "a coroutine always runs in a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, demo.cancel)


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
    token = security.ingest_tokens.read_text(encoding="utf-8").split()[0]
    return {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": f"authorization={quote(f'Bearer {token}')}"}


async def _announced_url(simulator: Process) -> str:
    assert simulator.stdout is not None, "the simulator's output was asked for"
    async for line in simulator.stdout:
        words = line.decode().split()
        if words[:3] == ["simulator", "listening", "on"]:
            return words[3]
    raise SimulatorFailed(f"the simulator ended with exit code {await simulator.wait()}")


async def _end(simulator: Process) -> None:
    # The agent has ended and cannot receive its last spans, so there is nothing to wait for.
    if simulator.returncode is None:
        simulator.kill()
    await simulator.wait()
