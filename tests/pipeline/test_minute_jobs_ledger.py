"""The ledger of booked minutes: open work is carried until it ends, and late rows are taken in."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.analysis.ledger import LONGEST_OPEN_S
from agent.records.minute import Ledger, MinuteRow
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.store.migrated import migrated_in

STREAM_S = 170.0
END_S = 300.0


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A new SQLite database."""
    with migrated_in(tmp_path) as engine:
        yield engine


def stream_and_abort(minutes: Minutes, until: float) -> None:
    """Samples of a stream of 170 tokens in 170 s, and of one that vanishes after 10 tokens."""
    for at in range(0, int(until) + 1, 5):
        stream, abort = min(at, STREAM_S), min(max(at - 20.0, 0.0), 10.0)
        minutes.read_one(
            at,
            running=float(at < STREAM_S) + float(20 < at < 30),
            output=stream + abort,
            input=100.0 * (at > 0) + 50.0 * (at > 20),
            first=float(at > 0) + float(at > 20),
            finished=float(at >= STREAM_S),
        )


def stream(number: int = 1) -> object:
    given = {"output_tokens": 171, "prefill_s": 0.001, "decode_s": STREAM_S - 0.001}
    return timed_request(number, 0.0, STREAM_S, **given)


def ledger(found: MinuteRow) -> Ledger:
    assert found.ledger is not None
    return found.ledger


def output(found: MinuteRow) -> float:
    """Output tokens without a row."""
    return (ledger(found).output_tokens or 0.0) - ledger(found).row_output_tokens


def closed(found: list[MinuteRow]) -> list[bool]:
    return [bool(each.ledger_closed) for each in found]


def test_a_stream_has_not_vanished_while_it_runs_and_an_aborted_request_has_when_it_ends(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    stream_and_abort(minutes, 160.0)
    assert closed(minutes.booked(151.0)) == [False, False]
    # Another process of the agent goes on.
    minutes = Minutes(database, PRICE)
    for at in range(165, int(END_S), 5):
        minutes.read_one(
            *(float(at),), running=float(at < STREAM_S), output=min(at, STREAM_S) + 10.0,
            input=150.0, first=2.0, finished=float(at >= STREAM_S),
        )  # fmt: skip
    minutes.take(stream())  # type: ignore[arg-type]
    found = minutes.booked(END_S - 25)
    assert closed(found) == [True, True, True, False]
    assert [output(each) for each in found[:3]] == pytest.approx([10, 0, 0], abs=1.01)
    first = ledger(found[0])
    assert ((first.input_tokens or 0) - first.row_input_tokens, first.row_requests) == (50, 1)
    newest = {minute.starts_at: minute for minute, _ in minutes.published}
    assert [newest[each.starts_at].ledger_closed for each in found] == closed(found)


def test_a_late_row_changes_a_closed_ledger(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    stream_and_abort(minutes, END_S)
    ((first, *_),) = [minutes.booked(END_S)]
    assert first.ledger_closed
    assert output(first) == pytest.approx(70)
    minutes.take(stream())  # type: ignore[arg-type]
    for at in range(305, 400, 5):
        minutes.read_one(float(at), running=0.0, output=180.0, input=150.0, first=2.0, finished=1.0)
    first, *_ = minutes.booked(END_S + 60)
    assert first.ledger_closed
    assert output(first) == pytest.approx(10, abs=1.01)


def test_a_request_that_stays_without_a_row_is_open_for_a_quarter_of_an_hour(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    for at in range(0, int(LONGEST_OPEN_S) + 200, 5):
        minutes.read_one(float(at), running=1.0, output=float(at), input=100.0, first=1.0)
    assert not any(closed(minutes.booked(LONGEST_OPEN_S + 60)))
    first, second, *_ = minutes.booked(LONGEST_OPEN_S + 121)
    assert (first.ledger_closed, second.ledger_closed) == (True, True)
    assert output(first) == pytest.approx(60)


def test_minutes_without_samples_have_no_ledger(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read_one(0.0, running=0.0, output=0.0, input=0.0)
    minutes.read_one(5.0, running=0.0, output=0.0, input=0.0)
    found = minutes.booked(300.0)
    assert found[0].ledger is not None
    assert [each.ledger for each in found[1:]] == [None] * len(found[1:])


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (2, 1)])
def test_a_rank_that_comes_or_leaves_with_its_counts_leaves_no_work_behind(
    database: Engine, before: int, after: int
) -> None:
    minutes = Minutes(database, PRICE)
    for at in range(0, 91, 5):
        ranks = before if at < 30 else after
        minutes.read_one(
            at, running=0.0, ranks=float(ranks), output=1e6 * ranks, input=4e6 * ranks,
            first=1e4 * ranks, finished=1e4 * ranks,
        )  # fmt: skip
    (found,) = minutes.booked(91.0)
    assert (ledger(found).output_tokens, ledger(found).input_tokens) == (0, 0)
    assert ledger(found).requests == 0
    assert found.work.counted_output_tokens == 0
    assert (found.work.busy_s, found.work.unknown_s) == pytest.approx((0, 5))
