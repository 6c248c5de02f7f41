"""Meanings of a class's fields: the string below each field in its source."""

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from textwrap import dedent


@cache
def field_meanings(declared: type) -> Mapping[str, str]:
    """The meaning of each field that has one, by its name, in one line."""
    (tree,) = ast.parse(dedent(inspect.getsource(declared))).body
    assert isinstance(tree, ast.ClassDef), "the source of a class is a class"
    found = ((_field(above), _text(below)) for above, below in pairwise(tree.body))
    return {name: text for name, text in found if name is not None and text is not None}


def summary_of(declared: type) -> str:
    """The first sentence of a class's docstring."""
    return inspect.cleandoc(declared.__doc__ or "").partition("\n\n")[0].replace("\n", " ")


def _field(node: ast.stmt) -> str | None:
    """The name of the field that a statement declares."""
    declares = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    return node.target.id if declares else None  # type: ignore[attr-defined]


def _text(node: ast.stmt) -> str | None:
    """The text of a statement that is only a string."""
    constant = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(constant, ast.Constant) or not isinstance(constant.value, str):
        return None
    return " ".join(constant.value.split())
