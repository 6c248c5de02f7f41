"""What the plugin's package has of the agent: it runs where there is no agent."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from vendoring import CORE, PACKAGE, vendored

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return vendored(ROOT)


def imported(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_no_import_of_the_agent_is_left(files: dict[str, str]) -> None:
    assert CORE in files
    for path, source in files.items():
        assert not [name for name in imported(source) if name.split(".")[0] == "agent"], path


def test_all_that_is_imported_of_the_agent_is_there(files: dict[str, str]) -> None:
    modules = {path.removesuffix(".py").removesuffix("/__init__") for path in files}
    for path, source in files.items():
        for name in imported(source):
            if name.startswith(f"{PACKAGE}.agent"):
                assert name.removeprefix(f"{PACKAGE}.").replace(".", "/") in modules, path


def test_no_module_needs_more_than_vllm_has(files: dict[str, str]) -> None:
    """msgspec alone; what is imported for the types only is not there either."""
    ours = {*sys.stdlib_module_names, PACKAGE, "msgspec"}
    others = {name.split(".")[0] for source in files.values() for name in imported(source)} - ours
    assert others == set()


def test_the_licence_is_a_file_of_its_own() -> None:
    """A link out of the folder leads nowhere in an sdist: no installer unpacks it."""
    licence = ROOT / "plugins" / "vllm" / "LICENSE"
    assert not licence.is_symlink()
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_package_can_be_imported_without_the_agent(
    files: dict[str, str], tmp_path: Path
) -> None:
    package = tmp_path / PACKAGE
    for source in (ROOT / "plugins" / "vllm" / PACKAGE).glob("*.py"):
        package.mkdir(exist_ok=True)
        (package / source.name).write_text(source.read_text())
    for path, content in files.items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_text(content)
    check = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import {PACKAGE}.front as front; "
        f"assert front.__file__.startswith({str(tmp_path)!r}); front.shared_front(); "
        "assert 'agent' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path, check=True)
