"""Agents in a database: their names, what they report of themselves, and their objectives."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, select, text, update

from agent import __version__
from agent.catalog.definitions import DEFINITIONS
from agent.records.held_rate import RateEvidence
from agent.records.objective import Match
from agent.store import store_queries
from agent.store.claim import DEAD_AFTER_S, AgentState, NameClaim, NameTaken, own_instance
from agent.store.objectives import ObjectiveStore
from agent.store.publishing.changes import Lag
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from agent.store.tables import objectives
from tests.records.making import NOON, objective
from tests.store.making import Clock

ELSEWHERE = "another-host:1:aa"


@pytest.fixture
def clock() -> Clock:
    return Clock(5.0)


@pytest.fixture
def claim(clock: Clock) -> NameClaim:
    return NameClaim("chat", own_instance(), clock)


def instances(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT name, instance FROM agents ORDER BY name"))
        return [(name, instance) for name, instance in found]


def test_an_agent_takes_its_name_again_and_gives_it_back(
    database: Engine, claim: NameClaim
) -> None:
    NameClaim("code", ELSEWHERE).take(database)
    claim.take(database)
    claim.take(database)
    claim.beat(database)
    (name, instance), other = instances(database)
    assert (name, other) == ("chat", ("code", ELSEWHERE))
    assert instance.startswith(f"{socket.gethostname()}:{os.getpid()}:")
    claim.release(database)
    NameClaim("chat", ELSEWHERE).take(database)
    assert instances(database)[0] == ("chat", ELSEWHERE)


def test_the_name_of_an_agent_that_lives_elsewhere_is_taken(
    database: Engine, claim: NameClaim, clock: Clock
) -> None:
    other = NameClaim("chat", ELSEWHERE)
    other.take(database)
    for _ in range(10):
        with pytest.raises(NameTaken, match="another agent of the name 'chat'") as taken:
            claim.take(database)
        clock.now += DEAD_AFTER_S - 1
        other.beat(database)
    assert "another-host" not in taken.value.public
    assert instances(database) == [("chat", ELSEWHERE)]


def test_the_name_of_an_agent_that_counts_no_beats_is_free_after_a_while(
    database: Engine, claim: NameClaim, clock: Clock
) -> None:
    other = NameClaim("chat", ELSEWHERE)
    other.take(database)
    with pytest.raises(NameTaken):
        claim.take(database)
    clock.now += DEAD_AFTER_S
    claim.take(database)
    # It was only slow: it learns that the name is gone, and takes nothing from the new one.
    with pytest.raises(NameTaken, match="took over"):
        other.beat(database)
    other.release(database)
    claim.beat(database)


def test_a_process_of_this_host_that_has_ended_is_not_waited_for(
    database: Engine, claim: NameClaim
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = NameClaim("chat", f"{socket.gethostname()}:{process.pid}:bb")
        here.take(database)
        with pytest.raises(NameTaken):
            claim.take(database)
        process.communicate(b"\n")
    claim.take(database)


def test_an_earlier_agent_of_this_process_is_not_waited_for(
    database: Engine, claim: NameClaim
) -> None:
    NameClaim("chat", own_instance()).take(database)
    claim.take(database)


ENGINE = {"name": "chat-0", "up": True, "model": "llama", "running": 2.0, "waiting": float("nan")}
# Between the beats of a test, on a machine that stops, and those that were set back.
OVERDUE_AFTER_S = 1800.0
# A day by which clocks of the test and of the database do not matter.
DAY_S = 86400.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_queries, "OVERDUE_AFTER_S", OVERDUE_AFTER_S)


def lag(_connection: Connection) -> Lag:
    return Lag(100, 12.5)


def claimed(database: Engine, name: str, **given: Any) -> NameClaim:
    claim = NameClaim(name, f"elsewhere:1:{name}", **given)
    claim.take(database)
    return claim


def told(database: Engine) -> dict[str, Mapping[str, Any]]:
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


def in_force(queries: StoreQueries) -> dict[tuple[str, str], float]:
    rows = queries.objectives_in_force()
    return {(row["agent"], row["name"]): row["in_force_from"] for row in rows}


def history(engine: Engine) -> list[tuple[str, float, float | None]]:
    """Every named_objective that was ever in force, with its first and last time."""
    query = select(objectives.c.name, objectives.c.in_force_from, objectives.c.in_force_until)
    with engine.connect() as connection:
        rows = connection.execute(query.order_by(objectives.c.name, objectives.c.in_force_from))
        return [(row[0], row[1], row[2]) for row in rows]


def test_an_objective_is_read_as_it_was_written(database: Engine, queries: StoreQueries) -> None:
    written = objective(
        "chat",
        definition=DEFINITIONS["vllm"],
        match=Match(model="llama-*", tenant="größe", max_input_tokens=4096),
        ttft_s=0.2,
    )
    ObjectiveStore(database, "agent-0").write_in_force([written], NOON + 0.5)
    (row,) = queries.objectives_in_force()
    assert (row["name"], row["agent"], row["in_force_from"]) == ("chat", "agent-0", NOON + 0.5)
    assert row["in_force_until"] is None
    definition = row["definition"]
    assert (definition["ttft_s"], definition["tpot_s"], definition["target"]) == (0.2, None, 0.95)
    assert definition["match"]["tenant"] == "größe"
    assert definition["definition"]["failed"] == "undetermined"


def test_the_preset_and_an_equal_objective_of_the_settings_are_told_apart(
    database: Engine, queries: StoreQueries
) -> None:
    objective_store = ObjectiveStore(database, "agent-0")
    objective_store.write_in_force([objective("chat", is_preset=True)], NOON)
    objective_store.write_in_force([objective("chat")], NOON + 60)
    assert in_force(queries) == {("agent-0", "chat"): NOON + 60}


def test_earlier_versions_of_an_objective_stay_in_the_history(
    database: Engine, queries: StoreQueries
) -> None:
    objective_store = ObjectiveStore(database, "agent-0")
    objective_store.write_in_force(
        [objective("chat", ttft_s=0.2), objective("chat-2"), objective("old")],
        NOON,
    )
    objective_store.write_in_force([objective("chat", ttft_s=0.3), objective("chat-2")], NOON + 60)
    assert in_force(queries) == {("agent-0", "chat"): NOON + 60, ("agent-0", "chat-2"): NOON}
    objective_store.write_in_force(
        [objective("chat", ttft_s=0.2), objective("chat-2"), objective("old")],
        NOON + 90,
    )
    assert history(database) == [
        ("chat", NOON, NOON + 60),
        ("chat", NOON + 60, NOON + 90),
        ("chat", NOON + 90, None),
        ("chat-2", NOON, None),
        ("old", NOON, NOON + 60),
        ("old", NOON + 90, None),
    ]


RATES = {
    "chat-0": (RateEvidence(per_s=4.0, at=NOON, held=2.5, seen_at=NOON, held_at=NOON - 60.0),),
    "chat-1": (RateEvidence(per_s=8.0, at=NOON, missed=1.0, seen_at=NOON),),
}


def test_the_rates_that_engines_hold_are_kept_with_the_objective(database: Engine) -> None:
    store, other = ObjectiveStore(database, "agent-0"), ObjectiveStore(database, "agent-1")
    for each in (store, other):
        each.write_in_force([objective("chat", ttft_s=0.2), objective("batch")], NOON)
    assert store.held_rates() == {}
    store.write_held_rates({"chat": {}, "gone": RATES})
    store.write_held_rates({"chat": RATES})
    assert store.held_rates() == {"chat": RATES}
    assert other.held_rates() == {}
    # Another limit is held at another rate.
    store.write_in_force([objective("chat", ttft_s=0.3), objective("batch")], NOON + 60)
    assert store.held_rates() == {}


@pytest.mark.parametrize("written", ["{", "[]", '{"a": [{"per_s": 1, "held": -1}]}', "\x00"])
def test_damaged_rates_are_left_out(
    sqlite: Engine, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = ObjectiveStore(sqlite, "agent-0")
    store.write_in_force([objective("chat", ttft_s=0.2), objective("batch")], NOON)
    store.write_held_rates({"batch": RATES})
    with sqlite.begin() as connection:
        row = update(objectives).where(objectives.c.name == "chat")
        connection.execute(row.values(held_rates=written))
    assert store.held_rates() == {"batch": RATES}


def test_each_agent_has_objectives_of_its_own(database: Engine, queries: StoreQueries) -> None:
    objective_store = ObjectiveStore(database, "agent-0")
    other = ObjectiveStore(database, "agent-1")
    objective_store.write_in_force([objective("chat", ttft_s=0.2)], NOON)
    other.write_in_force([objective("chat", ttft_s=0.4), objective("batch")], NOON + 10)
    objective_store.write_in_force([], NOON + 20)
    assert in_force(queries) == {
        ("agent-1", "chat"): NOON + 10,
        ("agent-1", "batch"): NOON + 10,
    }
    assert [row["name"] for row in queries.objectives_in_force()] == ["batch", "chat"]
