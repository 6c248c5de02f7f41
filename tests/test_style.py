"""House rules that no linter holds; `make lint` runs the linters."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MODULE_LINES = {"agent": 600, "migrations": 600, "benchmarks": 600, "plugins": 600, "tests": 600}
FUNCTION_LINES = 40
POSITIONAL_ARGUMENTS = 5
CATCH_ALLS = {"utils", "util", "helpers", "helper", "manager", "misc", "base", "common", "data"}

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"))


@cache
def functions(module: Path) -> list[Function]:
    return [node for node in ast.walk(tree(module)) if isinstance(node, FUNCTIONS)]


def place(module: Path, function: Function) -> str:
    return f"{module.relative_to(ROOT)}:{function.lineno} {function.name}"


def repository_files() -> list[Path]:
    """Every file that is, or would be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


# Sizes


@pytest.mark.parametrize("folder", MODULE_LINES)
def test_a_module_has_a_maximum_length(folder: str) -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in modules(folder)}
    too_long = {
        str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MODULE_LINES[folder]
    }
    assert lines
    assert too_long == {}, too_long


def test_a_function_has_a_maximum_length() -> None:
    too_long = [
        place(module, function)
        # A migration declares a table of its time, with any number of columns.
        for module in modules(*MODULE_LINES.keys() - {"migrations"})
        for function in functions(module)
        if (function.end_lineno or 0) - function.lineno + 1 > FUNCTION_LINES
    ]
    assert too_long == [], "\n".join(too_long)


def test_a_function_takes_few_arguments_by_position() -> None:
    too_many = [
        place(module, function)
        for module in modules("agent")
        for function in functions(module)
        if not _is_command(function)
        and len({argument.arg for argument in function.args.args} - {"self", "cls"})
        > POSITIONAL_ARGUMENTS
    ]
    assert too_many == [], "\n".join(too_many)


def _is_command(function: Function) -> bool:
    """Whether its arguments are options of a command line, which are never positional."""
    return any(".command(" in ast.unparse(decorator) for decorator in function.decorator_list)


# Names, words and honesty


def test_no_module_is_a_catch_all() -> None:
    found = [path for path in modules("agent", "tests") if path.stem in CATCH_ALLS]
    assert found == []


def test_every_public_function_and_class_says_what_comes_back() -> None:
    silent = [
        f"{module.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        for module in modules("agent")
        for node in _public(tree(module))
        if ast.get_docstring(node) is None
    ]
    assert silent == [], "\n".join(silent)


def _public(tree: ast.Module) -> Iterator[Function | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_"):
            yield node


# Written in parts, so that this file does not contain the forbidden words.
FORBIDDEN = re.compile(
    "|".join(
        (
            "/" + r"(root|home|Users)/\w",
            "/" + r"work/(main|shared|\.)",
            "-" + r"-(extra-)?index-url",
            r"(?<![\w.])(\d{1,3}\.){3}\d{1,3}:\d+/" + "simple",
        )
    )
)


def test_no_file_knows_the_machine_that_it_was_written_on() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in repository_files()
        if (found := FORBIDDEN.search(path.read_bytes().decode("utf-8", errors="replace")))
    ]
    assert found == [], "\n".join(found)


def test_no_test_may_be_skipped() -> None:
    ways = re.compile(r"pytest\." + r"(skip|xfail|importorskip)|mark\." + r"(skip|skipif|xfail)")
    found = [path for path in modules("tests") if ways.search(path.read_text(encoding="utf-8"))]
    assert found == []
