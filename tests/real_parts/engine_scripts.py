"""Runs a script with the engine's Python, where transformers and vLLM are, and reads its JSON."""

import hashlib
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.real_parts.processes import PartFailed
from tests.real_parts.tiny_model import engine_command, engine_python

HERE = Path(__file__).parent


def answer_of(script: str, asked: object, packages: Path | None = None) -> Any:
    """The last line that a script of this folder prints, as JSON; `asked` is its input.

    To load these libraries takes long, so an answer is kept beside the engine: the same script
    gives the same libraries' answer to the same question. `packages` is a folder of more
    libraries, whose name contains their versions.
    """
    question = json.dumps(asked)
    kept = _kept(HERE / script, question, packages)
    if not kept.exists():
        _write(kept, _run(HERE / script, question, packages))
    return json.loads(kept.read_bytes())


def _kept(script: Path, question: str, packages: Path | None) -> Path:
    """The file of this answer; the engine's folder is named by the versions of its libraries."""
    versions = packages.name if packages else ""
    parts = (script.read_bytes(), question.encode(), versions.encode())
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()
    return engine_python().parents[1] / "answers" / f"{script.stem}-{key}.json"


def _run(script: Path, question: str, packages: Path | None) -> str:
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    finished = subprocess.run(
        engine_command(script),
        input=question,
        env={**os.environ, **offline, **({"PYTHONPATH": str(packages)} if packages else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if finished.returncode != 0:
        raise PartFailed(f"{script.name} ended with {finished.returncode}: {finished.stderr}")
    return finished.stdout.splitlines()[-1]


def _write(kept: Path, answer: str) -> None:
    kept.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=kept.parent, delete=False) as unfinished:
        unfinished.write(answer)
    # The rename makes the file appear only when it is complete.
    Path(unfinished.name).rename(kept)
