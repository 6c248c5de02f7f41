"""The files of deployment as their tools read them: compose files, charts and the Dockerfile."""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import kubernetes_validate
import yaml
from dockerfile_parse import DockerfileParser
from jsonschema import Draft202012Validator

from tests.real_parts.helm import documents, rendered, run

_TOOLS = Path(sys.executable).parent

# A name and a version: `latest`, a bare name or a bare major version would change later.
PINNED = re.compile(r"[a-z0-9][a-z0-9./-]*:v?\d+\.\d+(\.\d+)?(-[a-z0-9.-]+)?")


def complaints(*command: str | Path) -> str:
    """Complaints of a tool beside this Python about a file; empty when it accepts the file."""
    finished = subprocess.run(
        [_TOOLS / command[0], *command[1:]], capture_output=True, text=True, check=False
    )
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr


ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker-compose.yml"
HOST = ROOT / "deploy" / "compose" / "host.yml"

_VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::(?P<kind>[?-])(?P<text>[^}]*))?\}")


class Mount(NamedTuple):
    """A file, a folder or a volume inside a container."""

    service: str
    source: str
    target: str
    read_only: bool


def document(path: Path = COMPOSE) -> dict[str, Any]:
    """The file, its variables not yet filled in."""
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def services() -> dict[str, dict[str, Any]]:
    """The services by name, of all profiles."""
    found: dict[str, dict[str, Any]] = document()["services"]
    return found


def names_on_the_network() -> set[str]:
    """Every name by which a container can reach another."""
    aliases = {
        alias
        for service in services().values()
        for alias in service.get("networks", {}).get("default", {}).get("aliases", ())
    }
    return aliases | services().keys()


def mounts() -> Iterator[Mount]:
    """The mounts of every service, in both files."""
    for path in (COMPOSE, HOST):
        for name, service in document(path)["services"].items():
            for volume in service.get("volumes", ()):
                source, target, *flags = volume.split(":")
                yield Mount(name, source, target, flags == ["ro"])


def mounted(service: str, target: str) -> Path:
    """The file or folder of the repository that is mounted in a container at this path."""
    (found,) = (mount for mount in mounts() if mount[0::2] == (service, target))
    return ROOT / found.source


def required_variables() -> set[str]:
    """The variables without which Compose refuses to start."""
    text = COMPOSE.read_text(encoding="utf-8")
    return {found["name"] for found in _VARIABLE.finditer(text) if found["kind"] == "?"}


def filled(text: str, variables: Mapping[str, str]) -> str:
    """The text with its variables filled in; KeyError where a required one is missing."""

    def value(found: re.Match[str]) -> str:
        if found["kind"] == "-":
            return variables.get(found["name"]) or found["text"]
        return variables[found["name"]]

    return _VARIABLE.sub(value, text)


def environment(service: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The environment that a service's container starts with."""
    given = services()[service].get("environment", {})
    return {name: filled(value, variables) for name, value in given.items()}


CHARTS = ROOT / "deploy" / "helm"
CHART = CHARTS / "goodput-agent"
FOLDER = Path(__file__).parent / "helm"
VALUES = {path.stem: path for path in sorted((FOLDER / "values").glob("*.yaml"))}
# A chart of an operator's own that has ours as a dependency.
YOURS = "your-vllm"
NAMES = (*VALUES, YOURS)
_SCHEMAS = Path(__file__).parent / "schemas"
_KUBERNETES = "1.37"
_CUSTOM = ("monitoring.coreos.com/", "keda.sh/", "gateway.networking.k8s.io/")


@cache
def rendering(name: str) -> str:
    """What Helm makes of a values file, or of the operator's own chart."""
    if name != YOURS:
        return rendered(CHART, "--values", VALUES[name])
    with tempfile.TemporaryDirectory() as folder:
        chart = with_dependency(Path(folder))
        return rendered(chart, "--set", "goodput-agent.dashboards.enabled=false")


def with_dependency(folder: Path) -> Path:
    """A copy of the operator's own chart, with ours inside of it."""
    chart = Path(shutil.copytree(CHARTS / YOURS, folder / YOURS))
    shutil.copytree(CHART, folder / CHART.name)
    run("helm", "dependency", "build", chart)
    return chart


def objects(name: str) -> Sequence[dict[str, Any]]:
    """The objects of a rendering."""
    return documents(rendering(name))


def only(name: str, kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = (found for found in objects(name) if found["kind"] == kind)
    return found


def pod(name: str) -> dict[str, Any]:
    """The template of the one pod of a rendering."""
    (found,) = (o for o in objects(name) if o["kind"] in {"Deployment", "DaemonSet"})
    template: dict[str, Any] = found["spec"]["template"]
    return template


def agent_container(name: str) -> dict[str, Any]:
    """The agent's container."""
    found: dict[str, Any] = next(
        each for each in containers_of(pod(name)) if each["name"] == "agent"
    )
    return found


def containers_of(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The containers of a pod, native sidecars first."""
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def check(found: Mapping[str, Any]) -> None:
    """Raise what Kubernetes, or the operator of a custom resource, would say against an object."""
    if found["apiVersion"].startswith(_CUSTOM):
        schema = yaml.safe_load((_SCHEMAS / f"{found['kind'].lower()}.json").read_text("utf-8"))
        Draft202012Validator(schema).validate(found)
    else:
        kubernetes_validate.validate(found, _KUBERNETES, strict=True)


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


def instruction_of(stage: Sequence[Instruction], name: str) -> Instruction:
    """The one instruction of this name."""
    (found,) = (instruction for instruction in stage if instruction.name == name)
    return found


def copied() -> Iterator[str]:
    """Paths that any stage copies from the repository."""
    for stage in stages():
        for instruction in stage:
            if instruction.name == "COPY" and "--from=" not in instruction.value:
                yield from instruction.words()[:-1]


def _kept_wheels() -> Path:
    """The folder that keeps the wheels of the image's lock file: an index takes half a minute."""
    lock = (ROOT / "requirements-image.lock").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "goodput-agent"
    cache.mkdir(parents=True, exist_ok=True)
    return cache / f"image-wheels-{hashlib.sha256(lock).hexdigest()[:16]}"


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
        wheels = _kept_wheels()
        downloads = " pip download " in command
        if downloads and wheels.is_dir():
            # Their hashes are checked again.
            environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
        subprocess.run(command, shell=True, cwd=self.workdir, env=environment, check=True)
        if downloads and not wheels.is_dir():
            with tempfile.TemporaryDirectory(dir=wheels.parent) as folder:
                copy = shutil.copytree(self.environment["WHEELS"], Path(folder) / "wheels")
                copy.rename(wheels)
