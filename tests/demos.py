"""A demo as users start it, with a past of its own length."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.real_parts.agent_process import AgentPorts, AgentProcess


@contextmanager
def demo(folder: Path, past: str = "30s", **environment: str) -> Iterator[AgentProcess]:
    ports = AgentPorts.free()
    environment = {
        "GOODPUT_LISTEN__PORT": str(ports.listen),
        "GOODPUT_OTLP__GRPC": f"127.0.0.1:{ports.grpc}",
        "GOODPUT_OTLP__HTTP": f"127.0.0.1:{ports.http}",
        "GOODPUT_STORAGE__URL": f"sqlite:///{folder / 'goodput.db'}",
        **environment,
    }
    with AgentProcess(["demo", "--past", past], folder, ports.listen, environment) as agent:
        yield agent
