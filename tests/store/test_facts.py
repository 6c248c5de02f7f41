"""Facts of samples in the database, in the encoding of this version and the earlier one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from agent.records.gpu import Facts
from agent.store.connection import open_engine
from agent.store.facts import facts_by_text, facts_from, facts_json
from agent.store.migrating import upgrade
from agent.store.minutes import MinuteStore
from agent.store.store_queries import StoreQueries
from tests.store.test_migrating import downgrade

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


def test_an_unknown_value_is_no_fact() -> None:
    odd = {("a", ()): float("nan"), ("b", ("x",)): float("inf"), ("c", ("x",)): 1.0}
    assert facts_from(json.dumps(facts_json(odd))) == {("c", ("x",)): 1.0}


@pytest.mark.parametrize("damaged", ["{cut of", "[1]", '{"x": "y"}', '{"x": [1]}', '{"x": [{}]}'])
def test_damaged_facts_are_an_error(damaged: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        facts_from(damaged)


def test_the_api_names_a_fact_with_its_labels_in_braces() -> None:
    stored = facts_json({("a", ()): 1.0, ("b", ("x", "y")): 2.0, ("b", ("z",)): 3.0})
    assert facts_by_text(stored) == {"a": 1.0, "b{x,y}": 2.0, "b{z}": 3.0}


_AT = 1795262400.0
_OLD = {"running": 1.0, "requests{stop,a}": 2.0, "requests{length,a}": 3.0, "unknown{x}": None}
_KNOWN = {
    ("running", ()): 1.0,
    ("requests", ("stop", "a")): 2.0,
    ("requests", ("length", "a")): 3.0,
}
_INSTANCE = {"uuid": "MIG-1", "facts": {"clock{sm}": 4.0}, "processes": None}
_ENGINE = """
    INSERT INTO engine_samples (at, agent, engine, dialect, facts)
    VALUES ('2026-11-21 12:00:00+00:00', 'agent-0', 'chat-0', 'vllm', :facts)
"""
_GPU = """
    INSERT INTO gpu_samples (at, agent, gpu, gpu_index, name, facts, mig_instances)
    VALUES ('2026-11-21 12:00:00+00:00', 'agent-0', 'GPU-1', 0, 'NVIDIA H200', :facts, :instances)
"""


@pytest.fixture
def old_database(new_url: str) -> Engine:
    """A database with more samples of the earlier version than are rewritten at once."""
    engine = open_engine(new_url)
    upgrade(engine, "0007")
    facts, instances = json.dumps(_OLD), json.dumps([_INSTANCE])
    with engine.begin() as connection:
        connection.execute(text(_ENGINE), [{"facts": facts}] * 1001 + [{"facts": '{"a": 1.50}'}])
        connection.execute(text(_GPU), {"facts": facts, "instances": instances})
        connection.execute(text(_GPU), {"facts": "{}", "instances": "[]"})
    return engine


def stored(engine: Engine, column: str, table: str) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text(f"SELECT {column} FROM {table} ORDER BY id")).scalars())


def test_facts_of_an_earlier_version_are_carried_over(old_database: Engine) -> None:
    upgrade(old_database)
    *many, last = stored(old_database, "facts", "engine_samples")
    assert last == '{"a": 1.50}'
    assert [facts_from(facts) for facts in many] == [_KNOWN] * 1001
    newest = MinuteStore(old_database, "agent-0").newest_sample("chat-0", _AT)
    assert newest is not None
    (gpu,) = StoreQueries(old_database).newest_gpu_samples(_AT + 60)
    assert gpu["facts"] == {}
    first = StoreQueries(old_database).gpu_samples("GPU-1", 0.0, None, 10).items[-1]
    assert first["facts"] == _OLD
    assert first["mig_instances"] == [_INSTANCE]
    old_database.dispose()


@pytest.mark.parametrize(
    ("facts", "instances"),
    [
        ('{"cut{of', "[]"),
        ('["{", "{"]', "[]"),
        ('{"a{x}": 1.0}', '["{"]'),
        ('{"a{x}": 1.0}', '[{"uuid": "{"}]'),
    ],
)
def test_a_row_that_cannot_be_parsed_stays_as_it_is(
    old_database: Engine, caplog: pytest.LogCaptureFixture, facts: str, instances: str
) -> None:
    with old_database.begin() as connection:
        connection.execute(text(_GPU), {"facts": facts, "instances": instances})
    upgrade(old_database)
    assert stored(old_database, "facts", "gpu_samples")[-1] == facts
    assert facts_from(stored(old_database, "facts", "gpu_samples")[0]) == _KNOWN
    assert "1 rows of gpu_samples cannot be parsed and stay as they are" in caplog.messages
    old_database.dispose()


def test_facts_that_an_earlier_version_stores_after_the_upgrade_are_read(new_url: str) -> None:
    """It keeps running while another agent migrates the database of both."""
    engine = open_engine(new_url)
    upgrade(engine)
    with engine.begin() as connection:
        connection.execute(text(_ENGINE), {"facts": json.dumps(_OLD)})
        instances = json.dumps([_INSTANCE])
        connection.execute(text(_GPU), {"facts": json.dumps(_OLD), "instances": instances})
    store = MinuteStore(engine, "agent-0")
    sample = store.newest_sample("chat-0", _AT)
    assert sample is not None
    assert sample.facts == _KNOWN
    (gpu,) = store.gpu_samples(["GPU-1"], _AT, _AT + 60)
    assert gpu.facts == _KNOWN
    (row,) = StoreQueries(engine).newest_gpu_samples(_AT + 60)
    assert (row["facts"], row["mig_instances"]) == (_OLD, [_INSTANCE])
    engine.dispose()


def test_a_downgrade_converts_facts_for_the_earlier_version(old_database: Engine) -> None:
    tables = (
        ("facts", "engine_samples"),
        ("facts", "gpu_samples"),
        ("mig_instances", "gpu_samples"),
    )
    before = [stored(old_database, *place) for place in tables]
    upgrade(old_database)
    downgrade(old_database, "0007")
    assert [stored(old_database, *place) for place in tables] == before
    old_database.dispose()
