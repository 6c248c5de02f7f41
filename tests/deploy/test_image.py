"""The image: its Dockerfile, both stages replayed, and the agent run there unprivileged."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.errors import SettingsInvalid
from agent.settings import load
from tests.deploy.kit import PINNED, ROOT, Instruction, Replay, copied, instruction_of, stages
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess, answers

BASE, BUILD, FINAL = stages()
IMAGE_SETTINGS = ROOT / "deploy" / "image" / "settings.yml"

# May read files that its user may not, because this machine's Python can be in a home folder;
# writes only where this user may.
_USER, _GROUP = instruction_of(FINAL, "USER").value.split(":")
_AS_USER = (
    "setpriv",
    f"--reuid={_USER}",
    f"--regid={_GROUP}",
    "--clear-groups",
    "--inh-caps=-all,+dac_read_search",
    "--ambient-caps=-all,+dac_read_search",
    "--bounding-set=-all,+dac_read_search",
    "--no-new-privs",
)
# Without root there are no privileges to drop.
UNPRIVILEGED = _AS_USER if os.geteuid() == 0 else ("setpriv", "--no-new-privs")


# The file


def test_the_base_is_pinned_and_the_image_does_not_run_as_root() -> None:
    (base,) = BASE
    assert PINNED.fullmatch(base.value.partition("=")[2])
    assert min(int(_USER), int(_GROUP)) >= 10000


def locked(name: str) -> dict[str, set[str]]:
    """The hashes of each pinned package of a lock file."""
    blocks = re.split(r"^(?=\w)", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {block.split()[0]: set(re.findall(r"--hash=(\S+)", block)) for block in blocks[1:]}


def test_the_images_packages_are_those_that_are_tested() -> None:
    image, tested = locked("requirements-image.lock"), locked("requirements.lock")
    assert 50 < len(image) < len(tested)
    assert image.items() <= tested.items()
    assert all(image.values())


def test_copied_files_exist_and_are_in_the_build_context() -> None:
    let_in = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    assert len(list(copied())) >= 6
    for source in copied():
        assert (ROOT / source).exists()
        assert any(Path(source).is_relative_to(prefix) for prefix in let_in), source


def test_the_images_settings_listen_on_its_exposed_ports() -> None:
    with pytest.raises(SettingsInvalid, match="--insecure"):
        load(IMAGE_SETTINGS, {})
    settings = load(IMAGE_SETTINGS, {"GOODPUT_SECURITY__INSECURE": "true"})
    otlp = [settings.otlp.grpc, settings.otlp.http]
    open_to_all = [f"{settings.listen.host}:{settings.listen.port}", *otlp]
    assert [f"0.0.0.0:{port}" for port in instruction_of(FINAL, "EXPOSE").words()] == open_to_all
    copy = f"{IMAGE_SETTINGS.relative_to(ROOT)} {instruction_of(FINAL, 'CMD').words()[-1]}"
    assert Instruction("COPY", copy) in FINAL


# The replay


@dataclass(frozen=True, slots=True)
class Image:
    """The final stage's root, read-only except its volume, and its environment."""

    root: Path
    environment: Mapping[str, str]

    def placed(self, word: str) -> str:
        """A word of a command; a path of the image becomes one of this machine."""
        return f"{self.root}{word}" if word.startswith("/") else word

    @property
    def data(self) -> Path:
        """The path of the volume."""
        return Path(self.placed(instruction_of(FINAL, "VOLUME").value))

    def command(self, words: Sequence[str], **more: str) -> list[str]:
        """These words run as the image's user, with the image's environment alone."""
        variables = [f"{name}={value}" for name, value in {**self.environment, **more}.items()]
        return [
            "env",
            "-i",
            f"--chdir={self.data}",
            *variables,
            *UNPRIVILEGED,
            *map(self.placed, words),
        ]


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    # Not under pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory(prefix="image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        replay = Replay(folder)
        replay.run(BUILD)
        replay.run(FINAL)
        found = Image(replay.root, replay.environment)
        # Of the build only the copied files may be left.
        shutil.rmtree(folder / "build")
        for path in (found.root, *found.root.rglob("*")):
            if not path.is_symlink() and path != found.data:
                path.chmod(path.stat().st_mode & ~0o222)
        yield found


def start(image: Image, log: Path, command: Sequence[str], port: int) -> ServerProcess:
    process = ServerProcess(
        image.command(
            [*instruction_of(FINAL, "ENTRYPOINT").words(), *command],
            GOODPUT_LISTEN__HOST="127.0.0.1",
            GOODPUT_LISTEN__PORT=str(port),
            GOODPUT_OTLP__GRPC=f"127.0.0.1:{free_port()}",
            GOODPUT_OTLP__HTTP=f"127.0.0.1:{free_port()}",
            GOODPUT_ENGINES__0__NAME="chat-0",
            GOODPUT_ENGINES__0__URL=f"http://127.0.0.1:{free_port()}",
        ),
        log,
    )
    url = f"http://127.0.0.1:{port}"
    process.wait_until(lambda: answers(f"{url}/healthz"), within_s=60)
    return process


def health_check(image: Image, port: int) -> int:
    """The exit status of the image's own health check."""
    words = instruction_of(FINAL, "HEALTHCHECK").value.partition("CMD ")[2]
    command = Instruction("CMD", words).words()
    finished = subprocess.run(
        image.command(command, GOODPUT_LISTEN__PORT=str(port)), capture_output=True, check=False
    )
    return finished.returncode


def tree(image: Image) -> dict[Path, int]:
    """The modification time of each file outside the volume."""
    return {
        path: path.lstat().st_mtime_ns
        for path in image.root.rglob("*")
        if not path.is_relative_to(image.data)
    }


@pytest.mark.timeout(600)
def test_the_image_contains_the_agent_its_settings_and_nothing_else(image: Image) -> None:
    names = {str(path.relative_to(image.root)) for path in image.root.glob("*/*")}
    assert names == {"opt/goodput-agent", "etc/goodput-agent"}
    assert {path.name for path in image.root.iterdir()} == {"opt", "etc", "data"}
    (settings,) = (image.root / "etc" / "goodput-agent").iterdir()
    assert settings.read_text(encoding="utf-8") == IMAGE_SETTINGS.read_text(encoding="utf-8")
    packages = {path.name for path in image.root.glob("opt/goodput-agent/lib/*/site-packages/*")}
    assert {"agent", "fastapi", "psycopg"} <= packages
    assert not {"pytest", "mypy", "ruff", "pip", "kubernetes_validate", "tests"} & packages


@pytest.mark.timeout(600)
def test_the_user_can_write_in_the_volume_alone(image: Image) -> None:
    search = ["find", str(image.root), "!", "-type", "l", "-writable", "-print"]
    found = subprocess.run([*UNPRIVILEGED, *search], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(image.data)]


@pytest.mark.timeout(600)
def test_the_agent_starts_in_the_image_and_is_healthy(image: Image, tmp_path: Path) -> None:
    port = free_port()
    before = tree(image)
    assert health_check(image, port) != 0
    with start(image, tmp_path / "agent.log", instruction_of(FINAL, "CMD").words(), port):
        assert health_check(image, port) == 0
    assert (image.data / "goodput.db").is_file()
    assert tree(image) == before
