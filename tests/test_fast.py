"""`make test-fast` leaves out what needs real parts or seconds, and nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast import PARTS, ROOT, runs_parts

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("module", "left_out"),
    [
        ("real_engine/test_proxy.py", True),
        ("end_to_end/test_faults.py", True),
        ("render/alerts/test_cases.py", True),
        ("outputs/test_page.py", True),
        ("test_app.py", True),
        ("analysis/test_verdicts.py", False),
        ("store/test_rows.py", False),
        ("sources/proxy/test_relay.py", False),
        # They fail where a new metric, alert or event kind is incomplete.
        ("outputs/prometheus/test_agent_exposition.py", False),
        ("render/alerts/test_alert_files.py", False),
        ("render/dashboards/test_dashboard_files.py", False),
    ],
)
def test_modules_that_run_parts_are_left_out(module: str, left_out: bool) -> None:
    assert runs_parts(HERE / module) is left_out


def test_the_modules_of_parts_exist() -> None:
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in PARTS)


EXAMPLES = """
import importlib
import pytest

# An import that the selection does not find.
processes = importlib.import_module("tests.real_parts.processes")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request):
    return request.param


def test_database(database): ...


def test_server(postgres_url): ...


@pytest.mark.slow
def test_slow(): ...


def test_start(tmp_path):
    with pytest.raises(AssertionError, match="a fast test starts sleep"):
        processes.ServerProcess(["sleep", "1"], tmp_path / "log")
"""


@pytest.mark.slow
def test_of_a_module_without_parts_those_that_use_postgresql_or_are_slow_are_left_out(
    tmp_path: Path,
) -> None:
    module = tmp_path / "test_examples.py"
    module.write_text(EXAMPLES)
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "--fast", "-v", "-p", "tests.conftest", module],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "test_database[sqlite] PASSED" in finished.stdout
    assert "test_start PASSED" in finished.stdout
    assert "2 passed, 3 deselected" in finished.stdout, finished.stdout
