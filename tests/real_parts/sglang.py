"""A real SGLang on the processor, with the repository's plugin."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.real_parts.processes import PartMissing, ServerProcess, answers
from tests.real_parts.tiny_model import engine_python, tiny_model
from tests.real_parts.vllm import plugin_environment

MODEL = "tiny-llama"
# On a busy machine a start may take minutes.
START_WITHIN_S = 240.0
INSTALLER = Path(__file__).parents[2] / ".ci" / "install-sglang"


def sglang_folder() -> Path:
    """The folder with SGLang; PartMissing where it is not installed."""
    finished = subprocess.run([INSTALLER, "--where"], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise PartMissing("SGLang is not installed: run .ci/install-parts")
    return Path(finished.stdout.strip())


class Sglang:
    """One SGLang server with the plugin; it is up, about 30 s later, when `start` returns."""

    def __init__(
        self, folder: Path, *, port: int, plugin_socket: Path, extra: Sequence[str] = ()
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "sglang.log"
        self._folder = folder
        self._port = port
        self._socket = plugin_socket
        self._extra = tuple(extra)
        self._process: ServerProcess | None = None

    def start(self) -> None:
        """Return when /health returns 200; PartFailed with the log's end if it never does."""
        plugin = plugin_environment(self._folder / "plugin", self._socket)
        paths = (plugin["PYTHONPATH"], str(sglang_folder()))
        self._process = ServerProcess(
            self._arguments(),
            self.log,
            environment={
                **plugin,
                "PYTHONPATH": os.pathsep.join(paths),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )
        try:
            self._process.wait_until(lambda: answers(f"{self.url}/ready"), within_s=START_WITHIN_S)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Kill it: SGLang itself waits for connections that clients keep open."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    @property
    def scheduler(self) -> psutil.Process:
        """The process that computes."""
        assert self._process is not None, "SGLang was not started"
        children = psutil.Process(self._process.pid).children(recursive=True)
        return next(child for child in children if "scheduler" in child.name())

    def _arguments(self) -> list[str | Path]:
        return [
            engine_python(),
            *("-P", "-m", "sglang.launch_server"),
            *("--model-path", tiny_model(), "--served-model-name", MODEL),
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--cuda-graph-backend-decode", "disabled"),
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--max-total-tokens", "8192"),
            *("--host", "127.0.0.1", "--port", str(self._port)),
            *self._extra,
        ]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
