"""What an agent deletes in the shared PostgreSQL, also of agents that are gone."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, text

from agent.store.journal.postgres_upkeep import PostgresUpkeep
from tests.records.making import NOON

DAY_S = 86400.0
NOW = NOON + 20 * DAY_S


@pytest.fixture
def upkeep(postgres: Engine, emptied_postgres_url: str) -> Iterator[PostgresUpkeep]:
    """That of agent-0."""
    made = PostgresUpkeep(
        emptied_postgres_url,
        "agent-0",
        keep_requests_s=7 * DAY_S,
        keep_rollups_s=400 * DAY_S,
        max_series=10,
    )
    yield made
    made.close()


def test_marks_of_other_agents_stay_longer_than_its_own_and_not_for_ever(
    postgres: Engine, upkeep: PostgresUpkeep
) -> None:
    mark = text("INSERT INTO journals VALUES (:run, :agent, 7, to_timestamp(:at))")
    with postgres.begin() as connection:
        for agent in ("agent-0", "gone"):
            for days in (6, 8, 399, 401):
                at = NOW - days * DAY_S
                connection.execute(mark, {"run": f"{agent} {days}", "agent": agent, "at": at})
    upkeep.expire(NOW)
    with postgres.connect() as connection:
        left = connection.scalars(text("SELECT run FROM journals")).all()
    assert set(left) == {"agent-0 6", "gone 6", "gone 8", "gone 399"}
