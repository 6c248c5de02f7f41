"""Runs a script with the engine's Python, where transformers and vLLM are, and reads its JSON."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.real_parts.tiny_model import engine_command

HERE = Path(__file__).parent


def answer_of(script: str, asked: object) -> Any:
    """The last line that a script of this folder prints, as JSON; `asked` is its input."""
    finished = subprocess.run(
        engine_command(HERE / script),
        input=json.dumps(asked),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])
