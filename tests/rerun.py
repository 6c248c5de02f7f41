"""A test of real parts that fails in the whole run is run once more, alone, at its end.

`--failed-parts FILE` writes the names of such tests to a file, and why they failed beside it; if
nothing else fails, pytest succeeds. `--alone FILE @FILE` runs them again: those that pass are
printed as unsteady, with why they failed before.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.fast import uses_parts

_USES_PARTS = "uses real parts"


def add_options(parser: pytest.Parser) -> None:
    """The options of both runs."""
    parser.addoption("--failed-parts", type=Path, help="file for the failed tests of real parts")
    parser.addoption("--alone", type=Path, help="file of the failed tests, which run again now")


def reasons(file: Path) -> Path:
    """The file beside that of the names."""
    return file.with_suffix(".reasons")


def mark(items: Iterable[pytest.Item]) -> None:
    """Note of each test whether it uses real parts: the process that reports it has no item."""
    for item in items:
        if uses_parts(item):
            item.user_properties.append((_USES_PARTS, True))


class FailedParts:
    """Writes the failed tests of real parts to a file, for another run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._again: dict[str, str] = {}
        self._others = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a failure."""
        if report.failed and (_USES_PARTS, True) in map(tuple, report.user_properties):
            self._again.setdefault(report.nodeid, reason(report))
        elif report.failed:
            self._others = True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a module that cannot be imported."""
        self._others |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterable[None]:
        """Succeed if all that failed is run again."""
        if self._again:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with self._file.open("a", encoding="utf-8") as file:
                file.writelines(f"{name}\n" for name in self._again)
            with reasons(self._file).open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(each)}\n" for each in self._again.items())
        if self._again and not self._others and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK
        return (yield)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what is run again."""
        for name in self._again:
            terminalreporter.write_line(f"run again at the end, alone: {name}")


# A whole comparison of two rows is longer than what anybody reads.
_LONGEST = 600


def reason(report: pytest.TestReport) -> str:
    """The message of a failed test's exception, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    return " ".join(str(crash.message if crash else report.longrepr).split())[:_LONGEST]


class Alone:
    """Names the tests that pass now."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._failed: set[str] = set()
        self._names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a result."""
        self._names[report.nodeid] = None
        if report.failed:
            self._failed.add(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the unsteady tests."""
        lines = reasons(self._file).read_text(encoding="utf-8").splitlines()
        before = dict(map(json.loads, lines))
        for name in self._names:
            if name not in self._failed:
                terminalreporter.write_line(f"unsteady: {name}: {before[name]}")


def register(config: pytest.Config) -> None:
    """Take part in a run by its options; of several processes, in the one that reports."""
    file: Path | None = config.getoption("--failed-parts")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailedParts(file))
    if (again := config.getoption("--alone")) is not None:
        config.pluginmanager.register(Alone(again))
