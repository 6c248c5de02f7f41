from sqlalchemy import create_engine, text

from tests.real_parts.postgres import PostgresServer


def rows(url: str) -> list[int]:
    engine = create_engine(url)
    with engine.connect() as connection:
        found = [row[0] for row in connection.execute(text("SELECT value FROM kept"))]
    engine.dispose()
    return found


def write(url: str, value: int) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS kept (value integer)"))
        connection.execute(text("INSERT INTO kept VALUES (:value)"), {"value": value})
    engine.dispose()


def test_every_database_is_new(postgres_server: PostgresServer) -> None:
    with postgres_server.new_database() as first, postgres_server.new_database() as second:
        write(first, 1)
        write(second, 2)
        assert (rows(first), rows(second)) == ([1], [2])


def test_committed_rows_survive_a_killed_server(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    write(postgres_url, 1)
    postgres_server.kill()
    postgres_server.restart()
    assert rows(postgres_url) == [1]


def test_a_stopped_server_starts_again_with_its_rows(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    write(postgres_url, 1)
    postgres_server.stop()
    postgres_server.restart()
    assert rows(postgres_url) == [1]
