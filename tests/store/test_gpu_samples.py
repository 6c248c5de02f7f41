"""GPU samples: how they are stored and queried."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from agent.errors import StoreUnavailable
from agent.records.gpu import GpuSample
from agent.records.queries import Cursor, PageOf
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.store_queries import Row, StoreQueries
from tests.records.making import MIG_INSTANCE, MIG_INSTANCE_ROW
from tests.store.making import NOON, gpu_sample, publish

MICROSECOND = 1e-6

# With this many rows PostgreSQL prefers an index to a sequential scan.
MANY_ROWS = """
    INSERT INTO gpu_samples (at, agent, gpu, gpu_index, name, facts, mig_instances, changed)
    SELECT to_timestamp(:noon + n / 4), 'agent-0', 'GPU-' || n % 4, 0, 'NVIDIA H200', '{}', '[]', 1
    FROM generate_series(1, 50000) AS n
"""


@pytest.fixture
def observations(sqlite: Engine) -> ObservationStore:
    """The store of an agent's samples and events."""
    return ObservationStore(sqlite, "agent-0")


def store_samples(database: Engine, samples: Sequence[GpuSample], agent: str = "agent-0") -> None:
    """Store samples of an agent in a database of either kind."""
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
    assert StoreQueries(sqlite).newest_gpu_samples(NOON + 60) == []
    observations.write_gpu_samples([gpu_sample(NOON, f"GPU-{n}") for n in range(8)])
    assert len(StoreQueries(sqlite).newest_gpu_samples(NOON + 60)) == 8


def test_a_poll_that_read_nothing_stores_nothing(
    observations: ObservationStore, sqlite: Engine
) -> None:
    observations.write_gpu_samples([])
    assert StoreQueries(sqlite).newest_gpu_samples(NOON + 60) == []


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


def pages(queries: StoreQueries, since: float, limit: int) -> Iterator[PageOf[Row]]:
    """Every page of one GPU's samples."""
    page = queries.gpu_samples("GPU-1", since, None, limit)
    yield page
    while page.next is not None:
        page = queries.gpu_samples("GPU-1", since, page.next, limit)
        yield page


@pytest.mark.parametrize("limit", [1, 4, 6, 7, 100])
def test_the_samples_of_a_gpu_come_newest_first_page_by_page(
    database: Engine, queries: StoreQueries, limit: int
) -> None:
    """The window includes its start, and other GPUs are left out."""
    for at in (-1.0, -MICROSECOND, 0.0, 1.0, 1.0, 3.0, 2.0, 4.0):
        store_samples(
            database, [gpu_sample(NOON + at, gpu) for gpu in ("GPU-0", "GPU-1", "GPU-10")]
        )
    read = list(pages(queries, NOON, limit))
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


def test_a_database_without_samples_knows_no_gpus(observations: ObservationStore) -> None:
    assert observations.gpus_read_since(0.0) == []


def plan_of(
    engine: Engine, query: Callable[[], object], *, without: Sequence[str] = ()
) -> list[str]:
    """PostgreSQL's plan of the query, with the plan nodes of `without` disabled."""
    statements: list[tuple[str, Any]] = []

    def listen(_c: object, _cursor: object, statement: str, given: object, *_rest: object) -> None:
        statements.append((statement, given))

    event.listen(engine, "before_cursor_execute", listen)
    query()
    event.remove(engine, "before_cursor_execute", listen)
    ((statement, given),) = statements
    with engine.connect() as connection:
        for node in without:
            connection.execute(text(f"SET enable_{node} = off"))
        rows = connection.exec_driver_sql(f"EXPLAIN {statement}", given)
        return [row[0].strip() for row in rows]


@pytest.fixture
def many(postgres: Engine) -> Engine:
    """A database with many samples of few GPUs and fresh statistics."""
    with postgres.begin() as connection:
        connection.execute(text(MANY_ROWS), {"noon": NOON})
        connection.execute(text("ANALYZE gpu_samples"))
    return postgres


def test_the_newest_samples_are_found_without_reading_all(many: Engine) -> None:
    plan = plan_of(many, lambda: StoreQueries(many).newest_gpu_samples(NOON))
    # The other partitions are empty.
    assert not any("Seq Scan on gpu_samples_other_days" in line for line in plan), plan


def test_a_deep_page_is_found_by_one_index_condition(postgres: Engine) -> None:
    def query() -> object:
        return StoreQueries(postgres).gpu_samples("GPU-1", NOON, Cursor(NOON + 60, 5), 10)

    # PostgreSQL uses these plan nodes for a table of few rows.
    plan = plan_of(postgres, query, without=("seqscan", "bitmapscan", "sort", "incremental_sort"))
    partitions = [line for line in plan if line.startswith("->  Index Scan")]
    conditions = [line for line in plan if line.startswith("Index Cond")]
    assert len(conditions) == len(partitions) >= 1, plan
    assert all("(gpu)" in each and "(ROW(at, id) < " in each for each in conditions), plan
    assert not any(line.startswith(("Filter", "->  Sort")) for line in plan), plan


def test_a_sample_from_before_the_clock_was_set_back_is_not_the_newest(
    database: Engine, queries: StoreQueries
) -> None:
    store_samples(database, [gpu_sample(NOON + 3600, "GPU-1"), gpu_sample(NOON + 3600, "GPU-2")])
    store_samples(database, [gpu_sample(NOON, "GPU-1", problem="gpu_lost")])
    expected = {row["gpu"]: row["problem"] for row in queries.newest_gpu_samples(NOON + 1)}
    assert expected == {"GPU-1": "gpu_lost", "GPU-2": None}
