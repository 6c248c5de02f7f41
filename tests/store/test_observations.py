"""Samples and events: what an agent stores of them."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, RowMapping, select

from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.gpu import Facts
from agent.store.facts import facts_by_text, facts_from, facts_json
from agent.store.observations import ObservationStore
from agent.store.store_queries import StoreQueries
from agent.store.tables import engine_samples
from tests.store.making import NOON

DAY_S = 86400


def sample(at: float) -> EngineSample:
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model=None, facts={})


def restart(at: float) -> Event:
    return Event(at=at, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)


def engine_sample_rows(engine: Engine) -> Sequence[RowMapping]:
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
