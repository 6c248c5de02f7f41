"""The bounds of a published file: what goes, what stays, and what is refused."""

import time
from collections import Counter

import pytest
from sqlalchemy import Engine

from agent.catalog.reasons import LostRows
from agent.errors import StoreUnavailable
from agent.store.connection import for_writing, without_number
from agent.store.observations import ObservationStore
from agent.store.publishing.bounds import FileBounds
from agent.store.publishing.changes import file_state, lag_of, set_published
from tests.store.making import NOON, gpu_sample, some, store, stored_keys
from tests.store.views import JoiningAgent, proxy_view

MEBIBYTE = 2**20
HOUR_S = 3600.0


class Bounds(FileBounds):
    """Bounds that count what they drop."""

    def __init__(
        self, engine: Engine, *, max_bytes: int = 2**40, max_age_s: float = HOUR_S
    ) -> None:
        self.dropped: Counter[LostRows] = Counter()

        def on_dropped(reason: LostRows, rows: int) -> None:
            self.dropped[reason] += rows

        super().__init__(engine, max_bytes=max_bytes, max_age_s=max_age_s, on_dropped=on_dropped)


def all_published(file: Engine) -> None:
    """Note that everything is published."""
    with without_number(for_writing(file)).begin() as connection:
        set_published(connection, file_state(connection).last, NOON)


def waiting(file: Engine) -> int:
    with file.connect() as connection:
        return lag_of(connection).rows


def test_what_waits_for_too_long_is_dropped_and_counted(file: Engine) -> None:
    bounds = Bounds(file)
    store(file, some(range(10)))
    store(file, some(range(10, 15), started_at=NOON + 20.0))
    assert bounds.expire(NOON + HOUR_S) == 0
    assert bounds.dropped == {}
    assert bounds.expire(NOON + HOUR_S + 10) == 10
    assert bounds.dropped == {LostRows.AGE: 10}
    bounds.keep(NOON + HOUR_S + 10)
    assert waiting(file) == bounds.lag.rows == 5


def test_old_copies_go_and_what_waits_stays(file: Engine) -> None:
    bounds = Bounds(file)
    observations = ObservationStore(file, "agent-0")
    store(file, some(range(10)))
    observations.write_gpu_samples([gpu_sample(NOON)])
    JoiningAgent(file).take(proxy_view(1))
    all_published(file)
    store(file, some(range(20, 23), started_at=NOON + 2 * HOUR_S))
    before = waiting(file)
    assert bounds.expire(NOON + 2 * HOUR_S) == 11
    # A row that is not settled is not published yet.
    assert len(stored_keys(file)) == 4
    # Deletions by age are no changes: the shared database keeps its rows for longer.
    assert waiting(file) == before
    assert bounds.dropped == {}


def test_a_full_file_refuses_until_its_rows_are_published(file: Engine) -> None:
    bounds = Bounds(file, max_bytes=MEBIBYTE)
    observations = ObservationStore(file, "agent-0", bounds.require_for_sample)
    number = 0
    while bounds.used_bytes <= MEBIBYTE:
        bounds.require()
        store(file, some(range(number, number + 200)))
        number += 200
        bounds.keep(NOON + 60)
    with pytest.raises(StoreUnavailable, match="the agent's file is full: "):
        bounds.require()
    with pytest.raises(StoreUnavailable):
        observations.write_gpu_samples([gpu_sample(NOON)])
    assert bounds.dropped == {LostRows.FULL: 1}
    assert len(stored_keys(file)) == number
    all_published(file)
    bounds.keep(NOON + 60)
    bounds.require()
    assert bounds.used_bytes < MEBIBYTE
    assert bounds.lag.rows == 0
    observations.write_gpu_samples([gpu_sample(NOON)])


def test_copies_make_room_before_anything_is_refused(file: Engine) -> None:
    bounds = Bounds(file, max_bytes=MEBIBYTE)
    for number in range(0, 4000, 200):
        bounds.require()
        ended = NOON + number
        store(file, some(range(number, number + 200), started_at=ended, ended_at=ended))
        all_published(file)
        bounds.keep(ended + 60)
    left = [int(trace_id, 16) for trace_id, _ in stored_keys(file)]
    assert 0 < len(left) < 4000
    # The newest stay.
    assert left == list(range(min(left), 4000))
    assert bounds.used_bytes <= MEBIBYTE


def test_rows_of_the_last_published_transaction_are_copies(file: Engine) -> None:
    bounds = Bounds(file)
    store(file, some(range(10)))
    all_published(file)
    assert bounds.expire(NOON + 2 * HOUR_S) == 10
    assert bounds.dropped == {}


def test_what_waits_has_waited_since_the_shared_database_had_everything(file: Engine) -> None:
    with without_number(for_writing(file)).begin() as connection:
        set_published(connection, file_state(connection).last, time.time() - 1000.0)
    store(file, some(range(3)))
    with file.connect() as connection:
        rows, seconds = lag_of(connection)
    assert (rows, 1000.0 <= seconds < 2000.0) == (3, True)
