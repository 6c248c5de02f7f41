"""`make test-shaken` finds the tests that fail only sometimes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow

# It notes the order of its tests. One of them fails in every second run.
TIMED = """
import time
from pathlib import Path
import pytest

ORDER = Path(__file__).with_name("order")

@pytest.mark.parametrize("number", range(9))
def test_order(number):
    with ORDER.open("a") as file:
        file.write(f"{number}")

def test_sometimes():
    runs = Path(__file__).with_name("runs")
    with runs.open("a") as file:
        file.write("x")
    assert len(runs.read_text()) % 2
"""
PURE = "def test_pure():\n    raise AssertionError('it is not selected')\n"


def shaken(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.shaken", *arguments, "-p", "tests.conftest"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_says_how_often_each_test_failed_and_a_seed_repeats_an_order(tmp_path: Path) -> None:
    (tmp_path / "test_timed.py").write_text(TIMED)
    (tmp_path / "test_pure.py").write_text(PURE)
    run = shaken(tmp_path, "--rounds", "2", "--seed", "7")
    assert run.returncode == 1
    *_, last = run.stdout.splitlines()
    assert last == "failed in 1 of 2 rounds: test_timed.py::test_sometimes"
    assert re.findall(r"round \d of 2: --seed (\d)", run.stdout) == ["7", "8"]
    shaken(tmp_path, "--rounds", "1", "--seed", "8")
    orders = re.findall(r"\d{9}", (tmp_path / "order").read_text())
    assert len(orders) == 3
    assert orders[0] != orders[1] == orders[2]


def test_nothing_that_fails_is_a_success(tmp_path: Path) -> None:
    (tmp_path / "test_timed.py").write_text(TIMED)
    run = shaken(tmp_path, "--rounds", "1")
    assert run.returncode == 0
    assert run.stdout.splitlines()[-1] == "nothing failed in 1 rounds"


def test_a_round_that_comes_to_no_end_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\n")
    run = shaken(tmp_path, "--rounds", "1", "--seed", "7")
    assert run.returncode == 1
    assert run.stdout.splitlines()[-1].startswith("failed in 1 of 1 rounds: ")
