from typing import Any

from sqlalchemy import Engine, select

from agent.catalog.definitions import DEFINITIONS, GOODPUT
from agent.records.objective import Match, Objective
from agent.store.objectives import ObjectiveStore
from agent.store.store_queries import StoreQueries
from agent.store.tables import objectives
from tests.store.making import NOON

DAY_S = 86400


def objective(name: str, **given: Any) -> Objective:
    """An objective of this name."""
    facts: dict[str, Any] = {"definition": GOODPUT, "target": 0.95, "window_s": 30 * DAY_S}
    return Objective(name=name, **(facts | given))


def in_force(queries: StoreQueries) -> dict[tuple[str, str], float]:
    """The time from which each agent's objectives are in force."""
    rows = queries.objectives_in_force()
    return {(row["agent"], row["name"]): row["in_force_from"] for row in rows}


def history(engine: Engine) -> list[tuple[str, float, float | None]]:
    """Every objective that was ever in force, with its first and last time."""
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


def test_a_restart_changes_nothing(database: Engine, queries: StoreQueries) -> None:
    objective_store = ObjectiveStore(database, "agent-0")
    expected = [objective("chat", ttft_s=0.2), objective("batch")]
    objective_store.write_in_force(expected, NOON)
    objective_store.write_in_force(expected[::-1], NOON + 60)
    assert in_force(queries) == {("agent-0", "chat"): NOON, ("agent-0", "batch"): NOON}
    assert len(history(database)) == 2


def test_earlier_versions_of_an_objective_stay_in_the_history(
    database: Engine, queries: StoreQueries
) -> None:
    objective_store = ObjectiveStore(database, "agent-0")
    objective_store.write_in_force(
        [objective("chat", ttft_s=0.2), objective("chat-2"), objective("old")], NOON
    )
    objective_store.write_in_force([objective("chat", ttft_s=0.3), objective("chat-2")], NOON + 60)
    assert in_force(queries) == {("agent-0", "chat"): NOON + 60, ("agent-0", "chat-2"): NOON}
    objective_store.write_in_force(
        [objective("chat", ttft_s=0.2), objective("chat-2"), objective("old")], NOON + 90
    )
    assert history(database) == [
        ("chat", NOON, NOON + 60),
        ("chat", NOON + 60, NOON + 90),
        ("chat", NOON + 90, None),
        ("chat-2", NOON, None),
        ("old", NOON, NOON + 60),
        ("old", NOON + 90, None),
    ]


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
