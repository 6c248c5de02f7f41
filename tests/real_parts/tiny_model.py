"""The model that the real engine serves: small, random, and generated without a download."""

import os
import subprocess
import tempfile
from pathlib import Path

from tests.real_parts.processes import PartMissing

MODEL_VERSION = 1
MAKER = Path(__file__).with_name("make_tiny_model.py")
INSTALLER = Path(__file__).parents[2] / ".ci" / "install-engine"


def engine_python() -> Path:
    """The Python that has vLLM; PartMissing where it is not installed."""
    finished = subprocess.run([INSTALLER, "--where"], capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise PartMissing(
            f"vLLM is not installed at {finished.stdout.strip()}: run .ci/install-parts"
        )
    return Path(finished.stdout.strip())


def engine_command(script: Path) -> list[str | Path]:
    """The command that runs a script with that Python.

    -P: the folder of our scripts also contains a module named vllm. They import torch, transformers
    and vLLM, and to search these for garbage was a sixth of their time.
    """
    run = "import gc, runpy, sys; gc.disable(); runpy.run_path(sys.argv[1], run_name='__main__')"
    return [engine_python(), "-P", "-c", run, script]


def tiny_model() -> Path:
    """The folder of the model, beside the engine's; generated on first use in about 10 s."""
    cache = engine_python().parents[2]
    folder = cache / f"tiny-llama-{MODEL_VERSION}"
    if not folder.exists():
        _make(folder)
    return folder


def _make(folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished) / folder.name
        subprocess.run(
            [engine_python(), "-P", MAKER, made],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            check=True,
            capture_output=True,
        )
        # The rename makes the folder appear only when it is complete; another process may be first.
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():
                raise
