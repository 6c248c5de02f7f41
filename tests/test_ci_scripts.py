"""What the scripts of `.ci` do, and that the sdist is whole."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import agent

ROOT = Path(__file__).parents[1]

STAGES = ROOT / ".ci/stages"


def stages(*commands: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([STAGES, *commands], capture_output=True, text=True, check=False)


def test_one_stage_that_fails_fails_the_run_and_ends_no_other() -> None:
    passed = stages("a", "echo one", "b", "echo two >&2")
    assert passed.returncode == 0
    assert {"a: one", "b: two"} <= set(passed.stdout.splitlines())
    failed = stages("a", "echo the reason; exit 3", "b", "sleep 0.2; seq 500")
    assert failed.returncode == 1
    lines = failed.stdout.splitlines()
    assert "a: exit code 3 after " in failed.stdout
    assert "b: 500" in lines
    assert lines[-2:] == ["a failed; its last lines:", "a: the reason"]


# A release


VERSIONED = (
    "agent/__init__.py",
    "deploy/helm/goodput-agent/Chart.yaml",
    "plugins/vllm/goodput_agent_vllm/__init__.py",
)


class Releasing:
    """A repository with what a release reads first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run("git", "init", "-q")
        for path in (".ci/release", *VERSIONED):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, folder / path)
        self.write("CHANGELOG.md", "## [Unreleased]\n")
        self.commit()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text, encoding="utf-8")

    def commit(self) -> None:
        self._run("git", "add", ".")
        self._run("git", *["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "all"])

    def tag(self, name: str) -> None:
        self._run("git", "tag", "--force", name)

    def refusal(self) -> str:
        """Why nothing is released."""
        ended = self._run(".ci/release", str(self.folder), check=False)
        assert ended.returncode == 1
        return ended.stderr

    def _run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=check)


@pytest.fixture
def releasing(tmp_path: Path) -> Releasing:
    return Releasing(tmp_path)


def test_a_release_needs_a_tag_of_its_version(releasing: Releasing) -> None:
    assert "HEAD has no tag" in releasing.refusal()
    releasing.tag("v9.9.9")
    theirs = f"the tag is v9.9.9, and agent/__init__.py has {agent.__version__}"
    assert theirs in releasing.refusal()


@pytest.mark.parametrize("file", VERSIONED[1:])
def test_a_release_has_one_version(releasing: Releasing, file: str) -> None:
    text = (releasing.folder / file).read_text(encoding="utf-8")
    releasing.write(file, text.replace(agent.__version__, "9.9.9"))
    releasing.commit()
    releasing.tag(f"v{agent.__version__}")
    assert f"{file} has another version than {agent.__version__}" in releasing.refusal()


def test_a_release_needs_its_section_of_the_changelog(releasing: Releasing) -> None:
    releasing.tag(f"v{agent.__version__}")
    assert f"no section '## [{agent.__version__}] - DATE'" in releasing.refusal()


def test_the_checksums_of_a_release_are_those_of_its_files(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    (script,) = (step["run"] for step in workflow["jobs"]["publish"]["steps"] if "run" in step)
    files, programs = tmp_path / "files", tmp_path / "programs"
    files.mkdir()
    programs.mkdir()
    for name in ("goodput-agent-0.1.0-image.tar", "goodput-agent-0.1.0.tgz"):
        (files / name).write_text(name, encoding="utf-8")
    subprocess.run("sha256sum -- * > SHA256SUMS", shell=True, cwd=files, check=True)
    (programs / "gh").write_text('#!/bin/sh\necho "$@"\n', encoding="utf-8")
    (programs / "gh").chmod(0o755)
    released = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=files,
        env={"PATH": f"{programs}:{os.environ['PATH']}", "GITHUB_REF_NAME": "v0.1.0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert released.endswith("NOTES.md ./SHA256SUMS ./goodput-agent-0.1.0.tgz\n")
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=files, check=True)


def test_each_project_is_published_with_its_wheel_and_its_sdist(tmp_path: Path) -> None:
    """PyPI takes one pending publisher of a repository, workflow and environment."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["pypi"]
    (script,) = (step["run"] for step in job["steps"] if "run" in step)
    projects = job["strategy"]["matrix"]["include"]
    environments = {each["environment"] for each in projects}
    assert len(environments) == len(projects) == 2
    assert job["environment"] == "${{ matrix.environment }}"
    names = [each["project"] for each in projects]
    for project in names:
        folder = tmp_path / project
        (folder / "release").mkdir(parents=True)
        for name in names:
            for ending in ("-0.1.0-py3-none-any.whl", "-0.1.0.tar.gz"):
                (folder / f"release/{name}{ending}").touch()
        (folder / "release/goodput-agent-0.1.0.tgz").touch()
        filled = script.replace("${{ matrix.project }}", project)
        subprocess.run(["bash", "-e", "-c", filled], cwd=folder, check=True)
        published = {path.name for path in (folder / "dist").iterdir()}
        assert published == {f"{project}-0.1.0-py3-none-any.whl", f"{project}-0.1.0.tar.gz"}


def test_what_is_released_names_its_repository(tmp_path: Path) -> None:
    url, tag = "https://github.com/Some-Org/goodput-agent", "v1.2.3"
    files = (
        *(
            "README.md",
            "CHANGELOG.md",
            "pyproject.toml",
            "plugins/vllm/README.md",
            "plugins/vllm/pyproject.toml",
        ),
        *(
            f"deploy/helm/goodput-agent/{name}"
            for name in ("README.md", "Chart.yaml", "values.yaml")
        ),
    )
    for path in files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    program = str(ROOT / ".ci/name_repository.py")
    subprocess.run([sys.executable, program, str(tmp_path), url, tag], check=True)
    texts = {path: (tmp_path / path).read_text(encoding="utf-8") for path in files}
    for name in ("README.md", "CHANGELOG.md", "plugins/vllm/README.md"):
        targets = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", texts[name])
        assert [each for _, each in targets if not each.startswith("https://")] == []
        ours = [(picture, each.partition("#")[0]) for picture, each in targets if url in each]
        assert ours
        for picture, each in ours:
            kind, version, path = each.removeprefix(f"{url}/").split("/", 2)
            assert (kind, version) == ("raw" if picture else "blob", tag)
            assert (ROOT / path).exists(), path
    for name in ("pyproject.toml", "plugins/vllm/pyproject.toml"):
        assert tomllib.loads(texts[name])["project"]["urls"]["Source"] == url
    chart = yaml.safe_load(texts[files[-2]])
    assert (chart["home"], chart["sources"]) == (url, [url])
    values = yaml.safe_load(texts[files[-1]])
    assert values["image"]["repository"] == "ghcr.io/some-org/goodput-agent"
    assert f'`"{values["image"]["repository"]}"`' in texts[files[-3]]
    assert "no image is published" not in texts[files[-1]] + texts[files[-3]]


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("vendor.github-workflows", "workflows/*.yml"),
        ("custom.github-workflows-require-timeout", "workflows/*.yml"),
        ("vendor.github-issue-forms", "ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.github-issue-config", "ISSUE_TEMPLATE/config.yml"),
    ],
)
def test_github_accepts_its_files(schema: str, pattern: str) -> None:
    files = sorted((ROOT / ".github").glob(pattern))
    assert files
    program = Path(sys.executable).with_name("check-jsonschema")
    command = [str(program), "--builtin-schema", schema, *map(str, files)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


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


# Installing parts

SCRIPT = ROOT / ".ci/install-parts"
# Programs that the scripts call.
SHELL = ("bash", "dirname", "basename", "id", "env", "cat", "rm", "mkdir", "touch", "mv")
PARTS = (
    *("initdb", "prometheus", "promtool", "alertmanager", "amtool", "chromium-headless-shell"),
    *("gcc", "curl", "setpriv", "git", "systemd-analyze"),
)


class Machine:
    """A machine with only the programs that a test adds on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.cache = folder / "cache"
        for name in SHELL:
            found = shutil.which(name)
            assert found is not None, name
            (self.programs / name).symlink_to(found)
        # A python3 on the PATH may be a script that finds its own files by the environment.
        self.add("python3", f'exec "{sys.executable}" "$@"')

    def add(self, name: str, script: str = "") -> None:
        """Put a program there; without a script it does nothing and succeeds."""
        program = self.programs / name
        program.unlink(missing_ok=True)
        program.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        program.chmod(0o755)

    def add_all_but(self, missing: str) -> None:
        """Add all parts, also folders that look like those with installers of their own."""
        for part in PARTS:
            if part != missing:
                self.add(part)
        for home in (
            self._where("install-engine").parents[1],
            self._where("install-load-generators"),
            self._where("install-sglang"),
            self._where("install-helm"),
            self._where("install-victoriametrics").parents[2],
        ):
            home.mkdir(parents=True)
            (home / "complete").touch()

    def _where(self, installer: str) -> Path:
        where = subprocess.run(
            [SCRIPT.with_name(installer), "--where"],
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return Path(where.stdout.strip())

    @property
    def _environment(self) -> dict[str, str]:
        return {"PATH": str(self.programs), "TEST_PARTS_CACHE": str(self.cache), "HOME": "/"}

    def install(self) -> subprocess.CompletedProcess[str]:
        """Run the script."""
        return subprocess.run(
            [SCRIPT], env=self._environment, capture_output=True, text=True, check=False
        )

    def missing(self) -> set[str]:
        """The missing parts that the script prints with their commands when it fails."""
        installed = self.install()
        assert installed.returncode == 1
        lines = installed.stderr.splitlines()
        assert lines[-1] == "make test-fast needs none of them."
        return {line.strip() for line in lines if line.startswith("  ")}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without any part."""
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("manager", "commands"),
    [
        (
            None,
            {
                "Chromium: sudo apt-get install chromium-headless-shell",
                "git: sudo apt-get install git",
            },
        ),
        (
            "dnf",
            {
                "Chromium: sudo dnf install chromium-headless",
                "amtool: sudo dnf install alertmanager",
            },
        ),
        ("brew", {"Chromium: brew install chromium", "Alertmanager: brew install alertmanager"}),
    ],
)
def test_elsewhere_each_missing_part_is_printed_with_its_command(
    machine: Machine, manager: str | None, commands: set[str]
) -> None:
    if manager is not None:
        machine.add(manager)
    lines = machine.missing()
    assert commands <= lines
    assert any(line.startswith("vLLM for CPU, expected at ") for line in lines)
    for installer in ("engine", "load-generators", "sglang", "helm", "victoriametrics"):
        assert any(line.endswith(f": bash .ci/install-{installer}") for line in lines)


def test_only_missing_parts_are_printed(machine: Machine) -> None:
    machine.add_all_but("chromium-headless-shell")
    assert machine.missing() == {"Chromium: sudo apt-get install chromium-headless-shell"}


@pytest.mark.parametrize("user", ["root", "with sudo"])
def test_on_debian_missing_parts_are_installed_and_printed(machine: Machine, user: str) -> None:
    machine.add_all_but("chromium-headless-shell")
    machine.add("id", f"echo {0 if user == 'root' else 1000}")
    if user == "with sudo":
        machine.add("sudo", '[ "$1" = -n ] || exec "$@"')
    machine.add("dpkg-query", '[ "${!#}" = chromium-headless-shell ] || echo -n installed')
    arrives = machine.programs / "chromium-headless-shell"
    machine.add("apt-get", f'[ "$1" = update ] || {{ echo > {arrives}; chmod +x {arrives}; }}')
    machine.add("chmod", f'exec {shutil.which("chmod")} "$@"')
    installed = machine.install()
    assert installed.returncode == 0, installed.stderr
    assert installed.stderr == "installing chromium-headless-shell with apt-get\n"


def test_on_debian_without_root_or_sudo_the_command_is_printed(machine: Machine) -> None:
    machine.add("apt-get", "exit 1")
    machine.add("sudo", "exit 1")
    machine.add("id", "echo 1000")
    assert "Prometheus: sudo apt-get install prometheus" in machine.missing()
