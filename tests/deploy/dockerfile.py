"""The Dockerfile's instructions, and its build stage done again in a folder without an engine."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"

_NOT_COPIED = shutil.ignore_patterns("__pycache__")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continued lines joined."""

    name: str
    value: str

    def words(self) -> list[str]:
        """Its words, from JSON or from plain text."""
        found: list[str] = (
            json.loads(self.value) if self.value.startswith("[") else self.value.split()
        )
        return found


def stages() -> list[list[Instruction]]:
    """The instructions before the first FROM, then those of each stage."""
    parser = DockerfileParser(path=str(DOCKERFILE))
    found: list[list[Instruction]] = [[]]
    for row in parser.structure:
        if row["instruction"] == "FROM":
            found.append([])
        if row["instruction"] != "COMMENT":
            found[-1].append(Instruction(row["instruction"], row["value"]))
    return found


def only(stage: Sequence[Instruction], name: str) -> Instruction:
    """The one instruction of this name."""
    (found,) = (instruction for instruction in stage if instruction.name == name)
    return found


def copied() -> Iterator[str]:
    """What is copied from the repository, in any stage."""
    for stage in stages():
        for instruction in stage:
            if instruction.name == "COPY" and "--from=" not in instruction.value:
                yield from instruction.words()[:-1]


class Replay:
    """A build stage on this machine's Python; absolute paths lie in a folder."""

    def __init__(self, folder: Path, arguments: Mapping[str, Path]) -> None:
        self._folder = folder
        self._arguments = arguments
        self._workdir = folder
        # As in a container, no other Python than the base's own is seen.
        self._environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
        }
        tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment["PATH"] = tools

    def run(self, stage: Sequence[Instruction]) -> None:
        """Do every instruction; CalledProcessError where a RUN fails."""
        steps = {
            "FROM": lambda _: None,
            "ARG": self._argument,
            "WORKDIR": self._enter,
            "COPY": self._copy,
            "RUN": self._run,
        }
        for instruction in stage:
            steps[instruction.name](instruction)

    def _argument(self, instruction: Instruction) -> None:
        name = instruction.value.partition("=")[0]
        self._environment[name] = str(self._arguments[name])

    def _enter(self, instruction: Instruction) -> None:
        self._workdir = self._folder / instruction.value.lstrip("/")
        self._workdir.mkdir(parents=True)

    def _copy(self, instruction: Instruction) -> None:
        *sources, target = instruction.words()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, self._workdir / target, ignore=_NOT_COPIED)
            else:
                shutil.copy(ROOT / source, self._workdir / target)

    def _run(self, instruction: Instruction) -> None:
        subprocess.run(
            instruction.value,
            shell=True,
            cwd=self._workdir,
            env=self._environment,
            check=True,
        )
