"""Eight agents on one PostgreSQL lose nothing in its outage, and store nothing twice.

`python -m benchmarks fleet` does the same with the requests of an hour.
"""

from pathlib import Path

import pytest
from sqlalchemy import Engine, func, select

from agent.store.tables import requests
from tests.real_parts.postgres import PostgresServer
from tests.store.making import counted_rollups, counted_rows, fold
from tests.store.publishing.fleet import running_fleet

AGENTS, PER_S = 8, 5
# A sixth of the time PostgreSQL is away.
OUTAGE_S, BACK_S, END_S = 4, 7, 18


@pytest.mark.slow
def test_an_outage_of_a_sixth_of_the_time_loses_no_row_of_many_agents(
    postgres: Engine, emptied_postgres_url: str, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    with running_fleet(tmp_path, emptied_postgres_url, agents=AGENTS, per_s=PER_S) as fleet:
        fleet.work(0, OUTAGE_S)
        fleet.all_published()
        postgres_server.stop()
        try:
            fleet.work(OUTAGE_S, BACK_S)
            assert fleet.waiting() >= AGENTS * PER_S * (BACK_S - OUTAGE_S)
        finally:
            postgres_server.restart()
        # New rows keep coming while all agents catch up.
        fleet.work(BACK_S, END_S)
        for file in fleet.files:
            fold(file)
    assert [each.refused for each in fleet.publishing] == [0] * AGENTS
    with postgres.connect() as connection:
        by_agent = connection.execute(
            select(requests.c.agent, func.count()).group_by(requests.c.agent)
        ).all()
    assert dict(map(tuple, by_agent)) == {
        f"agent-{number}": PER_S * END_S for number in range(AGENTS)
    }
    assert counted_rollups(postgres) == counted_rows(postgres)
