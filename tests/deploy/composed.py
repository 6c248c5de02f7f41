"""docker-compose.yml as Docker reads it, and checkers of every deployment file."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

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
