"""The processes of the proxy benchmark, each on its processors."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import requests

from tests.real_parts.ports import free_port

_UP_WITHIN_S = 180
_STOP_WITHIN_S = 10
_INSTALL = Path(__file__).parent.parent / ".ci" / "install-peers"

# Without these, LiteLLM fetches a price list and refuses to start without a master key.
_LITELLM_ENVIRONMENT = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


@dataclass(frozen=True, slots=True)
class Served:
    """A server process on a local port."""

    name: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """Return the processor seconds of all its threads and children, from the scheduler."""
        return sum(
            int(thread.read_text().split()[0]) / 1e9
            for process in self._tree()
            for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        )

    def rss_bytes(self) -> int:
        """Return its memory, with its children's."""
        return sum(int(process.memory_info().rss) for process in self._tree())

    def _tree(self) -> Sequence[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]


def installed() -> dict[str, Path]:
    """Install the peers if needed; return the folder of commands of each, by name."""
    done = subprocess.run(["bash", _INSTALL], stdout=subprocess.PIPE, text=True, check=True)
    folders = [Path(line) for line in done.stdout.splitlines()]
    return {folder.parent.name.split("-", 1)[1].rsplit("-", 1)[0]: folder for folder in folders}


@contextmanager
def serving(proxies: set[int], others: set[int]) -> Iterator[list[Served]]:
    """Start the proxies on the first set of processors, the engine on the second."""
    peers = installed()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        engine_port = free_port()
        engine = [sys.executable, "-m", "benchmarks.proxy_engine", str(engine_port)]
        served = [stack.enter_context(running("direct", engine, engine_port, others, folder))]
        commands = _commands(peers, f"http://127.0.0.1:{engine_port}", folder)
        for name, (command, port) in commands.items():
            served.append(stack.enter_context(running(name, command, port, proxies, folder)))
        yield served


def _commands(
    peers: dict[str, Path], engine: str, folder: Path
) -> dict[str, tuple[list[str], int]]:
    ours, both, alone, relay, router, litellm = (free_port() for _ in range(6))
    model = {"model": "openai/m", "api_base": f"{engine}/v1", "api_key": "none"}
    settings = folder / "litellm.yaml"
    settings.write_text(json.dumps({"model_list": [{"model_name": "m", "litellm_params": model}]}))
    part = [sys.executable, "-m", "benchmarks.proxy_agent"]
    return {
        "agent": (agent_before(ours, engine, folder, workers=1), ours),
        "agent, two workers": (agent_before(both, engine, folder, workers=2), both),
        "relaying and measuring alone": ([*part, str(alone), engine, "measured"], alone),
        "relaying alone": ([*part, str(relay), engine], relay),
        "vllm-router": (
            f"{peers['vllm-router'] / 'vllm-router'} --worker-urls {engine} --port {router} "
            f"--policy round_robin --log-level error --prometheus-port {free_port()}".split(),
            router,
        ),
        "litellm": (
            f"{peers['litellm'] / 'litellm'} --config {settings} --host 127.0.0.1 "
            f"--port {litellm} --telemetry False".split(),
            litellm,
        ),
    }


def agent_before(
    port: int, engine: str, folder: Path, *, workers: int = 1, listen: int | None = None
) -> list[str]:
    """Return the command of the whole agent as users run it, with a proxy on the port."""
    settings = folder / f"agent-{workers}.yml"
    content = {
        "listen": {"port": listen or free_port()},
        "otlp": {"grpc": f"127.0.0.1:{free_port()}", "http": f"127.0.0.1:{free_port()}"},
        "storage": {"file": str(folder / f"goodput-{workers}.db")},
        "engines": [{"name": "chat-0", "url": engine}],
        "proxy": {"listen": f"127.0.0.1:{port}", "workers": workers},
    }
    settings.write_text(json.dumps(content))
    return [sys.executable, "-m", "agent", "run", "--config", str(settings)]


@contextmanager
def running(
    name: str, command: list[str], port: int, cores: set[int], folder: Path
) -> Iterator[Served]:
    """Run a server on these processors."""
    log = folder / f"{name}.log"
    environment = os.environ | (_LITELLM_ENVIRONMENT if name == "litellm" else {})
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores)), *command]
    with (
        log.open("w") as output,
        subprocess.Popen(pinned, stdout=output, stderr=output, env=environment) as process,
    ):
        try:
            _wait_until_up(name, port, process, log)
            yield Served(name, port, psutil.Process(process.pid))
        finally:
            process.terminate()
            try:
                process.wait(_STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_up(name: str, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _UP_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"http://127.0.0.1:{port}/v1/models", timeout=5).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"{name} did not start within {_UP_WITHIN_S} s: {log.read_text()[-2000:]}")
