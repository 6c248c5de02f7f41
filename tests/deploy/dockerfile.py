"""The Dockerfile's instructions, and its stages replayed in a folder without a container engine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"

# Not copied from the repository, as in .dockerignore.
_NOT_COPIED = shutil.ignore_patterns("__pycache__")
# The agent compiles what it imports when it starts; pip would compile all (0 means no), and would
# look for a newer pip.
_FASTER = {"PIP_NO_COMPILE": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Instructions that say how to run the image, and change no file in it.
_METADATA = {"HEALTHCHECK", "USER", "VOLUME", "EXPOSE", "ENTRYPOINT", "CMD"}


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
    """Paths that any stage copies from the repository."""
    for stage in stages():
        for instruction in stage:
            if instruction.name == "COPY" and "--from=" not in instruction.value:
                yield from instruction.words()[:-1]


class Replay:
    """Stages run with this machine's Python, each in an empty root that holds absolute paths.

    Each root is at the same path as the one before, because installed files contain their path.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.root = folder / "root"
        self.workdir = self.root
        self._stages: list[str] = []
        # The environment of the stage, with its arguments.
        self.environment: dict[str, str] = {}
        # As in a container, only the base's own Python is visible.
        self._outer_environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PYTHON") and name != "VIRTUAL_ENV"
        }

    def run(self, stage: Sequence[Instruction]) -> None:
        """Run every instruction that changes files; CalledProcessError where a RUN fails."""
        steps = {
            "FROM": self._begin,
            "ARG": self._argument,
            "WORKDIR": self._enter,
            "COPY": self._copy,
            "RUN": self._run,
            "ENV": self._set,
        }
        for instruction in stage:
            if instruction.name not in _METADATA:
                steps[instruction.name](instruction)

    def placed(self, path: str) -> Path:
        """The path on this machine of a path in the image; relative ones start in its workdir."""
        return self.root / path[1:] if path.startswith("/") else self.workdir / path

    def _begin(self, instruction: Instruction) -> None:
        if self._stages:
            self.root.rename(self._folder / self._stages[-1])
        self._stages.append(instruction.words()[-1])
        self.root.mkdir()
        self.workdir = self.root
        self.environment = {"PATH": _PATH}

    def _argument(self, instruction: Instruction) -> None:
        name, _, default = instruction.value.partition("=")
        self.environment[name] = str(self.placed(default)) if default.startswith("/") else default

    def _enter(self, instruction: Instruction) -> None:
        self.workdir = self.placed(instruction.value)
        self.workdir.mkdir(parents=True, exist_ok=True)

    def _set(self, instruction: Instruction) -> None:
        for pair in shlex.split(instruction.value):
            name, _, value = pair.partition("=")
            self.environment[name] = Template(value).substitute(self.environment)

    def _copy(self, instruction: Instruction) -> None:
        *sources, target = (
            Template(word).substitute(self.environment) for word in instruction.words()
        )
        origin = ROOT
        if sources[0].startswith("--from="):
            origin = self._folder / sources.pop(0).partition("=")[2]
            # Variables name paths below the root; the other stage has the same paths.
            sources = [str(Path(source).relative_to(self.root)) for source in sources]
        for source in sources:
            self._copy_one(origin / source, target)

    def _copy_one(self, source: Path, target: str) -> None:
        place = Path(target) if Path(target).is_relative_to(self.root) else self.placed(target)
        if source.is_dir():
            ignored = _NOT_COPIED if source.is_relative_to(ROOT) else None
            copy = shutil.copy2 if source.is_relative_to(ROOT) else os.link
            shutil.copytree(source, place, symlinks=True, ignore=ignored, copy_function=copy)
        else:
            place = place / source.name if target.endswith("/") else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place)

    def _run(self, instruction: Instruction) -> None:
        command = re.sub(r"(?<=\s)/(?=\w)", f"{self.root}/", instruction.value)
        if os.geteuid() != 0:
            # Only root can give files to another owner.
            command = re.sub(r"--(owner|group) \d+", "", command)
        tools = {"PATH": f"{Path(sys.executable).parent}:{self.environment['PATH']}"}
        environment = {**self._outer_environment, **self.environment, **tools, **_FASTER}
        subprocess.run(command, shell=True, cwd=self.workdir, env=environment, check=True)
