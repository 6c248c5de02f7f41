"""Every reason for which a source of GPUs counts a failure is in the reference."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.catalog.gpu_problems import XidGrade
from agent.catalog.reasons import ExpositionFault, FetchFailed
from agent.sources.nvml.library import REASONS

ROOT = Path(__file__).parents[2]
SOURCES = (
    "sources/nvml/*.py",
    "sources/dcgm/*.py",
    "pipeline/gpu_inventory.py",
    "catalog/gpu_problems.py",
)
# What takes a reason as its first word.
TAKERS = {"NvmlUnavailable", "RowUnusable", "on_failure", "_count", "gpu_failed", "_miss_unread"}
# What the reader of pages says of lines; of the rest, what it says of no page of metrics.
LINES = {
    ExpositionFault.LINE_MALFORMED,
    ExpositionFault.VALUE_NOT_FINITE,
    ExpositionFault.SERIES_REPEATED,
}
OF_ENGINES = {ExpositionFault.JSON_MALFORMED, ExpositionFault.HISTOGRAM_INCOMPLETE}


def _nodes() -> Iterator[ast.AST]:
    for source in SOURCES:
        for file in (ROOT / "agent").glob(source):
            yield from ast.walk(ast.parse(file.read_text()))


def _written(node: ast.AST) -> Iterator[ast.expr]:
    """Where a reason is written down: given, counted under, or named for both."""
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[first, *_]):
            if name in TAKERS:
                yield first
            elif name == "get":
                yield from node.args[1:]
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=key):
            if name.endswith("dropped"):
                yield key
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as word):
            if name.strip("_").isupper():
                yield word


def _reasons() -> set[str]:
    written = {
        word.value
        for node in _nodes()
        for written in _written(node)
        for word in ast.walk(written)
        if isinstance(word, ast.Constant) and isinstance(word.value, str)
    }
    words = {word for word in written if re.fullmatch(r"[a-z]+(_[a-z]+)*", word)}
    page = {
        f"exporter_{reason}" for reason in {*FetchFailed, *ExpositionFault} - LINES - OF_ENGINES
    }
    return {*words, *page, *LINES, *REASONS.values()} - {*XidGrade}


def test_reasons_are_found_where_they_are_given() -> None:
    assert {"no_gpu", "link_row", "xid_malformed", "not_there", "init_failed"} <= _reasons()


@pytest.mark.parametrize("reason", sorted(_reasons()))
def test_a_reason_is_in_the_reference(reason: str) -> None:
    assert f"`{reason}`" in (ROOT / "docs/gpus.md").read_text()
