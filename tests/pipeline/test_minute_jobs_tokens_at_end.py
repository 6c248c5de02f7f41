"""Minutes of engines that count the tokens of a request when it ends, not as they come."""

from collections.abc import Iterator, Sequence
from math import fsum
from pathlib import Path

import pytest
from sqlalchemy import Engine

from agent.records.minute import MinuteRow
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.pipeline.test_minute_jobs import every_5_s
from tests.records.minutes import cost_of
from tests.store.migrated import migrated_in

# Begin, length and output tokens of a request with 100 prompt tokens.
Stream = tuple[float, float, int]

# Two minutes and a half, of which the engine counts nothing before the last one.
LONG = ((11.0, 148.5, 2951),)
# Each ends two seconds after a sample, and then the engine idles.
SHORT = ((8.5, 13.5, 271), (68.5, 13.5, 271), (128.5, 13.5, 271))

at_end = pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm"])


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    """A new SQLite database."""
    with migrated_in(tmp_path) as engine:
        yield engine


def booked(
    database: Engine, dialect: str, streams: Sequence[Stream], without_row: Sequence[Stream] = ()
) -> list[MinuteRow]:
    """Three minutes of an engine with these requests."""
    minutes = Minutes(database, PRICE, dialect=dialect)
    every = (*streams, *without_row)
    for at in every_5_s(210):
        ended = [tokens for begin, length_s, tokens in every if begin + length_s <= at]
        running = sum(begin <= at < begin + length_s for begin, length_s, _ in every)
        begun = sum(begin <= at for begin, *_ in every)
        # TGI counts a prompt when it comes.
        prompts = begun if dialect == "tgi" else len(ended)
        counts = {"output": float(sum(ended)), "input": 100.0 * prompts}
        minutes.read_one(at, running=float(running), waiting=0.0, **counts)
    minutes.take(
        *[
            timed_request(
                number, begin, length_s, output_tokens=tokens,
                prefill_s=1.0, ttft_s=1.0, decode_s=length_s - 1.0,
            )
            for number, (begin, length_s, tokens) in enumerate(streams, 1)
        ]
    )  # fmt: skip
    found = minutes.booked(211.0)
    assert len(found) == 3
    return found


@at_end
@pytest.mark.parametrize("streams", [LONG, SHORT])
def test_a_request_with_a_row_leaves_nothing_unseen(
    database: Engine, dialect: str, streams: Sequence[Stream]
) -> None:
    found = booked(database, dialect, streams)
    assert [cost_of(minute).unseen for minute in found] == pytest.approx([0, 0, 0], abs=1e-9)
    busy_s = fsum(length_s for _, length_s, _ in streams)
    assert fsum(minute.work.busy_s for minute in found) == pytest.approx(busy_s)


@at_end
def test_output_tokens_over_many_minutes_count_once(database: Engine, dialect: str) -> None:
    found = booked(database, dialect, LONG)
    assert fsum(minute.work.counted_output_tokens for minute in found) == pytest.approx(2951)


@at_end
def test_the_ledger_of_each_minute_is_even(database: Engine, dialect: str) -> None:
    for minute in booked(database, dialect, LONG):
        assert minute.ledger is not None
        assert minute.ledger.row_output_tokens == pytest.approx(minute.ledger.output_tokens)
        assert minute.ledger.row_input_tokens == pytest.approx(minute.ledger.input_tokens)


@at_end
def test_a_request_without_a_row_is_unseen(database: Engine, dialect: str) -> None:
    found = booked(database, dialect, SHORT[:1], SHORT[1:2])
    assert [cost_of(minute).unseen > 0 for minute in found] == [False, True, False]
    assert fsum(minute.work.counted_output_tokens for minute in found) == pytest.approx(2 * 271)
