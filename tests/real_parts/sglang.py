"""A real SGLang on the processor, with the repository's plugin."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.real_parts.engine_server import EngineServer
from tests.real_parts.processes import PartMissing, ServerProcess
from tests.real_parts.tiny_model import engine_python, tiny_model
from tests.real_parts.vllm import plugin_environment

INSTALLER = Path(__file__).parents[2] / ".ci" / "install-sglang"


def sglang_folder() -> Path:
    """The folder with SGLang; PartMissing where it is not installed."""
    finished = subprocess.run([INSTALLER, "--where"], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise PartMissing("SGLang is not installed: run .ci/install-parts")
    return Path(finished.stdout.strip())


class Sglang(EngineServer):
    """One SGLang server with the plugin; its start takes about 30 s."""

    ready_path = "/ready"
    start_within_s = 240.0

    def __init__(
        self, folder: Path, *, port: int, plugin_socket: Path, extra: Sequence[str] = ()
    ) -> None:
        super().__init__(folder, name="sglang", port=port)
        self._socket = plugin_socket
        self._extra = tuple(extra)

    def _launched(self) -> ServerProcess:
        plugin = plugin_environment(self._folder / "plugin", self._socket)
        # Each process imports for itself, and a sixth of that time was search for garbage.
        quiet = self._folder / "quiet"
        quiet.mkdir(exist_ok=True)
        (quiet / "sitecustomize.py").write_text("import gc; gc.set_threshold(100_000, 50, 100)")
        paths = (plugin["PYTHONPATH"], str(quiet), str(sglang_folder()))
        return ServerProcess(
            self._arguments(),
            self.log,
            environment={
                **plugin,
                "PYTHONPATH": os.pathsep.join(paths),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    @property
    def scheduler(self) -> psutil.Process:
        """The process that computes."""
        return next(child for child in self._children() if "scheduler" in child.name())

    def _arguments(self) -> list[str | Path]:
        return [
            engine_python(),
            *("-P", "-m", "sglang.launch_server"),
            *("--model-path", tiny_model(), "--served-model-name", self.model),
            *("--device", "cpu", "--attention-backend", "torch_native"),
            *("--cuda-graph-backend-decode", "disabled"),
            *("--cuda-graph-backend-prefill", "disabled"),
            *("--max-total-tokens", "8192", "--sleep-on-idle"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *self._extra,
        ]
