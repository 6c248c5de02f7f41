"""Plugins of vLLM, put where an engine finds them without an installation."""

import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"
FORKS = Path(__file__).with_name("engine_forks.py")


def plugin_environment(folder: Path, socket: Path) -> dict[str, str]:
    """The environment of an engine with the repository's plugin, which sends to this socket.

    `folder` gets the plugin's metadata, as an installation writes them.
    """
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    _write_metadata(folder, project["name"], project["entry-points"])
    return {
        "PYTHONPATH": _paths(str(folder), str(PLUGIN), os.environ.get("PYTHONPATH", "")),
        "GOODPUT_AGENT_SOCKET": str(socket),
    }


def switched_environment(
    folder: Path, environment: Mapping[str, str], logger: Path, class_name: str
) -> dict[str, str]:
    """This environment of an engine with the plugin, which loads another stat logger in its place.

    `folder` gets a copy of the module that holds its class.
    """
    folder.mkdir(exist_ok=True)
    shutil.copy(logger, folder)
    points = {"vllm.stat_logger_plugins": {"switched": f"{logger.stem}:{class_name}"}}
    _write_metadata(folder, logger.stem, points)
    # The plugin itself can be imported, but its own entry point is not found.
    return {**environment, "PYTHONPATH": _paths(str(folder), str(PLUGIN))}


def forking_environment(folder: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """This environment of an engine, whose processes are then forked: see engine_forks.py.

    `folder` gets a copy of that module, because its own folder also has a module named vllm.
    """
    folder.mkdir(exist_ok=True)
    shutil.copy(FORKS, folder)
    points = {"vllm.general_plugins": {"forks": f"{FORKS.stem}:fork_ahead"}}
    _write_metadata(folder, FORKS.stem, points)
    others = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": _paths(str(folder), others)}


def _write_metadata(folder: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    installed = folder / f"{name.replace('-', '_')}-0.dist-info"
    installed.mkdir(parents=True, exist_ok=True)
    (installed / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(_entry_points(groups))


def _paths(*paths: str) -> str:
    return os.pathsep.join(filter(None, paths))


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    return "\n".join(lines)
