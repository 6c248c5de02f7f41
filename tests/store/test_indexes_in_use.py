"""Neither a write to SQLite nor a page of PostgreSQL reads a whole table."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text

from agent.catalog.causes import Cause
from agent.records.minute import RequestCost
from agent.records.queries import Cursor, RequestFilter, Selection, Window
from agent.store.connection import for_writing, without_number
from agent.store.explanations import ExplanationStore
from agent.store.minutes import MinuteStore
from agent.store.publishing.changes import TABLES, batch_after, lag_of, set_published
from agent.store.store_queries import StoreQueries
from agent.store.transactions import Joining, request_amend, request_write
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share
from tests.store.making import NOON, fold, store
from tests.store.test_settling import ENDED
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view

# Tables that grow with requests, and the parts of plans that read all of them or of one width.
GROWING = "requests|rollups|cause_rollups|engine_minutes|engine_samples|gpu_samples|events"
READS_ALL = re.compile(
    rf"SCAN ({GROWING})\b|SEARCH (rollups|cause_rollups) USING .*\(width_s=\?\)$"
)

Ran = list[tuple[str, Any]]


@contextmanager
def listening(engine: Engine) -> Iterator[Ran]:
    """The statements that run meanwhile, each with its first parameters."""
    ran: Ran = []

    def note(*given: Any) -> None:
        _connection, _cursor, statement, parameters, _context, many = given
        ran.append((statement, parameters[0] if many else parameters))

    event.listen(engine, "before_cursor_execute", note)
    yield ran
    event.remove(engine, "before_cursor_execute", note)


def plans_that_read_all(engine: Engine, ran: Sequence[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Of these statements, those whose plan reads a whole growing table."""
    found = []
    with engine.connect() as connection:
        for statement, parameters in ran:
            if statement.split(maxsplit=1)[0] not in ("SELECT", "UPDATE", "DELETE", "INSERT"):
                continue
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
            found += [(row[3], statement) for row in plan if READS_ALL.search(row[3])]
    return found


def store_and_join(engine: Engine) -> None:
    agent = JoiningAgent(engine)
    agent.take(proxy_view(1), proxy_view(2), engine_view(2))
    agent.take(engine_view(1))
    agent.settle(DUE)


def attach_hops(engine: Engine) -> None:
    joining = Joining(judge=JUDGE, wait_s=None, prefilling=("prefill-0",))
    hop, request = engine_view(1, 1, engine="prefill-0"), engine_view(1, 2)
    request_write(engine, joining)([hop, request])


def explain_and_replace(engine: Engine) -> None:
    items = [missed(n) for n in range(3)]
    store(engine, items)
    assert len(ExplanationStore(engine, "agent-0").unexplained(NOON, NOON + 60)) == 3
    explain(engine, *(explained(item, share(Cause.BURST, 0.5)) for item in items))
    explain(engine, *(explained(item, share(Cause.KV_PRESSURE, 0.5)) for item in items))


def fold_twice(engine: Engine) -> None:
    for part in range(2):
        store(engine, [missed(10 * part + n) for n in range(3)])
        fold(engine)


def amend(engine: Engine) -> None:
    views = [engine_view(number, parent_span_id=None) for number in range(4)]
    JoiningAgent(engine).take(*views)
    keys = [(view.record.trace_id, view.record.span_id) for view in views]
    request_amend(engine, JUDGE)(dict.fromkeys(keys[:2], ENDED), keys[2:])


def minutes_and_costs(engine: Engine) -> None:
    store(engine, [missed(1)])
    cost = RequestCost(row=1, vantage="engine", cost_usd=1.0, complete=True)
    MinuteStore(engine, "agent-0").write([minute()], [cost], NOON)


def publish(engine: Engine) -> None:
    store(engine, [missed(n) for n in range(3)])
    fold(engine)
    with engine.connect() as connection:
        batch = batch_after(connection, 0, 2)
        assert batch is not None
        for table in TABLES:
            batch.rows(table)
        batch.deleted()
        batch.series()
        assert lag_of(connection).rows > 0
    with without_number(for_writing(engine)).begin() as connection:
        set_published(connection, batch.last, NOON)


@pytest.mark.parametrize(
    "work",
    [
        *(store_and_join, attach_hops, explain_and_replace, fold_twice, amend),
        *(minutes_and_costs, publish),
    ],
    ids=lambda w: w.__name__,
)
def test_no_write_reads_a_whole_table(file: Engine, work: Callable[[Engine], None]) -> None:
    with listening(file) as ran:
        work(file)
    assert any("requests" in statement for statement, _ in ran)
    assert plans_that_read_all(file, ran) == []


# With this many rows PostgreSQL prefers an index to a sequential scan.
MANY_SAMPLES = """
    INSERT INTO gpu_samples (at, agent, gpu, gpu_index, name, facts, mig_instances, changed)
    SELECT to_timestamp(:noon + n / 4), 'agent-0', 'GPU-' || n % 4, 0, 'NVIDIA H200', '{}', '[]', 1
    FROM generate_series(1, 50000) AS n
"""


def test_no_chart_over_time_reads_a_whole_table(file: Engine) -> None:
    window = Window(from_s=int(NOON), until=NOON + 60)
    with listening(file) as ran:
        queries = StoreQueries(file)
        queries.phases(window, Selection(), 10)
        queries.phases(window, Selection(), 1_000_000)
        queries.gpu_use(NOON, NOON + 60, None)
    for table in ("requests", "gpu_samples"):
        assert any(f"FROM {table}" in statement for statement, _ in ran), table
    assert plans_that_read_all(file, ran) == []


@pytest.mark.parametrize("session", ["s-1", None])
def test_the_turns_of_sessions_are_found_by_the_rows_that_have_one(
    file: Engine, session: str | None
) -> None:
    with listening(file) as ran:
        StoreQueries(file).session_turns(Selection(), NOON, NOON + 60, session)
    ((statement, given),) = (each for each in ran if "FROM requests" in each[0])
    with file.connect() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", given).all()
    index = "session_started_at" if session else "started_at"
    assert any(f"USING INDEX ix_requests_{index} (" in row[3] for row in plan), plan


def plan_of(postgres: Engine, query: Callable[[StoreQueries], object], *without: str) -> list[str]:
    """PostgreSQL's plan of the query, with the plan nodes of `without` disabled."""
    with listening(postgres) as ran:
        query(StoreQueries(postgres))
    ((statement, given),) = ran
    with postgres.connect() as connection:
        for node in without:
            connection.execute(text(f"SET enable_{node} = off"))
        rows = connection.exec_driver_sql(f"EXPLAIN {statement}", given)
        return [row[0].strip() for row in rows]


def test_the_newest_samples_of_gpus_are_found_without_reading_all(postgres: Engine) -> None:
    with postgres.begin() as connection:
        connection.execute(text(MANY_SAMPLES), {"noon": NOON})
        connection.execute(text("ANALYZE gpu_samples"))
    plan = plan_of(postgres, lambda queries: queries.newest_gpu_samples(NOON))
    # The other partitions are empty.
    assert not any("Seq Scan on gpu_samples_other_days" in line for line in plan), plan


@pytest.mark.parametrize(
    ("query", "found_by"),
    [
        (
            lambda queries: queries.requests(RequestFilter(), Cursor(NOON, 5), 10),
            ["(ROW(started_at, id) < "],
        ),
        (
            lambda queries: queries.gpu_samples("GPU-1", NOON, NOON + 90, Cursor(NOON + 60, 5), 10),
            ["(gpu)", "(ROW(at, id) < "],
        ),
    ],
    ids=["requests", "samples of a GPU"],
)
def test_a_deep_page_is_found_by_one_index_condition(
    postgres: Engine, query: Callable[[StoreQueries], object], found_by: list[str]
) -> None:
    # PostgreSQL uses these plan nodes for a table of few rows.
    plan = plan_of(postgres, query, "seqscan", "bitmapscan", "sort", "incremental_sort")
    partitions = [line for line in plan if line.startswith("->  Index Scan")]
    conditions = [line for line in plan if line.startswith("Index Cond")]
    assert len(conditions) == len(partitions) >= 1, plan
    assert all(part in each for part in found_by for each in conditions), plan
    assert not any(line.startswith(("Filter", "->  Sort")) for line in plan), plan
