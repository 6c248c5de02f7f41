"""The help of every command: a result can be had as JSON, and the text fits the terminal."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from agent.cli import main

WIDTH = 80
# They serve until they are stopped, or hold commands.
WITHOUT_RESULT = {"", "run", "demo", "serve", "mcp", "config", "db", "objectives"}


def commands(command: Any, name: str = "") -> Iterator[str]:
    """The words of a command and of all commands under it."""
    yield name
    if isinstance(command, TyperGroup):
        for each, below in command.commands.items():
            if not below.hidden:
                yield from commands(below, f"{name} {each}".strip())


@pytest.mark.parametrize("name", [*commands(get_command(main))])
def test_help_offers_json_of_a_result_and_is_not_cut(name: str) -> None:
    environment = {"COLUMNS": str(WIDTH)}
    shown = CliRunner().invoke(
        main, [*name.split(), "--help"], prog_name="goodput-agent", env=environment
    )
    assert shown.exit_code == 0
    assert ("--json" not in shown.output) == (name in WITHOUT_RESULT)
    assert max(map(len, shown.output.splitlines())) <= WIDTH
    assert "…" not in shown.output
