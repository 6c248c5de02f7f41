"""What an agent deletes in the shared PostgreSQL, also of agents that are gone."""

from sqlalchemy import Engine, text

from agent.store.publishing.postgres import PostgresUpkeep
from tests.records.making import NOON

DAY_S = 86400.0
NOW = NOON + 500 * DAY_S


def test_the_numbers_of_files_that_were_published_long_ago_go(
    postgres: Engine, emptied_postgres_url: str
) -> None:
    number = text("INSERT INTO published_files VALUES ('gone', :file, 7, to_timestamp(:at))")
    with postgres.begin() as connection:
        for days in (399, 401):
            connection.execute(number, {"file": str(days), "at": NOW - days * DAY_S})
    upkeep = PostgresUpkeep(
        emptied_postgres_url, "agent-0", keep_requests_s=7 * DAY_S, keep_rollups_s=400 * DAY_S
    )
    upkeep.expire(NOW)
    upkeep.close()
    with postgres.connect() as connection:
        assert connection.scalars(text("SELECT file FROM published_files")).all() == ["399"]
