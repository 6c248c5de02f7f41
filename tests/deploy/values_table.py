"""The table of values in the chart's README: `python -m tests.deploy.values_table` writes it."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import yaml

from tests.deploy.kit import CHART

README = CHART / "README.md"
_HEADING = "## Values\n"
# Mappings that have one row, as one writes them in one piece.
_WHOLE = ("resources", "monitors")


class Value(NamedTuple):
    """A value with its path, its default and the first sentence of its comment."""

    path: str
    default: str
    meaning: str


def values() -> Iterator[Value]:
    """The chart's values, in the order of `values.yaml`."""
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    yield from _below(root, (), text.splitlines())


def _below(node: yaml.MappingNode, path: tuple[str, ...], lines: list[str]) -> Iterator[Value]:
    for key, value in node.value:
        here = (*path, key.value)
        if isinstance(value, yaml.MappingNode) and value.value and key.value not in _WHOLE:
            yield from _below(value, here, lines)
        else:
            default = json.dumps(yaml.SafeLoader("").construct_document(value))
            yield Value(".".join(here), default, _meaning(lines, key.start_mark.line))


def _meaning(lines: list[str], line: int) -> str:
    comment: list[str] = []
    while line and lines[line - 1].lstrip().startswith("# "):
        line -= 1
        comment.insert(0, lines[line].strip().removeprefix("# "))
    sentence, dot, _ = " ".join(comment).partition(". ")
    return (sentence + dot).strip().replace("|", "\\|")


def table() -> str:
    """The table in Markdown."""
    rows = [f"| `{each.path}` | `{each.default}` | {each.meaning} |" for each in values()]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows, ""])


def written() -> str:
    """The README with the table of now."""
    before, heading, _ = README.read_text(encoding="utf-8").partition(_HEADING)
    return f"{before}{heading}\n{table()}"


if __name__ == "__main__":
    README.write_text(written(), encoding="utf-8")
