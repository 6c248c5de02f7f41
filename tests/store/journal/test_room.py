"""The bounds of a journal: what goes, what stays, and what is refused."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, text

from agent.catalog.reasons import JournalDropped
from agent.errors import StoreUnavailable
from agent.store.connection import for_writing
from agent.store.journal import room as room_module
from agent.store.journal.backlog import drop_until, lag_of
from agent.store.journal.room import JournalRoom
from agent.store.observations import ObservationStore
from tests.store.journal.forwarded import journal_in
from tests.store.making import NOON, gpu_sample, some, store, stored_keys
from tests.store.views import JoiningAgent, proxy_view

MEBIBYTE = 2**20
HOUR_S = 3600.0


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Engine]:
    """A new journal."""
    with journal_in(tmp_path) as engine:
        yield engine


class Room(JournalRoom):
    """Bounds that count what they drop."""

    def __init__(
        self, engine: Engine, *, max_bytes: int = 2**40, max_age_s: float = HOUR_S
    ) -> None:
        self.dropped: Counter[JournalDropped] = Counter()

        def on_dropped(reason: JournalDropped, rows: int) -> None:
            self.dropped[reason] += rows

        super().__init__(engine, max_bytes=max_bytes, max_age_s=max_age_s, on_dropped=on_dropped)


def noted_at(journal: Engine, at: float) -> None:
    """Set the time of all notes."""
    with for_writing(journal).begin() as connection:
        connection.execute(text("UPDATE journal_notes SET at = :at"), {"at": int(at)})


def all_forwarded(journal: Engine) -> None:
    """Forget all notes, as after a forwarding."""
    with for_writing(journal).begin() as connection:
        drop_until(connection, 2**60)


def waiting(journal: Engine) -> int:
    with journal.connect() as connection:
        return lag_of(connection).rows


def test_what_waits_for_too_long_is_dropped_and_counted(journal: Engine) -> None:
    room = Room(journal)
    store(journal, some(range(10)))
    noted_at(journal, NOON)
    store(journal, some(range(10, 15)))
    with for_writing(journal).begin() as connection:
        connection.execute(text(f"UPDATE journal_notes SET at = {NOON + 10} WHERE number > 11"))
    room.keep(NOON + HOUR_S)
    assert room.dropped == {}
    room.keep(NOON + HOUR_S + 5)
    # Ten rows and their difference of the rollups.
    assert room.dropped == {JournalDropped.AGE: 11}
    assert waiting(journal) == room.lag.rows == 6
    with journal.connect() as connection:
        differences = connection.execute(text("SELECT count(*) FROM journal_rollups"))
        assert differences.scalar_one() == 1


def test_old_copies_go_and_what_waits_stays(journal: Engine) -> None:
    room = Room(journal)
    observations = ObservationStore(journal, "agent-0")
    store(journal, some(range(10)))
    observations.write_gpu_samples([gpu_sample(NOON)])
    JoiningAgent(journal).take(proxy_view(1))
    all_forwarded(journal)
    store(journal, some(range(20, 23)))
    before = waiting(journal)
    assert room.expire(NOON + 2 * HOUR_S) == 11
    # A row that is not settled is not forwarded yet.
    assert len(stored_keys(journal)) == 4
    # Deletions by age are no changes: the shared database keeps its rows for longer.
    assert waiting(journal) == before


def test_a_full_journal_refuses_until_its_rows_are_forwarded(journal: Engine) -> None:
    room = Room(journal, max_bytes=MEBIBYTE)
    observations = ObservationStore(journal, "agent-0", room.require_for_sample)
    number = 0
    while room.used_bytes <= MEBIBYTE:
        room.require()
        store(journal, some(range(number, number + 200)))
        number += 200
        room.keep(NOON + 60)
    with pytest.raises(StoreUnavailable, match="the journal is full: "):
        room.require()
    with pytest.raises(StoreUnavailable):
        observations.write_gpu_samples([gpu_sample(NOON)])
    assert room.dropped == {JournalDropped.FULL: 1}
    assert len(stored_keys(journal)) == number
    all_forwarded(journal)
    room.keep(NOON + 60)
    room.require()
    assert room.used_bytes < MEBIBYTE
    assert room.lag.rows == 0
    observations.write_gpu_samples([gpu_sample(NOON)])


def test_copies_make_room_before_anything_is_refused(journal: Engine) -> None:
    room = Room(journal, max_bytes=MEBIBYTE)
    for number in range(0, 4000, 200):
        room.require()
        ended = NOON + number
        store(journal, some(range(number, number + 200), started_at=ended, ended_at=ended))
        all_forwarded(journal)
        room.keep(ended + 60)
    left = [int(trace_id, 16) for trace_id, _ in stored_keys(journal)]
    assert 0 < len(left) < 4000
    # The newest stay.
    assert left == list(range(min(left), 4000))
    assert room.used_bytes <= MEBIBYTE


def test_no_writer_waits_while_the_bounds_of_a_journal_without_copies_are_kept(
    journal: Engine,
) -> None:
    store(journal, some(range(1000)))
    (room := Room(journal)).keep(NOON + 60)
    room = Room(journal, max_bytes=int(room.used_bytes / 0.9))
    with for_writing(journal).begin():
        room.keep(NOON + 2 * HOUR_S)
    assert len(stored_keys(journal)) == 1000


def test_a_copy_that_changes_before_it_is_deleted_stays_and_waits(
    journal: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(journal)
    store(journal, some(range(10)))
    all_forwarded(journal)
    look = room_module._oldest_copies

    def looked_and_changed(connection: Connection, before: float) -> object:
        found = look(connection, before)
        with for_writing(journal).begin() as late:
            late.execute(text("UPDATE requests SET cost_usd = 1 WHERE request_id = 'request-3'"))
        return found

    monkeypatch.setattr(room_module, "_oldest_copies", looked_and_changed)
    assert room.expire(NOON + 2 * HOUR_S) == 9
    assert [int(trace_id, 16) for trace_id, _ in stored_keys(journal)] == [3]
    assert waiting(journal) > 0
