"""Which random faults in the agent the tests catch, and by which test.

`python -m tests.mutants --seed 1 --count 60 --tree PATH` mutates copies of a tree. `--mutants FILE`
repeats the mutants of an earlier output on another tree: a mutant is found by its function and the
text of its statement, also in another file. Further options are pytest's.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

PACKAGES = ("agent/analysis", "agent/store", "agent/sources")
_PYTEST = ("-m", "pytest", "-xqra", "--timeout=120", "--hypothesis-seed=0", "-pno:cacheprovider")
_STAGE_LIMIT = "30m"
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_LOG = re.compile(r"^(self\.)?_?log(ger|ging)?\.\w+\(")
_PAIRS = (
    "Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq, Is IsNot, IsNot Is, And Or,"
    "Or And, In NotIn, NotIn In, Add Sub, Sub Add, Mult Div, Div Mult, FloorDiv Div, Mod Mult"
)
_OTHER = {first: others for first, *others in map(str.split, _PAIRS.split(","))}
_EXTREMES = {"min": "max", "max": "min"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: a statement of a function, without its body, and what replaces it."""

    file: str
    function: str
    original: str
    mutated: str


def statements(tree: ast.AST, function: str = "") -> Iterator[tuple[str, list[ast.stmt], int]]:
    """Each statement: the name of its function, and its index in a list of statements."""
    for field in _BODIES:
        nodes: list[ast.stmt] = getattr(tree, field, [])
        for index, node in enumerate(nodes):
            inner = f"{function}.{node.name}" if isinstance(node, _NAMED) else function
            if isinstance(node, ast.stmt) and not isinstance(node, (*_NAMED, ast.Try, ast.Match)):
                yield function, nodes, index
            yield from statements(node, inner)


def _alone(node: ast.stmt) -> ast.stmt:
    alone = copy(node)
    for field in _BODIES:
        if hasattr(node, field):
            setattr(alone, field, [ast.Pass()] if field == "body" else [])
    return alone


def _other_operators(node: Any) -> Iterator[ast.AST]:
    field = "ops" if isinstance(node, ast.Compare) else "op"
    operator = node.ops[0] if field == "ops" else getattr(node, field, None)
    for name in _OTHER.get(type(operator).__name__, ()):
        yield _with(node, field, 0, getattr(ast, name)())


def _other_values(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Call(func=ast.Name(id=name)) if name in _EXTREMES:
            yield ast.Call(ast.Name(_EXTREMES[name]), node.args, node.keywords)
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()
        case ast.Return(value=ast.AST()):
            yield ast.Return(ast.Constant(None))


def _mutated(node: ast.AST) -> Iterator[list[ast.AST]]:
    """For each node of a statement: the statements with another node in its place."""
    # Not in the texts of errors and logs.
    if isinstance(node, (ast.JoinedStr, ast.Raise, ast.arguments)) or _LOG.match(ast.unparse(node)):
        return
    yield [*_other_operators(node), *_other_values(node)]
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if field in ("test", "ifs"):
                yield [_with(node, field, index, ast.Constant(answer)) for answer in (True, False)]
            if field != "annotation" and isinstance(child, ast.AST):
                for options in _mutated(child):
                    yield [_with(node, field, index, option) for option in options]


def _with(node: ast.AST, field: str, index: int, child: ast.AST) -> ast.AST:
    changed, value = copy(node), getattr(node, field)
    several = isinstance(value, list)
    setattr(changed, field, [*value[:index], child, *value[index + 1 :]] if several else child)
    return changed


def mutants(tree: Path) -> Iterator[list[Mutant]]:
    """The mutants of each node that has some."""
    for path in _modules(tree):
        name = str(path.relative_to(tree))
        for function, nodes, index in statements(ast.parse(path.read_text("utf-8"))):
            original = ast.unparse(_alone(nodes[index]))
            for options in _mutated(_alone(nodes[index])):
                texts = {ast.unparse(ast.fix_missing_locations(each)) for each in options}
                if found := sorted(texts - {original}):
                    yield [Mutant(name, function, original, text) for text in found]


def _modules(tree: Path) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (tree / package).rglob("*.py"))


def apply(mutant: Mutant, tree: Path) -> Path | None:
    """Write a mutant into a copy of a tree; returns the file, None if the statement is gone."""
    wanted = mutant.function.split(".")
    # The same function, in this file or another; then one of its name in another class.
    for length in (len(wanted), 1):
        for path in filter(Path.is_file, [tree / mutant.file, *_modules(tree)]):
            module = ast.parse(path.read_text("utf-8"))
            for function, nodes, index in statements(module):
                found = ast.unparse(_alone(nodes[index])) == mutant.original
                if found and function.split(".")[-length:] == wanted[-length:]:
                    nodes[index] = _changed(mutant.mutated, nodes[index])
                    path.write_text(ast.unparse(module), "utf-8")
                    return path
    return None


def _changed(text: str, node: ast.stmt) -> ast.stmt:
    # In a function, where `return` and `await` may stand.
    function: Any = ast.parse(f"async def function():\n{textwrap.indent(text, ' ')}").body[0]
    changed: ast.stmt = function.body[0]
    for field in filter(lambda field: hasattr(changed, field), _BODIES):
        setattr(changed, field, getattr(node, field))
    return changed


def stages(file: Path, tree: Path) -> Iterator[list[str]]:
    """Tests to run: of the module, of its importers, then of its package and of the agent."""
    _, package, *folders, name = file.relative_to(tree).with_suffix("").parts
    tests = tree / "tests"
    texts = {path: path.read_text("utf-8") for path in sorted(tests.rglob("test_*.py"))}
    mirror = sorted(tests.joinpath(package, *folders).glob(f"test_{name}*.py"))
    parent = ".".join(("agent", package, *folders))
    imports = re.compile(rf"{parent}\.{name}\b|from {parent} import .*\b{name}\b")
    engine = {tests / "real_engine", tests / "end_to_end"}
    importers = [path for path in texts if imports.search(texts[path]) and path not in mirror]
    words = re.compile("|".join((name, *folders)))
    rest = [path for path in texts if tests / package in path.parents]
    rest += [path for path in sorted(tests.glob("test_app*.py")) if words.search(texts[path])]
    for paths in (mirror, importers, [*rest, tests / "test_app.py"]):
        yield [str(path.relative_to(tree)) for path in paths if engine.isdisjoint(path.parents)]


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of a tree, in which mutants are written and tests run."""

    root: Path
    command: Sequence[str]

    def result(self, mutant: Mutant) -> str:
        """The test that fails with a mutant and passes without it; or `survived`, or `gone`."""
        before = {path: path.read_text("utf-8") for path in _modules(self.root)}
        file = apply(mutant, self.root)
        if file is None:
            return "gone"
        text, ignored = file.read_text("utf-8"), list[str]()
        try:
            for tests in filter(None, stages(file, self.root)):
                while failed := self._first_failure(*tests, *ignored):
                    file.write_text(before[file], "utf-8")
                    if self._first_failure(failed) is None:
                        return f"caught by {failed}"
                    ignored.append(f"--deselect={failed}")
                    file.write_text(text, "utf-8")
        finally:
            file.write_text(before[file], "utf-8")
        return "survived"

    def _first_failure(self, *arguments: str) -> str | None:
        # The copy comes before the tree that its packages are installed for.
        environment = {**os.environ, "PYTHONPATH": str(self.root)}
        command, out = [*self.command, *arguments], subprocess.PIPE
        run = subprocess.run(command, cwd=self.root, env=environment, stdout=out, check=False)
        lines = run.stdout.decode(errors="replace")
        # Not the errors in the log of a failed test, which has several spaces after the level.
        failed = re.findall(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", lines, re.MULTILINE)
        return failed[0] if failed else arguments[0] if run.returncode not in (0, 5) else None


def copy_of(tree: Path, folder: Path, options: Sequence[str]) -> Copy:
    """Copy what is in the repository; tests run in the environment of the tree, if it has one."""
    for name in subprocess.check_output(["git", "ls-files"], cwd=tree, text=True).splitlines():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree / name, folder / name, follow_symlinks=False)
    own = tree / ".venv/bin/python"
    python = str(own) if own.exists() else sys.executable
    return Copy(folder, ["timeout", "--signal=KILL", _STAGE_LIMIT, python, *_PYTEST, *options])


def main() -> None:
    """Try mutants; print a line for each, and the share that tests catch."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--tree", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--mutants", type=Path, help="output of a run with the mutants to try")
    given, options = parser.parse_known_args()
    if given.mutants:
        lines = given.mutants.read_text("utf-8").splitlines()
        chosen = [Mutant(**json.loads(line.partition("\t")[2])) for line in lines if "\t" in line]
    else:
        order = random.Random(given.seed)
        chosen = [order.choice(each) for each in order.sample([*mutants(given.tree)], given.count)]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        tree = copy_of(given.tree.resolve(), Path(folder), options)
        for mutant in chosen:
            results.append(tree.result(mutant))
            sys.stdout.write(f"{results[-1]}\t{json.dumps(asdict(mutant))}\n")
            sys.stdout.flush()
    tried = len(results) - results.count("gone")
    caught = tried - results.count("survived")
    sys.stdout.write(f"caught {caught} of {tried}; gone: {len(results) - tried}\n")


if __name__ == "__main__":
    main()
