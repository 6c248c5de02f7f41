"""The size of a database by its files and by the server."""

from pathlib import Path

from sqlalchemy import create_engine, text

from agent.store.connection import open_engine
from agent.store.stored_queries import database_bytes
from tests.store.migrated import migrated


def test_a_database_grows_by_what_is_stored(new_url: str) -> None:
    with migrated(new_url) as engine:
        before = database_bytes(engine)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE filler (content TEXT)"))
            connection.execute(text("INSERT INTO filler VALUES (:c)"), {"c": "x" * 200})
            for _ in range(12):
                connection.execute(text("INSERT INTO filler SELECT content FROM filler"))
        after = database_bytes(engine)
    assert before is not None
    assert after is not None
    # 4,096 rows of 200 bytes.
    assert 800_000 < after - before < 4_000_000


def test_clickhouse_has_the_size_of_the_databases_own_tables(clickhouse_url: str) -> None:
    engine = open_engine(clickhouse_url)
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE filler (n UInt64) ENGINE = MergeTree ORDER BY n"))
        before = database_bytes(engine)
        connection.execute(text("INSERT INTO filler SELECT rand64() FROM numbers(10000)"))
    assert before == 0
    # 10,000 numbers that cannot be compressed.
    assert 80_000 < (database_bytes(engine) or 0) < 100_000
    engine.dispose()


def test_a_database_in_memory_has_no_size() -> None:
    assert database_bytes(create_engine("sqlite://")) is None


def test_the_log_of_sqlite_is_a_part_of_it(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'a.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE a (b)"))
    files = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(files) == 3
    assert database_bytes(engine) == sum(files)
    engine.dispose()
