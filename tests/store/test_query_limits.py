"""The limit of time of the API's queries, by statements that never end."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from agent.errors import QueryTooSlow, StoreUnavailable
from agent.store.connection import open_engine, reading
from agent.store.time_limits import open_query_engine

ENDLESS = text(
    "WITH RECURSIVE counted(n) AS (SELECT 1 UNION ALL SELECT 1 FROM counted) "
    "SELECT sum(n) FROM counted"
)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of each kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'goodput.db'}"
    address: str = request.getfixturevalue("postgres_url")
    return address


@pytest.fixture
def limited(url: str) -> Iterator[Engine]:
    """An engine whose queries may take a twentieth of a second."""
    engine = open_query_engine(url, 0.05)
    yield engine
    engine.dispose()


def test_an_endless_query_is_ended_and_its_connection_is_used_again(limited: Engine) -> None:
    for _ in range(20):
        with pytest.raises(QueryTooSlow, match="query_timeout"), reading(limited) as each:
            each.execute(ENDLESS)
    with reading(limited) as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1


def test_a_query_of_many_statements_has_one_limit(limited: Engine) -> None:
    def query_for_ever() -> None:
        with reading(limited) as connection:
            while True:
                connection.execute(text("SELECT 1"))

    with pytest.raises(QueryTooSlow):
        query_for_ever()


def test_a_query_that_gets_no_connection_is_refused(url: str) -> None:
    engine = open_query_engine(url, 0.05)
    others = [engine.connect() for _ in range(18)]
    with pytest.raises(StoreUnavailable, match="does not answer"), reading(engine):
        pass
    for other in others:
        other.close()
    engine.dispose()


def test_what_anybody_may_read_of_a_failure_shows_no_host_and_no_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = open_engine("postgresql://secret-user@127.0.0.1:1/secret-database")
    for _ in range(3):
        with pytest.raises(StoreUnavailable) as refused, reading(engine):
            pass
        assert refused.value.public.startswith("the database does not answer")
        for secret in ("127.0.0.1", "secret-user", "secret-database"):
            assert secret not in refused.value.public
        assert "127.0.0.1" in str(refused.value)
    # The log has the cause, once a minute.
    assert caplog.text.count("127.0.0.1") == 1
    engine.dispose()
