"""What agents tell of themselves, as whoever reads their database sees it."""

from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text

from agent import __version__
from agent.store import store_queries
from agent.store.claim import AgentState, NameClaim
from agent.store.objectives import ObjectiveStore
from agent.store.publishing.changes import Lag
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from tests.records.making import NOON, objective

ENGINE = {"name": "chat-0", "up": True, "model": "llama", "running": 2.0, "waiting": float("nan")}
# Between the beats of a test, on a machine that stops, and those that were set back.
OVERDUE_AFTER_S = 1800.0
# A day by which clocks of the test and of the database do not matter.
DAY_S = 86400.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent is overdue later than a test may take."""
    monkeypatch.setattr(store_queries, "OVERDUE_AFTER_S", OVERDUE_AFTER_S)


def lag(_connection: Connection) -> Lag:
    """A file in which a hundred rows wait."""
    return Lag(100, 12.5)


def claimed(database: Engine, name: str, **given: Any) -> NameClaim:
    """The claim of an agent that runs elsewhere."""
    claim = NameClaim(name, f"elsewhere:1:{name}", **given)
    claim.take(database)
    return claim


def told(database: Engine) -> dict[str, Mapping[str, Any]]:
    """The agents by name."""
    return {row["name"]: row for row in StoreQueries(database).agents()}


def age(database: Engine, seconds: float) -> None:
    """Set every heartbeat back, by the database's own clock."""
    earlier = {
        "sqlite": "datetime(seen_at, '-{} seconds')",
        "postgresql": "seen_at - interval '{} seconds'",
    }[database.dialect.name]
    with database.begin() as connection:
        connection.execute(text(f"UPDATE agents SET seen_at = {earlier.format(seconds)}"))


def test_an_agent_tells_its_version_its_start_and_with_each_beat_its_lag_and_engines(
    database: Engine,
) -> None:
    state = AgentState(engines=lambda: [ENGINE], simulated=True, started_at=NOON)
    claim = claimed(database, "chat", state=state, lag=lag)
    first = told(database)["chat"]
    assert (first["version"], first["started_at"], first["simulated"]) == (__version__, NOON, True)
    assert (first["lag_s"], first["waiting_rows"], first["engines"]) == (None, None, None)
    claim.beat(database)
    row = told(database)["chat"]
    assert (row["waiting_rows"], row["lag_s"]) == (100, 12.5)
    # JSON has no NaN.
    assert row["engines"] == [{**ENGINE, "waiting": None}]


def test_an_agent_that_does_not_publish_has_no_lag(database: Engine) -> None:
    claimed(database, "chat").beat(database)
    row = told(database)["chat"]
    assert (row["lag_s"], row["waiting_rows"], row["engines"]) == (None, None, [])


def test_an_agent_is_overdue_when_it_shows_no_beat_until_it_shows_one(database: Engine) -> None:
    claims = [claimed(database, name) for name in ("chat", "code")]
    age(database, 3600)
    claims[1].beat(database)
    rows = told(database)
    assert [rows[name]["overdue"] for name in ("chat", "code")] == [True, False]
    assert rows["chat"]["silent_s"] == pytest.approx(3600, abs=OVERDUE_AFTER_S)
    assert rows["code"]["silent_s"] < OVERDUE_AFTER_S
    claims[0].beat(database)
    assert told(database)["chat"]["overdue"] is False


def test_an_agent_that_stopped_in_order_is_not_overdue(database: Engine) -> None:
    claim = claimed(database, "chat")
    claim.release(database)
    age(database, 3600)
    row = told(database)["chat"]
    assert row["overdue"] is False
    assert row["stopped_at"] is not None
    claimed(database, "chat")
    row = told(database)["chat"]
    assert (row["stopped_at"], row["overdue"]) == (None, False)


def test_of_an_agent_of_an_earlier_version_all_but_its_name_is_unknown(database: Engine) -> None:
    with database.begin() as connection:
        insert = "INSERT INTO agents (name, instance, beats) VALUES ('old', 'elsewhere:1:a', 7)"
        connection.execute(text(insert.replace(":", r"\:")))
    row = dict(told(database)["old"])
    assert row.pop("name") == "old"
    assert set(row.values()) == {None}


def test_agents_that_were_not_seen_for_as_long_as_requests_are_kept_expire(
    database: Engine,
) -> None:
    for name in ("gone", "stopped"):
        claimed(database, name).release(database)
        ObjectiveStore(database, name).write_in_force([objective()], NOON)
    age(database, 8 * DAY_S)
    claimed(database, "here").beat(database)
    ObjectiveStore(database, "here").write_in_force([objective()], NOON)
    with database.connect() as connection:
        (now,) = connection.execute(text(_NOW[database.dialect.name])).one()
    # However short requests are kept, an agent that runs keeps its row.
    Retention(database).expire(float(now) - 1.0, float(now) - 1.0, float(now))
    assert list(told(database)) == ["here"]
    # The objectives of the agents that are gone are no longer in force.
    assert [row["agent"] for row in StoreQueries(database).objectives_in_force()] == ["here"]


_NOW = {
    "sqlite": "SELECT unixepoch()",
    "postgresql": "SELECT extract(epoch FROM now())",
}
