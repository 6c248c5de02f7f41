"""File names in the docs exist, and class names are unique."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAP = "docs/architecture.md"
# These name modules without their folder.
CODE_PAGES = (
    MAP,
    "docs/processes.md",
    "docs/further-changes.md",
    "docs/glossary.md",
    "CONTRIBUTING.md",
)
PAGES = (
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
    *("CONTRIBUTING.md", "README.md"),
)

MADE_BY_READERS = {"deploy/compose/tokens/read"}

# A path in back quotes: `agent/store/tables.py`, `docs/proxy.md`, `tests/render/`.
PATH = re.compile(
    r"`((?:agent|alerts|benchmarks|dashboards|deploy|docs|migrations|plugins|tests|\.ci)/[\w./-]*)`"
)
BARE = re.compile(r"`(\w+\.py)`")
# A path with what it defines: `agent/analysis/verdicts.py` `Judge.judged`.
DEFINED = re.compile(r"`(agent/[\w/]+\.(?:py|js))` `([\w.]+)`")
COMMAND = re.compile(r"python -m ((?:tests|benchmarks)\.[\w.]+)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


def modules() -> list[Path]:
    return sorted((ROOT / "agent").rglob("*.py"))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = {ROOT / path for path in PATH.findall(text)}
    run = {ROOT / f"{name.replace('.', '/')}.py" for name in COMMAND.findall(text)}
    linked = {(ROOT / page).parent / path for path in LINK.findall(text)}
    missing = {str(path.relative_to(ROOT)) for path in named | run | linked if not path.exists()}
    assert sorted(missing - MADE_BY_READERS) == []


@pytest.mark.parametrize("page", CODE_PAGES)
def test_every_module_that_a_page_names_without_its_folder_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    known = {path.name for path in modules()}
    assert [name for name in BARE.findall(text) if name not in known] == []


def test_every_function_that_the_map_names_is_in_its_file() -> None:
    named = DEFINED.findall((ROOT / MAP).read_text(encoding="utf-8"))
    assert named
    assert [(path, name) for path, name in named if name not in definitions(ROOT / path)] == []


def definitions(file: Path) -> set[str]:
    """Functions, classes and methods: `judge`, `Judge`, `Judge.judged`."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".js":
        return set(re.findall(r"function (\w+)", text))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, methods)}
    return found


def test_the_map_names_every_package_and_every_source() -> None:
    text = (ROOT / MAP).read_text(encoding="utf-8")
    folders = [*(ROOT / "agent").iterdir(), *(ROOT / "agent/sources").iterdir()]
    rooms = [str(path.relative_to(ROOT)) for path in folders if (path / "__init__.py").exists()]
    assert [room for room in rooms if f"`{room}/" not in text] == []


def test_no_two_classes_share_a_name() -> None:
    places = defaultdict(list)
    for module in modules():
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(module.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_every_module_begins_by_saying_what_it_holds() -> None:
    silent = [
        str(module.relative_to(ROOT))
        for module in modules()
        if (text := module.read_text(encoding="utf-8").strip())
        and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []
