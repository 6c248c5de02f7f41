"""The role for Grafana: its members read every table and write none."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, create_engine, func, make_url, select, text
from sqlalchemy.exc import ProgrammingError

from agent.store.connection import open_engine
from agent.store.migrating import newest_revision, upgrade
from agent.store.tables import metadata
from tests.store.making import some, store_in

ROLE = "goodput_reader"


def run(engine: Engine, *statements: str) -> None:
    """Run statements in one transaction."""
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


@contextmanager
def login(owner: Engine, name: str) -> Iterator[Engine]:
    """A connection of a new user of the server."""
    run(owner, f"CREATE ROLE {name} LOGIN")
    engine = create_engine(make_url(owner.url).set(username=name))
    try:
        yield engine
    finally:
        engine.dispose()
        run(owner, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_a_member_reads_every_table_and_writes_none(postgres: Engine) -> None:
    store_in(postgres, some([1]))
    with login(postgres, "grafana") as grafana:
        run(postgres, f"GRANT {ROLE} TO grafana")
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
                run(grafana, statement)


def test_a_member_reads_tables_that_are_made_later(postgres: Engine) -> None:
    with login(postgres, "grafana") as grafana:
        run(postgres, f"GRANT {ROLE} TO grafana", "CREATE TABLE made_later (n INTEGER)")
        run(grafana, "SELECT * FROM made_later")
        run(postgres, "DROP TABLE made_later")


def test_who_is_no_member_reads_nothing(postgres: Engine) -> None:
    with (
        login(postgres, "stranger") as stranger,
        pytest.raises(ProgrammingError, match="permission denied"),
    ):
        run(stranger, "SELECT * FROM requests")


@contextmanager
def without_role(owner: Engine) -> Iterator[None]:
    """Inside the block the server has no such role; that of other tests has another name."""
    run(owner, f"ALTER ROLE {ROLE} RENAME TO {ROLE}_of_others")
    try:
        yield
    finally:
        run(owner, f"ALTER ROLE {ROLE}_of_others RENAME TO {ROLE}")


@pytest.mark.usefixtures("postgres")
def test_a_user_who_may_create_no_roles_migrates_without_it_and_the_log_says_how_to_make_it(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner = open_engine(postgres_url)
    with login(owner, "modest") as modest, without_role(owner):
        run(owner, "GRANT ALL ON SCHEMA public TO modest")
        assert upgrade(modest) == (None, newest_revision())
        (said,) = [line for line in caplog.messages if ROLE in line]
        _, made, granted = said.split(" runs ")
        run(owner, made.removesuffix("; then this user"))
        run(modest, *granted.split("; "))
        with login(owner, "grafana") as grafana:
            run(owner, f"GRANT {ROLE} TO grafana")
            run(grafana, "SELECT * FROM requests", "SELECT * FROM alembic_version")
        run(owner, f"DROP OWNED BY {ROLE}", f"DROP ROLE {ROLE}")
    owner.dispose()


def test_a_user_who_may_create_no_roles_grants_to_the_one_that_is_there(
    postgres: Engine, postgres_url: str
) -> None:
    """Roles belong to the server: its administrator, or another database, may have made it."""
    owner = open_engine(postgres_url)
    with login(owner, "modest") as modest, login(owner, "grafana") as grafana:
        run(owner, "GRANT ALL ON SCHEMA public TO modest", f"GRANT {ROLE} TO grafana")
        upgrade(modest)
        run(grafana, "SELECT * FROM requests")
    owner.dispose()
