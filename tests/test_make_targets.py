"""Everything that checks a change calls the same make targets."""

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHECKS = ["lint", "test-fast", "test"]


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_workflow_runs_every_check() -> None:
    job = read(".github/workflows/test.yml")["jobs"]["check"]
    assert job["strategy"]["matrix"]["target"] == CHECKS
    assert job["steps"][-1] == {"run": "make ${{ matrix.target }}"}


def test_the_hooks_before_a_commit_and_a_push_run_the_quick_checks() -> None:
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == ["make lint", "make test-fast"]


def test_the_whole_run_is_make_test() -> None:
    run = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert re.findall(r"^make .*$", run, re.MULTILINE) == ["make test PYTHON=/usr/bin/python3"]


def test_each_check_is_a_target() -> None:
    for target in CHECKS:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


STAGES = ROOT / ".ci/stages"


def stages(*commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STAGES, *commands], capture_output=True, text=True, check=False)


def test_stages_that_succeed_are_a_success() -> None:
    run = stages("a", "echo one", "b", "echo two >&2")
    assert run.returncode == 0
    assert {"a: one", "b: two"} <= set(run.stdout.splitlines())


def test_one_stage_that_fails_fails_the_run_and_ends_no_other() -> None:
    run = stages("a", "exit 3", "b", "echo two")
    assert run.returncode == 1
    assert "a: exit code 3 after " in run.stdout
    assert "b: two" in run.stdout.splitlines()


def test_the_output_ends_with_the_last_lines_of_what_failed() -> None:
    run = stages("a", "echo the reason; exit 3", "b", "sleep 0.2; seq 500")
    assert run.stdout.splitlines()[-2:] == ["a failed; its last lines:", "a: the reason"]


def test_contributing_names_every_check_and_every_stage_is_in_make_test() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"`make {target}`" in page for target in CHECKS)
    whole = subprocess.run(
        ["make", "--dry-run", "test"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "bash .ci/install-parts" in whole.stdout
    for stage in ("make --no-print-directory lint", "tests/real_engine", "tests/end_to_end"):
        assert stage in whole.stdout
