"""Every revision reaches the newest one with its rows; what a migration refuses and grants."""

import logging
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    Table,
    create_engine,
    func,
    insert,
    inspect,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.schema import CreateTable

from agent.errors import StoreUnavailable
from agent.store import migrating
from agent.store.connection import open_engine
from agent.store.migrating import newest_revision, require_newest, upgrade
from agent.store.store_queries import StoreQueries
from agent.store.tables import metadata
from tests.store.making import some, store_in, stored_keys
from tests.store.migrated import differences, of_the_next_version, table_names

CHECKOUT = Path(__file__).resolve().parents[2]

SCRIPTS = ScriptDirectory(str(CHECKOUT / "migrations"))
REVISIONS = [script.revision for script in SCRIPTS.walk_revisions()][::-1]

# What a row has in these columns of any table, and in every other one by its type.
NAMED = {
    **{"vantage": "engine", "status": "ok", "verdict": "met", "verdicts": '{"chat": "met"}'},
    **dict.fromkeys(("engine_status", "explanation", "settles_at", "proxy_span_id")),
    "request_id": "request-1",
}
BY_TYPE: Mapping[type, Any] = {
    str: "{}",
    int: 1,
    float: 0.25,
    bool: True,
    bytes: b"0",
    datetime: datetime(2026, 11, 21, 12, microsecond=123456, tzinfo=UTC),
}

Rows = dict[str, list[dict[str, Any]]]


def test_every_revision_has_one_successor() -> None:
    assert SCRIPTS.get_heads() == [REVISIONS[-1]] == [newest_revision()]
    assert SCRIPTS.get_bases() == [REVISIONS[0]]


def test_every_new_file_has_an_id_of_its_own(tmp_path: Path) -> None:
    ids = set()
    for name in ("one.db", "other.db"):
        engine = open_engine(f"sqlite:///{tmp_path / name}")
        upgrade(engine)
        (row,) = rows_of(engine)["publishing"]
        ids.add(row["file"])
        engine.dispose()
    assert len(ids) == 2


def test_an_empty_database_gets_the_declared_tables_and_others_are_differences(
    empty_database: Engine,
) -> None:
    assert upgrade(empty_database) == (None, newest_revision())
    require_newest(empty_database)
    assert differences(empty_database) == []
    assert table_names(empty_database) == {*metadata.tables, "alembic_version"}
    with empty_database.begin() as connection:
        connection.execute(text("ALTER TABLE requests ADD COLUMN extra INTEGER"))
        connection.execute(CreateTable(Table("more", MetaData(), Column("n", Integer))))
        connection.execute(text("DROP INDEX ix_requests_request_id"))
    found = sorted(difference[0] for difference in differences(empty_database))
    assert found == ["add_index", "remove_column", "remove_table"]


def fill(engine: Engine) -> Rows:
    """Insert a row into each table that has none, and return all rows."""
    tables = MetaData()
    with engine.begin() as connection:
        tables.reflect(connection, only=sorted(table_names(engine) - {"alembic_version"}))
        for table in tables.sorted_tables:
            row = {c.name: NAMED.get(c.name, BY_TYPE[c.type.python_type]) for c in table.c}
            if not connection.execute(select(table)).all():
                connection.execute(insert(table).values(row))
    return rows_of(engine)


def rows_of(engine: Engine) -> Rows:
    rows_by_table: Rows = {}
    with engine.connect() as connection:
        for table in table_names(engine) - {"alembic_version"}:
            rows = connection.execute(text(f"SELECT * FROM {table}")).mappings()
            rows_by_table[table] = [
                {str(name): value for name, value in row.items()} for row in rows
            ]
    return rows_by_table


def in_columns_of(before: Rows, after: Rows) -> Rows:
    """The rows of `after`, only with the tables and columns of `before`."""
    return {
        table: [
            {name: row[name] for name in old} for old, row in zip(rows, after[table], strict=True)
        ]
        for table, rows in before.items()
    }


def downgrade(engine: Engine, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(CHECKOUT / "migrations"))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_upgrade_from_every_revision_keeps_the_rows(
    empty_database: Engine, revision: str
) -> None:
    assert upgrade(empty_database, revision) == (None, revision)
    before = fill(empty_database)
    assert all(len(rows) == 1 for rows in before.values()), "a table has no row to compare"
    assert upgrade(empty_database) == (revision, newest_revision())
    assert differences(empty_database) == []
    after = rows_of(empty_database)
    assert in_columns_of(before, after) == before
    assert all(after[table] == [] for table in after.keys() - before.keys())
    (row,) = StoreQueries(empty_database).request("request-1")
    assert (row["counted"], row["settles_at"], row["proxy_span_id"]) == (True, None, None)
    store_in(empty_database, some([1]))
    assert upgrade(empty_database) == (newest_revision(), newest_revision())
    assert len(stored_keys(empty_database)) == 2


def test_a_downgrade_to_every_revision_keeps_the_rows_of_its_tables_alone(
    empty_database: Engine,
) -> None:
    tables = {}
    for revision in REVISIONS:
        upgrade(empty_database, revision)
        tables[revision] = table_names(empty_database) - {"alembic_version"}
    before = fill(empty_database)
    for revision in REVISIONS[::-1]:
        downgrade(empty_database, revision)
        left = rows_of(empty_database)
        assert in_columns_of(left, before) == left
        assert left.keys() == tables[revision]
    downgrade(empty_database, "base")
    assert table_names(empty_database) == {"alembic_version"}
    assert upgrade(empty_database) == (None, newest_revision())
    assert differences(empty_database) == []


def test_a_database_of_a_newer_version_is_refused_and_not_changed(
    empty_database: Engine,
) -> None:
    upgrade(empty_database)
    with empty_database.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(StoreUnavailable, match=r"'9999', which this version does not know"):
        upgrade(empty_database)
    with empty_database.connect() as connection:
        stored = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    assert stored == "9999"
    assert differences(empty_database) == []


def test_a_migration_that_fails_creates_no_table(empty_database: Engine) -> None:
    with empty_database.begin() as connection:
        connection.execute(text("CREATE TABLE rollups (foreign_column INTEGER)"))
    with pytest.raises(StoreUnavailable, match=r"rollups.*already exists") as refused:
        upgrade(empty_database)
    assert "\n" not in str(refused.value)
    assert inspect(empty_database).get_table_names() == ["rollups"]


def test_an_interrupted_upgrade_keeps_the_migrations_that_are_done(
    empty_database: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = of_the_next_version(tmp_path)
    monkeypatch.setattr(migrating, "_scripts", lambda: scripts)
    with empty_database.begin() as connection:
        connection.execute(text("CREATE TABLE more (n INTEGER)"))
    with pytest.raises(StoreUnavailable, match=r"more.*already exists"):
        upgrade(empty_database)
    with empty_database.begin() as connection:
        stored = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
        connection.execute(text("DROP TABLE more"))
    assert stored == newest_revision()
    assert upgrade(empty_database) == (newest_revision(), "more")


def test_a_database_that_no_release_made_is_refused_and_not_changed(
    empty_database: Engine,
) -> None:
    with empty_database.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)"))
        connection.execute(text("INSERT INTO alembic_version VALUES ('')"))
    for revision in ("0001", "0022", "1"):
        with empty_database.begin() as connection:
            connection.execute(text(f"UPDATE alembic_version SET version_num = '{revision}'"))
        for refusing in (upgrade, require_newest):
            with pytest.raises(
                StoreUnavailable, match=rf"at revision '{revision}' .*never released"
            ):
                refusing(empty_database)
    assert table_names(empty_database) == {"alembic_version"}


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "goodput.db"
    path.write_text("a letter, not a database\n" * 100)
    engine = open_engine(f"sqlite:///{path}")
    with pytest.raises(
        StoreUnavailable, match=r"^the database cannot be prepared: the file is no database"
    ):
        upgrade(engine)
    engine.dispose()
    assert path.read_text().startswith("a letter")


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'missing' / 'goodput.db'}")
    with pytest.raises(StoreUnavailable, match=r"unable to open database file$"):
        upgrade(engine)
    engine.dispose()


def test_a_role_that_may_create_no_tables_is_refused(postgres_url: str) -> None:
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


AGENTS = 6
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


READER = "goodput_reader"


def run_statements(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


@contextmanager
def login(owner: Engine, name: str) -> Iterator[Engine]:
    """A connection of a new user of the server."""
    run_statements(owner, f"CREATE ROLE {name} LOGIN")
    engine = create_engine(make_url(owner.url).set(username=name))
    try:
        yield engine
    finally:
        engine.dispose()
        run_statements(owner, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_a_member_reads_every_table_of_now_and_later_and_writes_none(postgres: Engine) -> None:
    store_in(postgres, some([1]))
    with login(postgres, "grafana") as grafana:
        run_statements(
            postgres, f"GRANT {READER} TO grafana", "CREATE TABLE made_later (n INTEGER)"
        )
        run_statements(grafana, "SELECT * FROM made_later")
        run_statements(postgres, "DROP TABLE made_later")
        with grafana.connect() as connection:
            counts = {
                table.name: connection.scalar(select(func.count()).select_from(table))
                for table in metadata.sorted_tables
            }
        assert counts["requests"] == 1
        for statement in (
            "DELETE FROM requests",
            "INSERT INTO published_files VALUES ('agent-0', 'ab', 1, now())",
            "UPDATE agents SET beats = 0",
            "CREATE TABLE own (n INTEGER)",
            "TRUNCATE events",
        ):
            with pytest.raises(ProgrammingError, match="permission denied"):
                run_statements(grafana, statement)


def test_who_is_no_member_reads_nothing(postgres: Engine) -> None:
    with (
        login(postgres, "stranger") as stranger,
        pytest.raises(ProgrammingError, match="permission denied"),
    ):
        run_statements(stranger, "SELECT * FROM requests")


@contextmanager
def without_role(owner: Engine) -> Iterator[None]:
    """Inside the block the server has no such role; that of other tests has another name."""
    run_statements(owner, f"ALTER ROLE {READER} RENAME TO {READER}_of_others")
    try:
        yield
    finally:
        run_statements(owner, f"ALTER ROLE {READER}_of_others RENAME TO {READER}")


@pytest.mark.usefixtures("postgres")
def test_a_user_who_may_create_no_roles_migrates_without_it_and_the_log_says_how_to_make_it(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = open_engine(postgres_url)
    with login(owner, "modest") as modest, without_role(owner):
        run_statements(owner, "GRANT ALL ON SCHEMA public TO modest")
        assert upgrade(modest) == (None, newest_revision())
        (said,) = [line for line in caplog.messages if READER in line]
        _, made, granted = said.split(" runs ")
        run_statements(owner, made.removesuffix("; then this user"))
        run_statements(modest, *granted.split("; "))
        with login(owner, "grafana") as grafana:
            run_statements(owner, f"GRANT {READER} TO grafana")
            run_statements(grafana, "SELECT * FROM requests", "SELECT * FROM alembic_version")
        run_statements(owner, f"DROP OWNED BY {READER}", f"DROP ROLE {READER}")
    owner.dispose()


def test_a_user_who_may_create_no_roles_grants_to_the_one_that_is_there(
    postgres: Engine, postgres_url: str
) -> None:
    """Roles belong to the server: its administrator, or another database, may have made it."""
    owner = open_engine(postgres_url)
    with login(owner, "modest") as modest, login(owner, "grafana") as grafana:
        run_statements(owner, "GRANT ALL ON SCHEMA public TO modest", f"GRANT {READER} TO grafana")
        upgrade(modest)
        run_statements(grafana, "SELECT * FROM requests")
    owner.dispose()
