"""Samples and events: what an agent stores of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, RowMapping, select

from agent.errors import StoreUnavailable
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import Facts
from agent.store.connection import open_engine
from agent.store.facts import facts_by_text, facts_from, facts_json
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from agent.store.tables import engine_samples
from tests.records.making import objective
from tests.store.making import NOON, gpu_sample

DAY_S = 86400


def sample(at: float) -> EngineSample:
    """An engine sample at this time."""
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model=None, facts={})


def restart(at: float) -> Event:
    """A restart at this time."""
    return Event(at=at, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)


def engine_sample_rows(engine: Engine) -> Sequence[RowMapping]:
    """The stored engine samples, in the order in which they came."""
    with engine.connect() as connection:
        query = select(engine_samples).order_by(engine_samples.c.id)
        return connection.execute(query).mappings().all()


def test_a_number_that_json_cannot_hold_is_unknown(sqlite: Engine) -> None:
    """Expositions contain NaN, and the stored facts must be valid JSON for every reader."""
    odd = {"a": float("nan"), "b": float("-inf"), "c": 1.5}
    ObservationStore(sqlite, "agent-0").write_event(replace(restart(NOON), evidence=odd))
    facts: dict[tuple[str, tuple[str, ...]], float] = {(name, ()): odd[name] for name in odd}
    ObservationStore(sqlite, "agent-0").write_engine_sample(replace(sample(NOON), facts=facts))
    expected = {"a": None, "b": None, "c": 1.5}
    (row,) = engine_sample_rows(sqlite)
    assert json.loads(row["facts"]) == expected
    assert [row["evidence"] for row in StoreQueries(sqlite).events(None, 10).items] == [expected]


def test_an_engine_sample_is_stored_as_it_was_read(sqlite: Engine) -> None:
    facts = {("running", ()): 5.0, ("requests", ("stop", "größe")): 7.0}
    observations = ObservationStore(sqlite, "agent-0")
    observations.write_engine_sample(replace(sample(NOON + 0.123456), model="llama", facts=facts))
    observations.write_engine_sample(sample(NOON + 1))
    first, second = engine_sample_rows(sqlite)
    assert (first["at"], first["agent"], first["engine"]) == (NOON + 0.123456, "agent-0", "chat-0")
    assert (first["model"], first["dialect"]) == ("llama", "vllm")
    assert json.loads(first["facts"]) == {
        "running": 5.0,
        "requests": [{"labels": ["stop", "größe"], "value": 7.0}],
    }
    assert (second["at"], second["model"]) == (NOON + 1, None)


def reported_in_one_line(*tasks: Callable[[], object]) -> None:
    for task in tasks:
        with pytest.raises(StoreUnavailable) as refused:
            task()
        assert "\n" not in str(refused.value)


def test_a_file_without_its_tables_is_reported_in_one_line(tmp_path: Path) -> None:
    engine = open_engine(f"sqlite:///{tmp_path / 'empty.db'}")
    observations = ObservationStore(engine, "agent-0")
    reported_in_one_line(
        lambda: observations.write_engine_sample(sample(NOON)),
        lambda: observations.write_gpu_samples([gpu_sample(NOON)]),
        lambda: observations.write_event(restart(NOON)),
    )
    engine.dispose()


def test_a_database_without_its_tables_is_reported_in_one_line(empty_database: Engine) -> None:
    reported_in_one_line(
        lambda: ObjectiveStore(empty_database, "agent-0").write_in_force([objective()], NOON),
        lambda: Retention(empty_database).expire(NOON, NOON, NOON),
        lambda: StoreQueries(empty_database).request("nobody"),
    )


names = st.sampled_from(["running", "requests", "clock"])
labels = st.lists(st.text(), min_size=1, max_size=2).map(tuple)


@given(
    st.dictionaries(
        st.tuples(names, st.just(())) | st.tuples(names.map("{}_by".format), labels),
        st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_facts_with_any_labels_are_read_as_written(facts: Facts) -> None:
    assert facts_from(json.dumps(facts_json(facts))) == facts


def test_an_unknown_value_of_a_sample_is_no_fact() -> None:
    odd = {("a", ()): float("nan"), ("b", ("x",)): float("inf"), ("c", ("x",)): 1.0}
    assert facts_from(json.dumps(facts_json(odd))) == {("c", ("x",)): 1.0}


@pytest.mark.parametrize("damaged", ["{cut of", "[1]", '{"x": "y"}', '{"x": [1]}', '{"x": [{}]}'])
def test_damaged_facts_are_an_error(damaged: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        facts_from(damaged)


def test_the_api_names_a_fact_with_its_labels_in_braces() -> None:
    stored = facts_json({("a", ()): 1.0, ("b", ("x", "y")): 2.0, ("b", ("z",)): 3.0})
    assert facts_by_text(stored) == {"a": 1.0, "b{x,y}": 2.0, "b{z}": 3.0}
