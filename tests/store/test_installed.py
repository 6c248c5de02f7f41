"""The package that users install, away from any checkout."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from agent.store.connection import open_engine
from agent.store.tables import metadata
from tests.store.migrated import ONE_MORE, table_names

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that users download."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check", "wheel", "--no-deps"]
    subprocess.run([sys.executable, *pip, "--wheel-dir", folder, CHECKOUT], cwd=folder, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def listed(folder: str) -> dict[str, Path]:
    """The repository's files in a folder, by their names."""
    command = ["git", "ls-files", "-z", folder]
    names = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    return {name: path for name in names.split("\0") if (path := CHECKOUT / name).is_file()}


def test_the_wheel_holds_every_file_that_the_agent_reads(wheel: Path) -> None:
    expected = listed("agent")
    for folder, place in (("migrations", "agent/migrations"), ("docs", "agent/docs")):
        there = {name.replace(folder, place, 1): path for name, path in listed(folder).items()}
        assert there
        expected |= there
    with ZipFile(wheel) as archive:
        assert expected.keys() <= {*archive.namelist()}
        for name, path in expected.items():
            assert archive.read(name) == path.read_bytes(), name


def test_an_installed_agent_runs_the_migrations_of_its_package(
    wheel: Path, postgres_url: str, tmp_path: Path
) -> None:
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "site/agent/migrations/versions/more.py").write_text(ONE_MORE)
    file = tmp_path / "goodput.db"
    where = {"GOODPUT_STORAGE__FILE": str(file), "GOODPUT_STORAGE__PUBLISH_TO": postgres_url}
    output = subprocess.check_output(
        [sys.executable, "-m", "agent", "db", "upgrade"],
        cwd=tmp_path,
        env=os.environ | where | {"PYTHONPATH": str(tmp_path / "site")},
        text=True,
    )
    assert output.splitlines() == [
        f"{name} is at revision more (was None)"
        for name in ("the agent's file", "the shared database")
    ]
    for url in (f"sqlite:///{file}", postgres_url):
        engine = open_engine(url)
        assert table_names(engine) == {*metadata.tables, "alembic_version", "more"}
        engine.dispose()
