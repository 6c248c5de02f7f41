"""A comparison reads well on a terminal, in a pull request, and for a program."""

import json

import pytest

from agent.outputs.comparison import json_text
from tests.outputs.comparison.golden import FOLDER, WIDTHS, other_load, terminal, texts, worse


@pytest.mark.slow
def test_the_texts_are_as_they_were() -> None:
    kept = {
        path.name: path.read_text("utf-8") for path in FOLDER.glob("*.*") if path.suffix != ".py"
    }
    found = {name: kept.get(name) for name in texts()}
    assert texts() == found


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in terminal(worse(), width).splitlines()) <= width


def test_the_markdown_is_one_table_with_its_verdict_first() -> None:
    lines = texts()["worse.md"].splitlines()
    assert lines[0] == "### :x: Worse than before"
    rows = [line for line in lines if line.startswith("|")]
    # A bar in a name would be another column.
    assert {row.replace("\\|", "").count("|") for row in rows} <= {4, 6}
    assert "more \\| requests" in texts()["other-load.md"]


def test_the_json_is_json() -> None:
    for comparison in (worse(), other_load()):
        assert json.loads(json_text(comparison))["verdict"] == comparison.outcome
