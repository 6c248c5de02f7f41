"""A comparison reads well on a terminal, in a pull request, and for a program."""

import json

import pytest

from agent.outputs.comparison import json_text, markdown
from tests.outputs.golden import (
    WIDTHS,
    comparisons,
    other_load,
    printed_comparison,
    recorded,
    worse,
)


@pytest.mark.slow
def test_the_texts_are_the_recorded_ones() -> None:
    found = comparisons()
    assert found == {name: recorded(name) for name in found}


@pytest.mark.parametrize("width", WIDTHS)
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in printed_comparison(worse(), width).splitlines()) <= width


def test_the_markdown_is_one_table_with_its_verdict_first() -> None:
    lines = markdown(worse()).splitlines()
    assert lines[0] == "### :x: Worse than before"
    rows = [line for line in lines if line.startswith("|")]
    # A bar in a name would be another column.
    assert {row.replace("\\|", "").count("|") for row in rows} <= {4, 6}
    assert "more \\| requests" in markdown(other_load())


def test_the_json_is_json() -> None:
    for comparison in (worse(), other_load()):
        assert json.loads(json_text(comparison))["verdict"] == comparison.outcome
