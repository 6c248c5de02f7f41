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
# As tests/conftest.py does, without what else it imports.
CONFTEST = """
from tests import rerun

pytest_addoption, pytest_configure = rerun.add_options, rerun.register

def pytest_collection_modifyitems(items):
    rerun.mark(items)
"""


def module(folder: Path, name: str, imports: str = "", *, without: str = "") -> None:
    text = TESTS.format(module=name, imports=imports)
    if without:
        text = text[: text.index(f"def {without}")]
    (folder / f"test_{name}.py").write_text(text)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-ra", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_tests_of_real_parts_that_fail_run_again_and_those_that_pass_alone_are_unsteady(
    tmp_path: Path,
) -> None:
    module(tmp_path, "parts", WITH_PARTS)
    whole = run(tmp_path, "--failed-parts", "cache/failed", "-n", "2")
    assert "2 failed, 1 passed" in whole.stdout.splitlines()[-1]
    assert whole.returncode == 0
    once, always = "test_parts.py::test_once", "test_parts.py::test_always"
    # Two processes end in any order.
    assert {*(tmp_path / "cache/failed").read_text().splitlines()} == {once, always}
    alone = run(tmp_path, "--alone", "cache/failed", "@cache/failed")
    assert alone.returncode == 1
    unsteady = [line for line in alone.stdout.splitlines() if line.startswith("unsteady")]
    reason = "AssertionError: assert False + where False = failed_before('parts once')"
    assert unsteady == [f"unsteady: {once}: {reason}"]
    assert run(tmp_path, "--alone", "cache/failed", once).returncode == 0


@pytest.mark.parametrize("broken", [False, True], ids=["failure", "import"])
def test_what_fails_without_real_parts_fails_the_run_at_once(tmp_path: Path, broken: bool) -> None:
    module(tmp_path, "parts", WITH_PARTS, without="test_always")
    if broken:
        (tmp_path / "test_broken.py").write_text(f"{WITH_PARTS}\nimport nothing_of_this_name\n")
    else:
        module(tmp_path, "pure", without="test_always")
    options = ("--failed-parts", "failed", "--continue-on-collection-errors")
    assert run(tmp_path, *options).returncode != 0
    assert (tmp_path / "failed").read_text() == "test_parts.py::test_once\n"
