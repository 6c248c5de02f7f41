"""A whole run repeats its failed tests of real parts, alone, and no others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

# Each fails as often as its name says.
TESTS = """
from pathlib import Path

{imports}

def failed_before(name):
    file = Path(__file__).with_name(name)
    there = file.exists()
    file.touch()
    return there

def test_never(): ...

def test_once():
    assert failed_before("{module} once")

def test_always():
    assert "{module}" == "steady"
"""
WITH_PARTS = "from tests.real_parts.processes import ServerProcess"


def module(folder: Path, name: str, imports: str = "", *, without: str = "") -> None:
    text = TESTS.format(module=name, imports=imports)
    if without:
        text = text[: text.index(f"def {without}")]
    (folder / f"test_{name}.py").write_text(text)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-ra", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_test_of_real_parts_that_passes_alone_is_unsteady_and_fails_no_run(
    tmp_path: Path,
) -> None:
    module(tmp_path, "parts", WITH_PARTS, without="test_always")
    whole = run(tmp_path, "--failed-parts", "cache/failed", "-n", "2")
    assert "1 failed, 1 passed" in whole.stdout.splitlines()[-1]
    assert whole.returncode == 0
    assert (tmp_path / "cache/failed").read_text() == "test_parts.py::test_once\n"
    alone = run(tmp_path, "--alone", "@cache/failed")
    assert "unsteady: test_parts.py::test_once" in alone.stdout.splitlines()
    assert "1 passed" in alone.stdout.splitlines()[-1]
    assert alone.returncode == 0


def test_a_test_of_real_parts_that_fails_twice_fails_the_run(tmp_path: Path) -> None:
    module(tmp_path, "parts", WITH_PARTS)
    assert run(tmp_path, "--failed-parts", "failed").returncode == 0
    alone = run(tmp_path, "--alone", "@failed")
    assert alone.returncode == 1
    unsteady = [line for line in alone.stdout.splitlines() if line.startswith("unsteady")]
    assert unsteady == ["unsteady: test_parts.py::test_once"]


def test_a_failure_without_real_parts_fails_the_run_at_once(tmp_path: Path) -> None:
    module(tmp_path, "parts", WITH_PARTS, without="test_always")
    module(tmp_path, "pure", without="test_always")
    assert run(tmp_path, "--failed-parts", "failed").returncode == 1
    assert (tmp_path / "failed").read_text() == "test_parts.py::test_once\n"


def test_a_module_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    module(tmp_path, "parts", WITH_PARTS, without="test_always")
    (tmp_path / "test_broken.py").write_text(f"{WITH_PARTS}\nimport nothing_of_this_name\n")
    options = ["--continue-on-collection-errors", "-n", "2"]
    assert run(tmp_path, "--failed-parts", "failed", *options).returncode != 0
