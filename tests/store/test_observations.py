"""Samples and events: what an agent stores of them, and the queries of samples of GPUs."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, select

from agent.errors import StoreUnavailable
from agent.records.gpu import Facts, GpuSample
from agent.store.facts import facts_by_text, facts_from, facts_json
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.store_queries import StoreQueries
from agent.store.tables import engine_samples
from tests.records.making import MIG_INSTANCE, MIG_INSTANCE_ROW
from tests.store.making import NOON, engine_sample, gpu_sample, pages, publish, restart


def test_a_number_that_json_cannot_hold_is_unknown(sqlite: Engine) -> None:
    """Expositions contain NaN, and the stored facts must be valid JSON for every reader."""
    odd = {"a": float("nan"), "b": float("-inf"), "c": 1.5}
    ObservationStore(sqlite, "agent-0").write_event(restart(NOON, evidence=odd))
    facts: dict[tuple[str, tuple[str, ...]], float] = {(name, ()): odd[name] for name in odd}
    ObservationStore(sqlite, "agent-0").write_engine_sample(engine_sample(NOON, facts=facts))
    expected = {"a": None, "b": None, "c": 1.5}
    with sqlite.connect() as connection:
        assert json.loads(connection.scalars(select(engine_samples.c.facts)).one()) == expected
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


MICROSECOND = 1e-6


@pytest.fixture
def observations(sqlite: Engine) -> ObservationStore:
    return ObservationStore(sqlite, "agent-0")


def store_samples(database: Engine, samples: Sequence[GpuSample], agent: str = "agent-0") -> None:
    publish(database, lambda file: ObservationStore(file, agent).write_gpu_samples(samples))


def test_a_sample_is_read_as_it_was_written(database: Engine, queries: StoreQueries) -> None:
    facts = {("gpu_power_watts", ()): 312.5, ("gpu_clock_hertz", ("sm",)): 1.98e9}
    store_samples(
        database,
        [
            gpu_sample(
                NOON + 0.123456,
                index=3,
                facts=facts,
                processes={4242: 5_000_000_000, 17: None},
                mig_instances=(MIG_INSTANCE,),
                problem="gpu_lost",
            )
        ],
    )
    (row,) = queries.newest_gpu_samples(NOON + 60)
    assert {name: row[name] for name in row if name not in ("id", "changed")} == {
        "at": NOON + 0.123456,
        "agent": "agent-0",
        "gpu": "GPU-1",
        "gpu_index": 3,
        "name": "NVIDIA H200",
        "problem": "gpu_lost",
        "facts": {"gpu_power_watts": 312.5, "gpu_clock_hertz{sm}": 1.98e9},
        "processes": [
            {"pid": 4242, "memory_bytes": 5_000_000_000},
            {"pid": 17, "memory_bytes": None},
        ],
        "mig_instances": [MIG_INSTANCE_ROW],
    }


def test_no_process_differs_from_unknown_processes(database: Engine, queries: StoreQueries) -> None:
    store_samples(
        database,
        [gpu_sample(NOON, "GPU-1", processes=None), gpu_sample(NOON, "GPU-2", processes={})],
    )
    unknown, none = queries.newest_gpu_samples(NOON + 60)
    assert (unknown["processes"], none["processes"]) == (None, [])
    assert (unknown["problem"], unknown["facts"], unknown["mig_instances"]) == (None, {}, [])


def test_samples_are_stored_together_or_not_at_all(
    observations: ObservationStore, sqlite: Engine
) -> None:
    bad: Any = gpu_sample(NOON, "GPU-2", name=None)
    with pytest.raises(StoreUnavailable):
        observations.write_gpu_samples([gpu_sample(NOON, "GPU-1"), bad])
    observations.write_gpu_samples([])
    assert StoreQueries(sqlite).newest_gpu_samples(NOON + 60) == []
    observations.write_gpu_samples([gpu_sample(NOON, f"GPU-{n}") for n in range(8)])
    assert len(StoreQueries(sqlite).newest_gpu_samples(NOON + 60)) == 8


def test_the_newest_sample_of_each_gpu_is_found_for_every_agent(
    database: Engine, queries: StoreQueries
) -> None:
    """Sorted by agent and index, the usual order; two agents may read one GPU."""
    for at in (2.0, 3.0, 1.0):
        store_samples(
            database,
            [gpu_sample(NOON + at, "GPU-b", index=0), gpu_sample(NOON + at, "GPU-a", index=1)],
        )
    of_other = [gpu_sample(NOON + 0.5, "GPU-c"), gpu_sample(NOON + 9, "GPU-shared")]
    store_samples(database, of_other, "agent-1")
    store_samples(database, [gpu_sample(NOON + 8, "GPU-shared", index=2)])
    expected = [
        (row["agent"], row["gpu"], row["at"] - NOON)
        for row in queries.newest_gpu_samples(NOON + 60)
    ]
    assert expected == [
        ("agent-0", "GPU-b", 3.0),
        ("agent-0", "GPU-a", 3.0),
        ("agent-1", "GPU-c", 0.5),
        ("agent-1", "GPU-shared", 9.0),
    ]


def test_of_samples_of_one_time_the_last_stored_is_the_newest(
    database: Engine, queries: StoreQueries
) -> None:
    for index in (5, 7, 6):
        store_samples(database, [gpu_sample(NOON, index=index)])
    assert [row["gpu_index"] for row in queries.newest_gpu_samples(NOON + 60)] == [6]


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 100])
def test_the_samples_of_a_gpu_come_newest_first_page_by_page(
    database: Engine, queries: StoreQueries, limit: int
) -> None:
    """The window includes its start and its end, and other GPUs are left out."""
    for at in (-1.0, -MICROSECOND, 0.0, 1.0, 1.0, 3.0, 2.0, 4.0, 4.0 + MICROSECOND):
        store_samples(
            database, [gpu_sample(NOON + at, gpu) for gpu in ("GPU-0", "GPU-1", "GPU-10")]
        )
    until = NOON + 4.0
    read = list(pages(lambda cursor: queries.gpu_samples("GPU-1", NOON, until, cursor, limit)))
    rows = [row for page in read for row in page.items]
    assert [row["at"] - NOON for row in rows] == [4.0, 3.0, 2.0, 1.0, 1.0, 0.0]
    assert {row["gpu"] for row in rows} == {"GPU-1"}
    assert len({row["id"] for row in rows}) == 6
    assert {len(page.items) for page in read[:-1]} <= {limit}


def test_a_gpu_is_known_as_long_as_a_sample_is_stored(
    database: Engine, queries: StoreQueries
) -> None:
    store_samples(database, [gpu_sample(NOON)])
    assert queries.knows_gpu("GPU-1")
    assert not queries.knows_gpu("GPU-")
    Retention(database).expire(NOON + 86400, NOON, NOON)
    assert not queries.knows_gpu("GPU-1")


def test_gpus_read_before_are_those_that_this_agent_read_without_a_problem(
    observations: ObservationStore, sqlite: Engine
) -> None:
    observations.write_gpu_samples(
        [
            gpu_sample(NOON, "GPU-1", index=1),
            gpu_sample(NOON + 60, "GPU-1", index=2, name="NVIDIA H100"),
            gpu_sample(NOON + 120, "GPU-1", index=2, problem="gpu_lost"),
            gpu_sample(NOON, "GPU-2"),
            gpu_sample(NOON + 60, "GPU-3", problem="gpu_lost"),
        ]
    )
    ObservationStore(sqlite, "agent-1").write_gpu_samples([gpu_sample(NOON + 60, "GPU-4")])
    (known,) = observations.gpus_read_since(NOON + 1)
    assert (known.gpu, known.index, known.name) == ("GPU-1", 2, "NVIDIA H100")
    assert (known.at, known.problem) == (NOON + 60, None)
    assert [sample.gpu for sample in observations.gpus_read_since(NOON)] == ["GPU-1", "GPU-2"]


def test_a_sample_from_before_the_clock_was_set_back_is_not_the_newest(
    database: Engine, queries: StoreQueries
) -> None:
    store_samples(database, [gpu_sample(NOON + 3600, "GPU-1"), gpu_sample(NOON + 3600, "GPU-2")])
    store_samples(database, [gpu_sample(NOON, "GPU-1", problem="gpu_lost")])
    expected = {row["gpu"]: row["problem"] for row in queries.newest_gpu_samples(NOON + 1)}
    assert expected == {"GPU-1": "gpu_lost", "GPU-2": None}
