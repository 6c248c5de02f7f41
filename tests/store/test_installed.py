"""The package that users install, away from any checkout: its files, and what it makes of them."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from sqlalchemy import create_engine

from agent.store.tables import metadata
from tests.store.migrated import ONE_MORE, table_names

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).resolve().parents[2]


def run(*arguments: str | Path, folder: Path, **environment: str) -> str:
    """Output of Python with these arguments in this folder."""
    ended = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return ended.stdout


def pip(*arguments: str | Path, folder: Path) -> None:
    """Run pip in this folder."""
    run("-m", "pip", "--quiet", "--disable-pip-version-check", *arguments, folder=folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that users download."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", folder, CHECKOUT, folder=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder with the installed package, without its dependencies."""
    target = wheel.parent / "site"
    pip("install", "--no-deps", "--target", target, wheel, folder=wheel.parent)
    return target


def test_the_wheel_holds_every_file_of_the_agent(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "agent"], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    files = {name for name in listed.stdout.split("\0") if name and (CHECKOUT / name).is_file()}
    assert any("/vendor/" in name for name in files)
    with ZipFile(wheel) as archive:
        assert files <= set(archive.namelist())


def test_the_installed_package_makes_the_committed_files(installed: Path, tmp_path: Path) -> None:
    run("-m", "agent", "render", "--into", tmp_path, folder=tmp_path, PYTHONPATH=str(installed))
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.parts[0] for path in made} == {"alerts", "dashboards", "deploy", "docs"}
    for path in made:
        assert (tmp_path / path).read_bytes() == (CHECKOUT / path).read_bytes(), path


def test_the_wheel_holds_the_migrations_of_the_checkout(wheel: Path) -> None:
    scripts = [*(CHECKOUT / "migrations").rglob("*.py")]
    with ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("agent/migrations/")}
        assert held == {f"agent/{path.relative_to(CHECKOUT)}" for path in scripts}
        for path in scripts:
            assert archive.read(f"agent/{path.relative_to(CHECKOUT)}") == path.read_bytes()


def test_the_wheel_holds_the_runbooks_of_the_checkout(wheel: Path, installed: Path) -> None:
    pages = {path.name: path.read_bytes() for path in (CHECKOUT / "docs/runbooks").iterdir()}
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("agent/runbooks/")]
        assert {name.split("/")[-1]: archive.read(name) for name in names} == pages
    output = run(
        *("-c", "from agent.outputs.web import runbooks; print(*runbooks())"),
        folder=installed,
        PYTHONPATH=str(installed),
    )
    assert output.split() == sorted(pages)


def test_an_installed_package_runs_its_own_migrations(
    installed: Path, postgres_url: str, tmp_path: Path
) -> None:
    (installed / "agent/migrations/versions/more.py").write_text(ONE_MORE)
    file = tmp_path / "goodput.db"
    output = run(
        *("-m", "agent", "db", "upgrade"),
        folder=tmp_path,
        PYTHONPATH=str(installed),
        GOODPUT_STORAGE__FILE=str(file),
        GOODPUT_STORAGE__PUBLISH_TO=postgres_url,
    )
    assert output == (
        "the agent's file is at revision more (was None)\n"
        "the shared database is at revision more (was None)\n"
    )
    for url in (f"sqlite:///{file}", postgres_url):
        engine = create_engine(url)
        tables = table_names(engine)
        engine.dispose()
        assert tables == {*metadata.tables, "alembic_version", "more"}
