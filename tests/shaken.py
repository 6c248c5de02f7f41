"""Runs tests that start processes or read clocks many times, in random order, beside busy cores.

`python -m tests.shaken --rounds 20 [--busy 2] [arguments of pytest]`. It ends with each test that
failed in a round, and in how many rounds.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

import pytest

from tests.fast import meets_time

# It ends with the process that started it.
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
_NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED


# A plugin of pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The seed of the order, and the file for the names of tests that fail."""
    parser.addoption("--shaken-seed", type=int, default=0)
    parser.addoption("--shaken-failures", type=Path, required=False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests, and shuffle modules and the tests of each."""
    chosen = [item for item in items if meets_time(item)]
    kept = {*chosen}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    # Equal in every process of a run.
    order = random.Random(config.getoption("--shaken-seed"))
    modules = [list(tests) for _, tests in groupby(chosen, key=lambda item: item.path)]
    order.shuffle(modules)
    for tests in modules:
        order.shuffle(tests)
    items[:] = [item for tests in modules for item in tests]


class _Failures:
    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write down a failure, also of a run that does not end."""
        if report.failed:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{report.nodeid}\n")


def pytest_configure(config: pytest.Config) -> None:
    """Note failures, in the process that reports them."""
    file: Path | None = config.getoption("--shaken-failures")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Failures(file))


# The rounds


@contextmanager
def _busy_cores(number: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", _BUSY]))
            stack.callback(process.kill)
        yield


def _round(seed: int, arguments: Sequence[str]) -> set[str]:
    """The tests that failed; the round itself, if it came to no end."""
    with tempfile.TemporaryDirectory() as folder:
        failures = Path(folder, "failures")
        options = [f"--shaken-seed={seed}", f"--shaken-failures={failures}"]
        pytest_of_round = [sys.executable, "-m", "pytest", "-p", "tests.shaken", *options]
        status = subprocess.run([*pytest_of_round, *arguments], check=False).returncode
        failed = (
            {*failures.read_text(encoding="utf-8").splitlines()} if failures.exists() else set()
        )
    ended = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, _NO_TESTS}
    return failed if status in ended else failed | {f"exit code {status} of the round {seed}"}


def main(given: Sequence[str] | None = None) -> int:
    """Run the rounds; 1 if a test failed in one."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--busy", type=int, default=2, help="busy processes beside the tests")
    options, arguments = parser.parse_known_args(given)
    failed: Counter[str] = Counter()
    with _busy_cores(options.busy):
        for number in range(options.rounds):
            seed = options.seed + number
            _say(f"round {number + 1} of {options.rounds}: --seed {seed}")
            failed.update(_round(seed, arguments))
    for name, rounds in failed.most_common():
        _say(f"failed in {rounds} of {options.rounds} rounds: {name}")
    if not failed:
        _say(f"nothing failed in {options.rounds} rounds")
    return int(bool(failed))


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
