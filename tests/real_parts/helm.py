"""The real Helm and kubectl, which `.ci/install-helm` keeps in a cache."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.real_parts.processes import PartFailed, PartMissing

INSTALLER = Path(__file__).parents[2] / ".ci" / "install-helm"


@cache
def _home() -> Path:
    where = subprocess.run([INSTALLER, "--where"], capture_output=True, text=True, check=False)
    if where.returncode != 0:
        raise PartMissing(f"Helm is not installed: bash {INSTALLER}")
    return Path(where.stdout.strip())


def run(program: str, *arguments: str | Path) -> str:
    """What helm or kubectl prints. Raises PartFailed with its complaint."""
    with tempfile.TemporaryDirectory() as home:
        # No settings, plugins or cluster of the machine.
        environment = {**os.environ, "HOME": home, "KUBECONFIG": f"{home}/none"}
        finished = subprocess.run(
            [_home() / program, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode != 0:
        raise PartFailed(finished.stdout + finished.stderr)
    return finished.stdout


def rendered(chart: Path, *arguments: str | Path) -> str:
    """The objects that a release `demo` of a chart makes, as YAML."""
    return run("helm", "template", "demo", chart, "--namespace", "llm", *arguments)


def documents(text: str) -> Sequence[dict[str, Any]]:
    """The objects of a text with several YAML documents."""
    return [found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found]
