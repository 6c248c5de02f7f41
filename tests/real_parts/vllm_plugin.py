"""The repository's plugin of vLLM, put where an engine finds it without an installation."""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

PLUGIN = Path(__file__).parents[2] / "plugins" / "vllm"


def plugin_environment(folder: Path, socket: Path) -> dict[str, str]:
    """The environment of an engine with the plugin, which sends to this socket.

    `folder` gets the plugin's metadata, as an installation writes them.
    """
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    installed = folder / f"{project['name'].replace('-', '_')}-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n"
    )
    (installed / "entry_points.txt").write_text(_entry_points(project["entry-points"]))
    paths = (str(folder), str(PLUGIN), os.environ.get("PYTHONPATH", ""))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GOODPUT_AGENT_SOCKET": str(socket),
    }


def _entry_points(groups: Mapping[str, Mapping[str, str]]) -> str:
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in points.items()), ""]
    return "\n".join(lines)
