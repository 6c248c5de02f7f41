"""Agents and processes that start at once migrate one database, each migration once."""

import logging
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory

from agent.store import migrating
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision, upgrade
from tests.store.migrated import differences, of_the_next_version

CHECKOUT = Path(__file__).resolve().parents[2]

SCRIPTS = ScriptDirectory(str(CHECKOUT / "migrations"))
REVISIONS = [script.revision for script in SCRIPTS.walk_revisions()][::-1]

AGENTS = 10
NEWER = "of the next version"


def test_agents_of_two_versions_that_start_at_once_run_each_migration_once(
    new_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each agent has connections of its own, as a process has."""
    caplog.set_level(logging.INFO, "alembic.runtime.migration")
    own, following = migrating._scripts(), of_the_next_version(tmp_path)
    monkeypatch.setattr(
        migrating,
        "_scripts",
        lambda: following if threading.current_thread().name.startswith(NEWER) else own,
    )
    barrier = threading.Barrier(AGENTS)

    def start() -> str | None:
        engine = open_engine(new_url)
        try:
            barrier.wait()
            return upgrade(engine)[1]
        finally:
            engine.dispose()

    with (
        ThreadPoolExecutor(AGENTS // 2, thread_name_prefix=NEWER) as newer,
        ThreadPoolExecutor(AGENTS // 2) as older,
    ):
        starts = [newer.submit(start) for _ in range(AGENTS // 2)]
        starts_before = [older.submit(start) for _ in range(AGENTS // 2)]
    assert {each.result() for each in starts} == {"more"}
    for each in starts_before:
        refused = each.exception()
        assert "does not know" in str(refused) if refused else each.result() == REVISIONS[-1]
    ran = [message for message in caplog.messages if message.startswith("Running upgrade")]
    assert len(ran) == len(set(ran)) == len(REVISIONS) + 1


@pytest.mark.slow
def test_processes_that_start_at_once_both_reach_the_newest_revision(
    postgres_url: str, tmp_path: Path
) -> None:
    file = tmp_path / "goodput.db"
    where = {"GOODPUT_STORAGE__FILE": str(file), "GOODPUT_STORAGE__PUBLISH_TO": postgres_url}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "agent", "db", "upgrade"],
            env=os.environ | where,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    of_each = zip(*outputs, strict=True)
    names = ("the agent's file", "the shared database")
    urls = (f"sqlite:///{file}", postgres_url)
    for name, url, lines in zip(names, urls, of_each, strict=True):
        begin = f"{name} is at revision {newest_revision()} (was "
        befores = [line.removeprefix(begin).removesuffix(")") for line in lines]
        assert befores.count("None") == 1
        assert {*befores} <= {"None", *REVISIONS}
        engine = open_engine(url)
        assert differences(engine) == []
        engine.dispose()
