"""Texts of the commands, kept in files beside this one. Run as a module, it writes them anew."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from agent.cli import main
from tests.outputs.api.serving import open_api
from tests.outputs.report.reported import invoiced
from tests.sources.model_config.published import PUBLISHED

FOLDER = Path(__file__).parent
WIDTH = 80
_FILES = {
    "config.json": json.dumps(PUBLISHED["llama-3.1-8b"]["config"]),
    "agent.yml": "name: agent-0\n"
    "engines: [{name: chat-0, url: 'http://127.0.0.1:8000', gpus: [0], gpu_hour_usd: 2.5}]\n"
    "objectives: [{name: chat, ttft_ms: 500, tpot_ms: 50, target: 0.99}]\n",
}
# Each with the files that it reads.
_CALLS = {
    "estimate": ("estimate", "config.json", "--gpu", "H100-SXM", "--context", "8192"),
    "config-check": ("config", "check", "agent.yml"),
}


def _commands(command: Any, name: str = "") -> Iterator[str]:
    """The words of a command and of all commands under it."""
    yield name
    if isinstance(command, TyperGroup):
        for each, below in command.commands.items():
            if not below.hidden:
                yield from _commands(below, f"{name} {each}".strip())


def _printed(words: Sequence[str]) -> str:
    """What a command prints on a narrow terminal."""
    ours: dict[str, str | None] = {name: None for name in os.environ if name.startswith("GOODPUT_")}
    environment = {**ours, "COLUMNS": str(WIDTH)}
    result = CliRunner().invoke(main, words, prog_name="goodput-agent", env=environment)
    assert result.exit_code == 0, result.output
    return "".join(f"{line.rstrip()}\n" for line in result.output.splitlines())


def texts() -> dict[str, str]:
    """All texts by the names of their files."""
    calls: dict[str, Sequence[str]] = {
        f"help {name}".strip().replace(" ", "-"): (*name.split(), "--help")
        for name in _commands(get_command(main))
    }
    calls.update(_CALLS)
    with tempfile.TemporaryDirectory() as name, chdir(name), open_api(Path(name)) as api:
        for file, content in _FILES.items():
            Path(file).write_text(content, encoding="utf-8")
        asked = ("report", "--statement", "--last", "10m", "--url", invoiced(api, Path(name)).url)
        calls["statement"] = asked
        calls["statement-markdown"] = (*asked, "--format", "markdown")
        return {f"{name}.txt": _printed(words) for name, words in calls.items()}


if __name__ == "__main__":
    for place, text in texts().items():
        (FOLDER / place).write_text(text, encoding="utf-8")
