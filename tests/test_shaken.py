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
BROKEN = "import nothing_of_this_name\n"


def shaken(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """The exit status and the lines of a run."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.shaken", "--busy", "0", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout.splitlines()


def test_it_says_how_often_what_failed_and_a_seed_repeats_an_order(tmp_path: Path) -> None:
    (tmp_path / "test_timed.py").write_text(TIMED)
    (tmp_path / "test_pure.py").write_text(PURE)
    status, lines = shaken(tmp_path, "--rounds", "2", "--seed", "7")
    assert status == 1
    assert lines[-1] == "failed in 1 of 2 rounds: test_timed.py::test_sometimes"
    assert re.findall(r"round \d of 2: --seed (\d)", "\n".join(lines)) == ["7", "8"]
    status, lines = shaken(tmp_path, "--rounds", "1", "--seed", "8")
    assert (status, lines[-1]) == (0, "nothing failed in 1 rounds")
    orders = re.findall(r"\d{9}", (tmp_path / "order").read_text())
    assert len(orders) == 3
    assert orders[0] != orders[1] == orders[2]
    # A round that does not come to its end.
    (tmp_path / "test_broken.py").write_text(BROKEN)
    status, lines = shaken(tmp_path, "--rounds", "1", "--seed", "7", "test_broken.py")
    assert status == 1
    assert lines[-1].startswith("failed in 1 of 1 rounds: ")
