"""Everything that checks a change calls the same make targets."""

import re
import shutil
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

import agent

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
    assert re.findall(r"^make \w+", run, re.MULTILINE) == ["make test"]


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


def test_a_tag_is_released_by_the_target() -> None:
    workflow = read(".github/workflows/release.yml")
    assert workflow[True]["push"] == {"tags": ["v*"]}
    steps = workflow["jobs"]["release"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == ["make release"]
    recipe = subprocess.run(
        ["make", "--dry-run", "release"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert ".ci/release" in recipe.stdout


def test_a_release_needs_a_tag(tmp_path: Path) -> None:
    """In a repository of its own, whose HEAD has none, and then one of another version."""
    for path in (".ci/release", "agent/__init__.py"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        assert run(*git, *step).returncode == 0
    assert "HEAD has no tag" in run(".ci/release", str(tmp_path)).stderr
    assert run(*git, "tag", "v9.9.9").returncode == 0
    ended = run(".ci/release", str(tmp_path))
    assert ended.returncode == 1
    assert f"the tag is v9.9.9, and agent/__init__.py has {agent.__version__}" in ended.stderr


def test_the_sdist_has_every_folder_and_what_the_image_is_built_of() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    held = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    first = {name.split("/")[0] for name in listed}
    # pyproject.toml is always in it; the others serve a checkout alone.
    left_out = {"pyproject.toml", ".github", ".gitignore", ".pre-commit-config.yaml"}
    assert {name for name in first if not any(fnmatch(name, each) for each in held)} <= left_out
