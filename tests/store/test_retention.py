import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, event, func, select

from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.store import retention
from agent.store.objectives import ObjectiveStore
from agent.store.observations import ObservationStore
from agent.store.retention import Retention
from agent.store.rollups import KEEP_S
from agent.store.store_queries import StoreQueries
from agent.store.tables import metadata
from tests.records.making import objective
from tests.store.making import (
    NOON,
    counted_rollups,
    counted_rows,
    fold,
    gpu_sample,
    keys_of,
    request,
    rollup_bytes,
    some,
    store,
    stored_keys,
)

DAY_S = 86400


def sample(at: float) -> EngineSample:
    """A reading at that moment."""
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model=None, facts={})


def restart(at: float) -> Event:
    """An event at that moment."""
    return Event(at=at, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)


def counts(engine: Engine) -> dict[str, int]:
    """How many rows each table has."""
    with engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
        }


@contextmanager
def commits_of(engine: Engine) -> Iterator[list[str]]:
    """How many transactions are committed inside."""
    seen: list[str] = []

    def listen(_connection: object) -> None:
        seen.append("commit")

    event.listen(engine, "commit", listen)
    yield seen
    event.remove(engine, "commit", listen)


def test_old_rows_go_and_young_ones_stay(database: Engine) -> None:
    border = NOON - 7 * DAY_S
    moments = (border - 1000, border - 1e-6, border, border + 1e-6, NOON)
    store(database, [request(n, started_at=at) for n, at in enumerate(moments)])
    for at in moments:
        ObservationStore(database, "agent-0").write_engine_sample(sample(at))
    ObservationStore(database, "agent-0").write_gpu_samples([gpu_sample(at) for at in moments])
    gone = Retention(database).expire(requests_before=border, rollups_before=border - 1e9, now=NOON)
    assert gone == 6
    assert stored_keys(database) == keys_of(some([2, 3, 4]))
    assert counts(database)["engine_samples"] == counts(database)["gpu_samples"] == 3


def test_nothing_else_goes(database: Engine) -> None:
    objectives = ObjectiveStore(database, "agent-0")
    objectives.write_in_force([objective("chat")], NOON - 500 * DAY_S)
    objectives.write_in_force([objective("chat", ttft_s=1.0)], NOON - 450 * DAY_S)
    store(database, some(range(3), started_at=NOON, ended_at=NOON))
    ObservationStore(database, "agent-0").write_engine_sample(sample(NOON))
    ObservationStore(database, "agent-0").write_gpu_samples([gpu_sample(NOON)])
    ObservationStore(database, "agent-0").write_event(restart(NOON))
    before = counts(database)
    assert Retention(database).expire(NOON, NOON, NOON) == 0
    assert counts(database) == before


def test_many_old_rows_go_slice_by_slice_so_that_the_writer_gets_its_turns(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_SLICE", 3)
    store(database, some(range(10)))
    store(database, some([100], started_at=NOON + 60))
    fold(database)
    with commits_of(database) as commits:
        assert Retention(database).expire(NOON + 60, 0, NOON + 60) == 10
    # Three full slices and the rest; one for each other table or width of rollup; series.
    assert len(commits) == 4 + 7 + 2
    assert stored_keys(database) == keys_of(some([100]))


def test_a_full_last_slice_is_no_reason_to_go_on_for_ever(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_PER_SLICE", 5)
    store(database, some(range(10)))
    assert Retention(database).expire(NOON + 60, 0, NOON + 60) == 10


def test_rollups_outlive_the_rows_that_they_count(database: Engine, queries: StoreQueries) -> None:
    store(database, some(range(3)))
    before = rollup_bytes(database)
    Retention(database).expire(
        requests_before=NOON + 60, rollups_before=NOON - 400 * DAY_S, now=NOON + 60
    )
    assert counted_rows(database) == {}
    assert rollup_bytes(database) == before


def test_rollups_go_the_sooner_the_narrower_they_are(database: Engine) -> None:
    kept_s = {**KEEP_S, DAY_S: 400 * DAY_S}
    starts = {
        width_s: [
            (NOON - age_s) // width_s * width_s for age_s in (0, keep_s, keep_s + 2 * width_s)
        ]
        for width_s, keep_s in kept_s.items()
    }
    moments = sorted({start for each in starts.values() for start in each})
    store(database, [request(n, ended_at=start) for n, start in enumerate(moments)])
    fold(database)
    Retention(database).expire(0, rollups_before=NOON - 400 * DAY_S, now=NOON)
    left = {key[:2] for key in rollup_bytes(database)}
    for width_s, (newest, oldest, too_old) in starts.items():
        assert {(width_s, newest), (width_s, oldest)} <= left
        assert (width_s, too_old) not in left
        assert all(start > NOON - kept_s[width_s] - width_s for w, start in left if w == width_s)
    assert len(stored_keys(database)) == len(moments)


def test_no_rollup_is_older_than_what_is_set(database: Engine) -> None:
    store(database, [request(n, ended_at=NOON - n * 600) for n in range(20)])
    fold(database)
    Retention(database).expire(0, rollups_before=NOON - 3600, now=NOON)
    ends = {start + width_s for width_s, start, *_ in rollup_bytes(database)}
    assert min(ends) > NOON - 3600


def test_a_series_goes_with_its_last_rollup(database: Engine) -> None:
    store(database, [request(1, model="old", ended_at=NOON - 401 * DAY_S), request(2)])
    fold(database)
    assert Retention(database).expire(0, NOON - 400 * DAY_S, NOON) == 6 + 2
    assert counts(database)["rollup_series"] == 2
    store(database, [request(3, model="old")])
    assert counted_rollups(database)[60, NOON, "agent-0", "chat-0", "old", "", "", '["chat"]']


def test_changes_that_no_rollup_holds_yet_never_go(database: Engine) -> None:
    store(database, some(range(3)))
    Retention(database).expire(NOON + 1e6, NOON + 1e6, NOON + 1e6)
    assert counts(database)["rollup_changes"] == 1


@pytest.mark.parametrize("width_s", KEEP_S)
def test_the_longest_window_on_a_grid_is_younger_than_what_goes(
    database: Engine, queries: StoreQueries, width_s: int
) -> None:
    """Also when it is asked for late, and its first rollup began before the window."""
    longest_s = max(
        length_s
        for length_s in range(0, 500 * DAY_S, 21_600)
        if queries.grid_s(length_s) == width_s
    )
    start = (NOON - longest_s) // width_s * width_s
    store(database, [request(1, ended_at=start)])
    fold(database)
    Retention(database).expire(0, 0, NOON + 3600)
    assert (width_s, start) in {key[:2] for key in rollup_bytes(database)}


def test_events_are_kept_as_long_as_rollups(database: Engine) -> None:
    for at in (NOON - 400 * DAY_S - 1, NOON - 399 * DAY_S, NOON):
        ObservationStore(database, "agent-0").write_event(restart(at))
    assert Retention(database).expire(NOON, NOON - 400 * DAY_S, NOON) == 1
    assert counts(database)["events"] == 2


def test_what_was_let_go_can_be_written_beside(database: Engine) -> None:
    """Letting go and writing at once: neither is refused, and each row is stored once."""
    store(database, some(range(200), started_at=NOON - 1000))
    failures: list[Exception] = []

    def expire() -> None:
        try:
            Retention(database).expire(NOON - 500, 0, NOON)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=expire)
    thread.start()
    for number in range(1000, 1020):
        store(database, some([number]))
    thread.join()
    assert failures == []
    assert stored_keys(database) == keys_of(some(range(1000, 1020)))
