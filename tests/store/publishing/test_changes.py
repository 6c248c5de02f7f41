"""A row that a transaction changes gets its number, and every other row keeps its own."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from sqlalchemy import Engine, select

from agent.catalog.causes import Cause
from agent.records.engine_counts import EngineCounts
from agent.records.minute import RequestCost
from agent.records.objective import JudgedRequest
from agent.store.connection import for_writing, without_number
from agent.store.explanations import ExplanationStore
from agent.store.folding import RollupStore
from agent.store.inserting import key_of
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.publishing.changes import (
    TABLES,
    ChangedRows,
    batch_after,
    file_state,
    set_published,
)
from agent.store.retention import Retention
from agent.store.tables import deleted_requests, requests
from agent.store.transactions import request_amend
from tests.records.minutes import minute
from tests.store.explaining import explain, explained, missed, share
from tests.store.making import NOON, engine_sample, fold, gpu_sample, restart, some, store
from tests.store.test_settling import ENDED, spoil
from tests.store.views import DUE, JUDGE, JoiningAgent, engine_view, proxy_view

DAY_S = 86400

Rows = Mapping[tuple[Any, ...], Mapping[str, Any]]


def last_number(file: Engine) -> int:
    with file.connect() as connection:
        return file_state(connection).last


def all_rows(file: Engine) -> Rows:
    """All rows that are published, by the name and the primary key of each."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    with file.connect() as connection:
        for table in TABLES:
            names = [column.name for column in table.primary_key]
            for row in connection.execute(select(table)).mappings():
                found[table.name, *(row[name] for name in names)] = {**row}
    return found


def without_numbers(rows: Rows) -> Rows:
    return {key: {**row, "changed": None} for key, row in rows.items()}


def numbered_by(file: Engine, write: Callable[[], object]) -> dict[str, int]:
    """How many rows of each table got new numbers; the rows that changed are among them."""
    before, last = all_rows(file), last_number(file)
    write()
    after = all_rows(file)
    content_before, content_after = without_numbers(before), without_numbers(after)
    changed = {key for key in after if content_before.get(key) != content_after[key]}
    numbers = {key: row["changed"] for key, row in after.items()}
    new = {key for key, number in numbers.items() if number > last}
    assert changed <= new
    assert all(numbers[key] == before[key]["changed"] for key in after.keys() - new)
    assert max(numbers.values(), default=0) <= last_number(file)
    return dict(Counter(key[0] for key in new))


# A settled view of each kind, views that wait, and requests with and without an explanation.
SETTLED = [proxy_view(1), engine_view(2), engine_view(3), engine_view(3, 1), proxy_view(4)]
WAITING = [proxy_view(5), engine_view(6), proxy_view(7)]
EXPLAINED, MISSED = missed(10), missed(11)
UNREADABLE, UNREADABLE_WAITING = missed(12), proxy_view(8)
SAMPLE = engine_sample(NOON)
COUNTS = EngineCounts(covered_s=5.0)
RESTART = restart(NOON)
COST = RequestCost(row=1, vantage="engine", complete=True, cost_usd=0.5)


@pytest.fixture
def full(file: Engine) -> Engine:
    """A file with rows of every table."""
    store(file, [*some(range(100, 103)), EXPLAINED, MISSED, UNREADABLE])
    explain(file, explained(EXPLAINED, share(Cause.BURST, 0.5)))
    agent = JoiningAgent(file)
    agent.take(*SETTLED)
    agent.settle(DUE)
    explain(file, explained(SETTLED[0], share(Cause.KV_PRESSURE, 0.25)))
    agent.take(*WAITING, UNREADABLE_WAITING)
    observations = ObservationStore(file, "agent-0")
    observations.write_engine_sample(SAMPLE, COUNTS)
    observations.write_gpu_samples([gpu_sample(NOON)])
    observations.write_event(RESTART)
    MinuteStore(file, "agent-0").write([minute()], (), NOON)
    fold(file)
    assert {key[0] for key in all_rows(file)} == {table.name for table in TABLES}
    return file


Write = Callable[[Engine], object]


def _take(*views: JudgedRequest) -> Write:
    return lambda file: JoiningAgent(file).take(*views)


def _amend(view: JudgedRequest) -> Write:
    return lambda file: request_amend(file, JUDGE)({key_of(view): ENDED}, ())


def _supersede(*views: JudgedRequest) -> Write:
    return lambda file: request_amend(file, JUDGE)({}, [key_of(view) for view in views])


def _explain(judged: JudgedRequest, cause: Cause) -> Write:
    return lambda file: explain(file, explained(judged, share(cause, 0.75)))


def _write_minute(*costs: RequestCost, **given: Any) -> Write:
    minutes = [minute(**given)] if given else []
    return lambda file: MinuteStore(file, "agent-0").write(minutes, costs, NOON)


def _observe(name: str, *what: Any) -> Write:
    return lambda file: getattr(ObservationStore(file, "agent-0"), name)(*what)


# Rollups of one request: one of each width, and of hours and days one of all lengths together.
OF_A_REQUEST = 4 + 2
# Sums of one cause: of each width one of the objective `chat`, and one of all objectives together.
OF_A_CAUSE = 2 * 4

WRITES: dict[str, tuple[Write, dict[str, int]]] = {
    "new requests": (lambda file: store(file, some([200, 201])), {"requests": 2}),
    "requests that are stored already": (lambda file: store(file, some(range(100, 103))), {}),
    "a view that waits": (_take(proxy_view(20)), {"requests": 1}),
    "settling": (lambda file: JoiningAgent(file).settle(DUE), {"requests": 4}),
    "a join in time": (_take(engine_view(5)), {"requests": 1}),
    "a join of an engine's row": (_take(proxy_view(6)), {"requests": 1}),
    "a late join of an explained request": (
        _take(engine_view(1)),
        {"requests": 1, "cause_rollups": OF_A_CAUSE},
    ),
    "a join with a part": (_take(proxy_view(3)), {"requests": 2}),
    "figures of an ended request": (_amend(SETTLED[1]), {"requests": 1}),
    "superseded requests": (_supersede(SETTLED[3], WAITING[0]), {}),
    "a cost": (_write_minute(COST), {"requests": 1}),
    "an explanation": (
        # Its sums have another request already.
        _explain(MISSED, Cause.BURST),
        {"requests": 1, "cause_rollups": OF_A_CAUSE},
    ),
    "another explanation": (
        _explain(EXPLAINED, Cause.LONG_PROMPT),
        {"requests": 1, "cause_rollups": 2 * OF_A_CAUSE},
    ),
    "a minute": (_write_minute(requests=7), {"engine_minutes": 1}),
    "an event": (_observe("write_event", RESTART), {"events": 1}),
    "a sample of an engine": (_observe("write_engine_sample", SAMPLE), {"engine_samples": 1}),
    "counts of an engine": (
        _observe("write_engine_sample", SAMPLE, COUNTS),
        {"engine_samples": 1, "engine_counts": 3},
    ),
    "samples of GPUs": (
        _observe("write_gpu_samples", [gpu_sample(NOON), gpu_sample(NOON, "GPU-2")]),
        {"gpu_samples": 2},
    ),
}


@pytest.mark.parametrize(("write", "numbered"), WRITES.values(), ids=WRITES)
def test_a_write_numbers_the_rows_that_it_changes_and_no_others(
    full: Engine, write: Write, numbered: dict[str, int]
) -> None:
    assert numbered_by(full, lambda: write(full)) == numbered


def test_rows_that_expire_are_no_change(full: Engine) -> None:
    """A shared database keeps its rows for as long as its own settings say."""
    last, before = last_number(full), all_rows(full)
    Retention(full).expire(NOON + 60, NOON, NOON + DAY_S)
    assert all_rows(full).items() < before.items()
    assert batches(full, last) == []


def test_jobs_that_find_nothing_to_do_write_nothing(file: Engine) -> None:
    """Else the disk and the shared database of an idle agent would be busy with nothing."""
    last = last_number(file)
    assert JoiningAgent(file).settle(DUE) == []
    assert fold(file) == 0
    assert last_number(file) == last


def test_a_fold_numbers_the_rollups_of_its_requests(full: Engine) -> None:
    # Its day has requests already.
    store(full, some([200], ended_at=NOON + 3600.0))
    assert numbered_by(full, lambda: fold(full)) == {"rollups": OF_A_REQUEST}
    assert numbered_by(full, lambda: fold(full)) == {}


def test_a_rebuild_numbers_all_sums_of_its_days(full: Engine) -> None:
    store(full, some([200], ended_at=NOON + 2.0 * DAY_S))
    fold(full)
    sums = [key for key in all_rows(full) if key[0] in ("rollups", "cause_rollups")]
    other_day = [key for key in sums if key[3] > NOON + DAY_S]
    day = NOON // DAY_S * DAY_S
    numbered = numbered_by(full, lambda: RollupStore(full, "agent-0").rebuild(day, day + DAY_S))
    assert sum(numbered.values()) == len(sums) - len(other_day)
    assert len(other_day) == OF_A_REQUEST


def test_a_row_that_cannot_be_read_is_numbered_when_it_is_set_aside(full: Engine) -> None:
    spoil(full, "verdicts = 'no JSON'", UNREADABLE.record.span_id)
    keeper = ExplanationStore(full, "agent-0")
    assert numbered_by(full, lambda: keeper.unexplained(NOON, NOON + 60)) == {"requests": 1}
    spoil(full, "verdicts = 'no JSON'", UNREADABLE_WAITING.record.span_id)
    # The other three are settled.
    assert numbered_by(full, lambda: JoiningAgent(full).settle(DUE)) == {"requests": 4}


def numbers_of_requests(file: Engine, after: int) -> list[int]:
    """How many requests have each number after one."""
    with file.connect() as connection:
        found = connection.execute(select(requests.c.changed).order_by(requests.c.changed))
        return [*Counter(number for (number,) in found if number > after).values()]


def test_a_transaction_of_many_rows_has_a_number_for_each_500(file: Engine) -> None:
    store(file, some(range(1100)))
    assert numbers_of_requests(file, 0) == [500, 500, 100]
    last = last_number(file)
    costs = (RequestCost(row, "engine", complete=True, cost_usd=0.5) for row in range(1, 1101))
    MinuteStore(file, "agent-0").write((), costs, NOON)
    assert numbers_of_requests(file, last) == [500, 500, 100]


# Deleted and moved requests


def deleted_in(file: Engine) -> list[tuple[str, float]]:
    """The span and start of each request that the shared database may have and must not keep."""
    query = select(deleted_requests.c.span_id, deleted_requests.c.started_at)
    with file.connect() as connection:
        return sorted((span_id, at) for span_id, at in connection.execute(query))


def places(*views: JudgedRequest) -> list[tuple[str, float]]:
    return sorted((view.record.span_id, view.record.started_at) for view in views)


@pytest.mark.parametrize(
    ("write", "deleted"),
    [
        (_take(engine_view(1)), [proxy_view(1)]),
        # The joined row begins with the proxy's view.
        (_take(proxy_view(2)), [engine_view(2)]),
        (_take(engine_view(2, started_at=NOON + 1.0)), []),
        (_take(engine_view(5)), []),
        (_take(proxy_view(6)), []),
        (_supersede(proxy_view(4)), [proxy_view(4)]),
        (_supersede(proxy_view(5)), []),
    ],
    ids=[
        "a settled proxy's row is joined",
        "a settled engine's row moves",
        "a row that is sent again",
        "a waiting proxy's row is joined",
        "a waiting engine's row moves",
        "a settled row is superseded",
        "a waiting row is superseded",
    ],
)
def test_what_goes_or_moves_is_deleted_in_the_shared_database_if_it_was_settled(
    full: Engine, write: Write, deleted: list[JudgedRequest]
) -> None:
    last = last_number(full)
    write(full)
    assert deleted_in(full) == places(*deleted)
    (batch,) = batches(full, last)
    assert [span_id for _, span_id, _ in batch["deleted"]] == [
        view.record.span_id for view in deleted
    ]


def test_a_request_that_was_deleted_and_is_sent_again_is_not_deleted(full: Engine) -> None:
    last = last_number(full)
    _supersede(SETTLED[4])(full)
    JoiningAgent(full, wait_s=None).take(SETTLED[4])
    (batch,) = batches(full, last)
    assert deleted_in(full) == places(SETTLED[4])
    assert batch["deleted"] == []
    assert len(batch["requests"]) == 1


def test_what_is_deleted_there_is_forgotten(full: Engine) -> None:
    _supersede(SETTLED[4])(full)
    last = last_number(full)
    _supersede(SETTLED[0])(full)
    with without_number(for_writing(full)).begin() as connection:
        set_published(connection, last, NOON)
    assert deleted_in(full) == places(SETTLED[0])


# Batches


def batches(file: Engine, after: int, most: int = 10**6) -> list[dict[str, Any]]:
    """The rows of each batch by table, what is deleted, and whether it is the newest."""
    found = []
    with file.connect() as connection:
        while (batch := batch_after(connection, after, most)) is not None:
            found.append(_content(batch))
            assert after == batch.after < batch.last
            after = batch.last
    return found


def _content(batch: ChangedRows) -> dict[str, Any]:
    rows = {table.name: batch.rows(table) for table in TABLES}
    return {**rows, "deleted": batch.deleted(), "is_newest": batch.is_newest}


def test_batches_have_every_row_once_and_end_with_a_transaction(full: Engine) -> None:
    (whole,) = batches(full, 0)
    parts = batches(full, 0, most=3)
    assert len(parts) > 4
    for table in TABLES:
        assert [row for part in parts for row in part[table.name]] == whole[table.name]
        of_numbers = [{row[-1] for row in part[table.name]} for part in parts]
        assert sum(map(len, of_numbers)) == len({row[-1] for row in whole[table.name]})
    assert [part["is_newest"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert batches(full, last_number(full)) == []


def test_a_batch_ends_with_the_transaction_that_brings_it_to_its_number_of_rows(
    file: Engine,
) -> None:
    for number in range(7):
        store(file, some([number]))
    store(file, some(range(10, 16)))
    assert [len(each["requests"]) for each in batches(file, 0, most=3)] == [3, 3, 7]


def test_a_batch_has_no_view_that_waits(full: Engine) -> None:
    (whole,) = batches(full, 0)
    at = [column.name for column in requests.c].index("span_id")
    spans = {row[at] for row in whole["requests"]}
    assert spans >= {view.record.span_id for view in SETTLED}
    assert spans & {view.record.span_id for view in WAITING} == set()
    last = last_number(full)
    JoiningAgent(full).settle(DUE)
    (settled,) = batches(full, last)
    assert {row[at] for row in settled["requests"]} >= {view.record.span_id for view in WAITING}
