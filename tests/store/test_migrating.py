import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Column, Engine, Integer, MetaData, Table, inspect, text
from sqlalchemy.schema import CreateTable

from agent.errors import StoreUnavailable
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision, upgrade
from agent.store.store_queries import StoreQueries
from agent.store.tables import metadata
from tests.store.making import (
    counted_rollups,
    counted_rows,
    some,
    store,
    stored_keys,
)

CHECKOUT = Path(__file__).resolve().parents[2]

SCRIPTS = ScriptDirectory(str(CHECKOUT / "migrations"))
REVISIONS = [script.revision for script in SCRIPTS.walk_revisions()][::-1]

# A row of each table as the revision that made it took it; columns are never given new names.
FIRST_ROWS: Mapping[str, Sequence[str]] = {
    "0001": (
        """
        INSERT INTO requests (trace_id, span_id, vantage, status, started_at, ended_at, received_at,
            verdict, verdicts, request_id, ttft_s)
        VALUES ('01', '02', 'engine', 'ok', '2026-11-21 12:00:00.123456+00:00',
            '2026-11-21 12:00:01+00:00', '2026-11-21 12:00:02+00:00', 'met', '{"chat": "met"}',
            'request-1', 0.25)
        """,
        """
        INSERT INTO engine_samples (at, agent, engine, dialect, facts)
        VALUES ('2026-11-21 12:00:00+00:00', 'agent-0', 'chat-0', 'vllm', '{"running": null}')
        """,
        """
        INSERT INTO events (at, agent, engine, kind, confidence, evidence)
        VALUES ('2026-11-21 12:00:00+00:00', 'agent-0', 'chat-0', 'RESTART', 'certain', '{}')
        """,
        """
        INSERT INTO objectives (agent, name, definition, in_force_from)
        VALUES ('agent-0', 'chat', '{}', '2026-11-21 12:00:00+00:00')
        """,
    ),
    "0002": (
        """
        INSERT INTO gpu_samples (at, agent, gpu, gpu_index, name, facts, mig_instances)
        VALUES ('2026-11-21 12:00:00+00:00', 'agent-0', 'GPU-1', 0, 'NVIDIA H200', '{}', '[]')
        """,
    ),
    "0005": (
        """
        INSERT INTO engine_windows (agent, engine, starts_at, from_at, until, requests, busy_s,
            idle_s, unknown_s, computed_tokens, cached_tokens, output_tokens, good_tokens,
            cache_full, method, disagreements)
        VALUES ('agent-0', 'chat-0', 1795262400, '2026-11-21 12:00:00+00:00',
            '2026-11-21 12:01:00+00:00', 1, 10, 50, 0, 100, 0, 26, 26, false, 'tokens', '[]')
        """,
    ),
}

# The same of the table that is made anew on the way, by the revision that gave it its shape.
ROLLUPS: Mapping[str, Sequence[str]] = {
    "0001": (
        """
        INSERT INTO rollups (width_s, starts_at, agent, engine, model, tenant, objectives, tally)
        VALUES (60, 1795262400, 'agent-0', 'chat-0', '', '', 'chat', '{"requests": 1,
            "statuses": {"ok": 1}, "seen_at_proxy": 0, "input_tokens": [0, 0],
            "output_tokens": [7, 1], "verdicts": [["", "met", 1, 7], ["chat", "met", 1, 7]],
            "bins": {"ttft_s": [-128, [1]]}}')
        """,
    ),
    "0004": (
        """
        INSERT INTO rollup_series (agent, engine, model, tenant, input_length, objectives)
        VALUES ('agent-0', 'chat-0', '', '', '', 'chat')
        """,
        """
        INSERT INTO rollups (width_s, series, starts_at, counts) VALUES (60, 1, 1795262400, BYTES)
        """,
        """
        INSERT INTO rollup_changes (starts_at, agent, engine, model, tenant, input_length,
            objectives, gone, counts)
        VALUES (1795262400, 'agent-0', 'chat-0', '', '', '', 'chat', false, BYTES)
        """,
    ),
    "0009": (
        """
        INSERT INTO rollup_series (agent, engine, model, tenant, input_length, judged_by)
        VALUES ('agent-0', 'chat-0', '', '', '', '["chat"]')
        """,
        """
        INSERT INTO rollups (width_s, series, starts_at, counts) VALUES (60, 1, 1795262400, BYTES)
        """,
        """
        INSERT INTO rollup_changes (starts_at, agent, engine, model, tenant, input_length,
            judged_by, gone, counts)
        VALUES (1795262400, 'agent-0', 'chat-0', '', '', '', '["chat"]', false, BYTES)
        """,
    ),
}
BYTES = {"sqlite": "x'30'", "postgresql": "'0'"}
ROLLUP_TABLES = {"rollups", "rollup_series", "rollup_changes"}

Rows = dict[str, list[dict[str, Any]]]


@pytest.fixture
def empty(new_url: str) -> Iterator[Engine]:
    """A database that nothing was done to."""
    engine = open_engine(new_url)
    yield engine
    engine.dispose()


def differences(engine: Engine) -> list[Any]:
    """How the database differs from the tables that this version of the program sees."""
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        return list(compare_metadata(context, metadata))


def test_the_revisions_are_one_line() -> None:
    assert SCRIPTS.get_heads() == [REVISIONS[-1]] == [newest_revision()]
    assert SCRIPTS.get_bases() == [REVISIONS[0]]


def test_an_empty_database_is_brought_to_the_shape_that_the_program_sees(empty: Engine) -> None:
    assert upgrade(empty) == (None, newest_revision())
    assert differences(empty) == []
    assert set(inspect(empty).get_table_names()) == {*metadata.tables, "alembic_version"}


def test_a_table_that_no_migration_makes_is_seen_as_a_difference(empty: Engine) -> None:
    """Or the comparison above would say nothing."""
    upgrade(empty)
    with empty.begin() as connection:
        connection.execute(text("ALTER TABLE requests ADD COLUMN extra INTEGER"))
        connection.execute(CreateTable(Table("more", MetaData(), Column("n", Integer))))
        connection.execute(text("DROP INDEX ix_requests_request_id"))
    assert sorted(difference[0] for difference in differences(empty)) == [
        "add_index",
        "remove_column",
        "remove_table",
    ]


def fill(engine: Engine, revision: str) -> Rows:
    """Put a row into each table that there is at this revision; what is then told by each."""
    with engine.begin() as connection:
        for made_by in REVISIONS[: REVISIONS.index(revision) + 1]:
            for statement in FIRST_ROWS.get(made_by, ()):
                connection.execute(text(statement.replace(":", r"\:")))
        shape = max(made_by for made_by in ROLLUPS if made_by <= revision)
        for statement in ROLLUPS[shape]:
            in_bytes = statement.replace("BYTES", BYTES[engine.dialect.name])
            connection.execute(text(in_bytes.replace(":", r"\:")))
    return rows_of(engine)


def apart(told: Rows) -> Rows:
    """All but the tables that are made anew on the way."""
    return {table: rows for table, rows in told.items() if table not in ROLLUP_TABLES}


def rows_of(engine: Engine) -> Rows:
    """The rows of each table, as the driver tells them."""
    told: Rows = {}
    with engine.connect() as connection:
        for table in set(inspect(engine).get_table_names()) - {"alembic_version"}:
            rows = connection.execute(text(f"SELECT * FROM {table}")).mappings()
            told[table] = [{str(name): value for name, value in row.items()} for row in rows]
    return told


def known_to(before: Rows, after: Rows) -> Rows:
    """What is told afterwards of the tables and columns that there were before."""
    return {
        table: [
            {name: row[name] for name in was} for was, row in zip(rows, after[table], strict=True)
        ]
        for table, rows in before.items()
    }


def downgrade(engine: Engine, revision: str) -> None:
    """Bring the database back."""
    config = Config()
    config.set_main_option("script_location", str(CHECKOUT / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


@pytest.mark.parametrize("revision", REVISIONS)
def test_from_every_revision_the_newest_is_reached_with_the_rows_as_they_were(
    empty: Engine, revision: str
) -> None:
    assert upgrade(empty, revision) == (None, revision)
    before = fill(empty, revision)
    assert all(len(rows) == 1 for rows in before.values()), "a table has no row to look after"
    assert upgrade(empty) == (revision, newest_revision())
    assert differences(empty) == []
    after = rows_of(empty)
    assert known_to(apart(before), after) == apart(before)
    made = after.keys() - before.keys() - ROLLUP_TABLES
    assert all(after[table] == [] for table in made)
    assert len(store(empty, some([1]))) == 1


@pytest.mark.parametrize("revision", REVISIONS)
def test_requests_of_every_revision_are_taken_as_counted(empty: Engine, revision: str) -> None:
    upgrade(empty, revision)
    fill(empty, revision)
    upgrade(empty)
    (row,) = StoreQueries(empty).request("request-1")
    assert (row["counted"], row["settles_at"], row["proxy_span_id"]) == (True, None, None)


@pytest.mark.parametrize("revision", REVISIONS)
def test_the_way_back_to_every_revision_keeps_the_rows_of_its_tables(
    empty: Engine, revision: str
) -> None:
    upgrade(empty)
    before = fill(empty, newest_revision())
    downgrade(empty, revision)
    left = apart(rows_of(empty))
    assert known_to(left, before) == left
    assert all(len(rows) == 1 for rows in left.values())
    made = {
        statement.split()[2]
        for made_by in REVISIONS[: REVISIONS.index(revision) + 1]
        for statement in FIRST_ROWS.get(made_by, ())
    }
    assert left.keys() == made
    assert upgrade(empty) == (revision, newest_revision())
    assert differences(empty) == []


def test_what_is_up_to_date_is_left_alone(empty: Engine) -> None:
    upgrade(empty)
    store(empty, some(range(20)))
    assert upgrade(empty) == (newest_revision(), newest_revision())
    assert len(stored_keys(empty)) == 20
    assert counted_rollups(empty) == counted_rows(empty)


def test_the_way_back_ends_where_it_began(empty: Engine) -> None:
    upgrade(empty)
    downgrade(empty, "base")
    assert inspect(empty).get_table_names() == ["alembic_version"]
    assert upgrade(empty) == (None, newest_revision())
    assert differences(empty) == []


def test_agents_that_start_together_take_turns(new_url: str) -> None:
    """Each with its own connections, as processes have."""
    together = threading.Barrier(4)
    told: list[tuple[str | None, str | None]] = []
    failures: list[Exception] = []

    def start() -> None:
        engine = open_engine(new_url)
        try:
            together.wait()
            told.append(upgrade(engine))
        except Exception as error:
            failures.append(error)
        finally:
            engine.dispose()

    threads = [threading.Thread(target=start) for _ in range(together.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = newest_revision()
    assert failures == []
    assert sorted(told, key=str) == [(newest, newest)] * 3 + [(None, newest)]


@pytest.mark.slow
def test_processes_that_start_together_take_turns(new_url: str, empty: Engine) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "agent", "db", "upgrade"],
            env=os.environ | {"GOODPUT_STORAGE__URL": new_url},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    newest = newest_revision()
    assert sorted(told) == [
        f"the database is at revision {newest} (was {newest})\n",
        f"the database is at revision {newest} (was None)\n",
    ]
    assert differences(empty) == []


def test_a_database_of_a_newer_version_is_refused_with_a_sentence_and_left_alone(
    empty: Engine,
) -> None:
    upgrade(empty)
    with empty.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreUnavailable) as refused:
        upgrade(empty)
    assert str(refused.value) == (
        "the database is at revision '9999', which this version does not know (its newest is "
        f"'{newest_revision()}'); start the version that made it, or a newer one"
    )
    with empty.connect() as connection:
        kept = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert kept == "9999"
    assert differences(empty) == []


def test_a_migration_that_fails_leaves_nothing_behind(empty: Engine) -> None:
    with empty.begin() as connection:
        connection.execute(text("CREATE TABLE rollups (somebody_elses INTEGER)"))
    with pytest.raises(StoreUnavailable, match=r"rollups.*already exists") as refused:
        upgrade(empty)
    assert "\n" not in str(refused.value)
    assert inspect(empty).get_table_names() == ["rollups"]


def test_a_file_that_is_no_database_is_refused_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "goodput.db"
    path.write_text("a letter, not a database\n" * 100)
    engine = open_engine(f"sqlite:///{path}")
    with pytest.raises(
        StoreUnavailable, match=r"^the database cannot be prepared: file is not a database$"
    ):
        upgrade(engine)
    engine.dispose()
    assert path.read_text().startswith("a letter")


def test_a_folder_that_is_missing_is_refused_with_a_sentence(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'missing' / 'goodput.db'}")
    with pytest.raises(StoreUnavailable, match=r"unable to open database file$"):
        upgrade(engine)
    engine.dispose()


def test_a_role_that_may_make_no_tables_is_refused_with_a_sentence(postgres_url: str) -> None:
    owner = open_engine(postgres_url)
    with owner.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS reader"))
        connection.execute(text("CREATE ROLE reader LOGIN"))
    reader = open_engine(postgres_url.replace("postgres@", "reader@", 1))
    with pytest.raises(StoreUnavailable, match=r"permission denied for schema public$"):
        upgrade(reader)
    reader.dispose()
    with owner.begin() as connection:
        connection.execute(text("DROP ROLE reader"))
    owner.dispose()


def test_a_server_that_is_away_is_told_with_a_sentence() -> None:
    engine = open_engine("postgresql://agent:hunter2@127.0.0.1:1/goodput")
    with pytest.raises(StoreUnavailable, match="connection") as refused:
        upgrade(engine)
    engine.dispose()
    assert "\n" not in str(refused.value)
    assert "hunter2" not in str(refused.value)
