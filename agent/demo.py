"""The simulated engine that the `demo` command watches."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from subprocess import PIPE, Popen
from types import FrameType
from typing import NoReturn
from urllib.parse import quote

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


@contextmanager
def simulated_engine(settings: Settings) -> Iterator[Settings]:
    """Run a simulated vLLM in a process of its own; gives the settings with it as the engine."""
    _require_extra()
    signal.signal(signal.SIGTERM, _exit)
    simulator = Popen(
        [sys.executable, "-m", "agent.simulator", "--port", "0",
         "--service-name", "simulator", *_span_target(settings.otlp)],
        stdout=PIPE, text=True, env={**os.environ, **_span_headers(settings.security)},
    )  # fmt: skip
    try:
        url = _announced_url(simulator)
        watched = EngineSettings(name="simulator", url=url)
        _LOG.info("SIMULATED: the figures come from a simulator at %s, not from a real engine", url)
        yield settings.model_copy(update={"engines": (watched,), "storage": _storage(settings)})
    finally:
        # The agent has ended and cannot receive its last spans, so there is nothing to wait for.
        simulator.kill()
        simulator.wait()


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    """End the simulator on SIGTERM, until the agent handles the signal itself."""
    raise SystemExit(0)


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


def _announced_url(simulator: "Popen[str]") -> str:
    assert simulator.stdout is not None, "the simulator's output was asked for"
    for line in simulator.stdout:
        words = line.split()
        if words[:3] == ["simulator", "listening", "on"]:
            return words[3]
    raise SimulatorFailed(f"the simulator ended with exit code {simulator.wait()}")
