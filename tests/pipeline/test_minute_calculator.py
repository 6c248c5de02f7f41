"""Computed minutes: their ledgers, GPU time of requests, and tokens that count at the end."""

from collections.abc import Sequence
from math import fsum

import pytest
from sqlalchemy import Engine

from agent.catalog.definitions import Verdict
from agent.records.minute import Ledger, MinuteRow
from agent.records.prices import Price
from tests.pipeline.minutes import PRICE, Minutes, every_5_s, timed_request
from tests.records.minutes import cost_of
from tests.store.making import judgement

STREAM_S = 170.0
END_S = 300.0


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
    return (ledger(found).output_tokens or 0.0) - ledger(found).row_output_tokens


def closed(found: list[MinuteRow]) -> list[bool]:
    return [bool(each.ledger_closed) for each in found]


def test_a_stream_has_not_vanished_while_it_runs_and_an_aborted_request_has_when_it_ends(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    stream_and_abort(minutes, 160.0)
    assert closed(minutes.computed(151.0)) == [False, False]
    # Another process of the agent goes on.
    minutes = Minutes(database, PRICE)
    for at in range(165, int(END_S), 5):
        minutes.read_one(
            *(float(at),), running=float(at < STREAM_S), output=min(at, STREAM_S) + 10.0,
            input=150.0, first=2.0, finished=float(at >= STREAM_S),
        )  # fmt: skip
    minutes.take(stream())  # type: ignore[arg-type]
    found = minutes.computed(END_S - 25)
    assert closed(found) == [True, True, True, False]
    assert [output(each) for each in found[:3]] == pytest.approx([10, 0, 0], abs=1.01)
    first = ledger(found[0])
    assert ((first.input_tokens or 0) - first.row_input_tokens, first.row_requests) == (50, 1)
    newest = {minute.starts_at: minute for minute, _ in minutes.published}
    assert [newest[each.starts_at].ledger_closed for each in found] == closed(found)


def test_a_late_row_changes_a_closed_ledger(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    stream_and_abort(minutes, END_S)
    ((first, *_),) = [minutes.computed(END_S)]
    assert first.ledger_closed
    assert output(first) == pytest.approx(70)
    minutes.take(stream())  # type: ignore[arg-type]
    for at in range(305, 400, 5):
        minutes.read_one(float(at), running=0.0, output=180.0, input=150.0, first=2.0, finished=1.0)
    first, *_ = minutes.computed(END_S + 60)
    assert first.ledger_closed
    assert output(first) == pytest.approx(10, abs=1.01)


def test_minutes_without_samples_have_no_ledger(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read_one(0.0, running=0.0, output=0.0, input=0.0)
    minutes.read_one(5.0, running=0.0, output=0.0, input=0.0)
    found = minutes.computed(300.0)
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
    (found,) = minutes.computed(91.0)
    assert (ledger(found).output_tokens, ledger(found).input_tokens) == (0, 0)
    assert ledger(found).requests == 0
    assert found.work.counted_output_tokens == 0
    assert (found.work.busy_s, found.work.unknown_s) == pytest.approx((0, 5))


MET, MISSED = Verdict.MET, Verdict.MISSED


def busy_minute(minutes: Minutes) -> None:
    minutes.take(
        timed_request(1, 0.0, 30.0, judged=judgement(MET, chat=MET, long=MET)),
        timed_request(2, 30.0, 15.0, judged=judgement(MISSED, chat=MISSED, long=MET)),
    )
    for at in (5.0 * step for step in range(13)):
        done = min(at, 45.0) / 45.0
        minutes.read_one(at, running=float(at < 45.0), input=200.0 * done, output=52.0 * done)


@pytest.mark.parametrize("prices", [(), (PRICE,)], ids=["without a price", "with a price"])
def test_gpu_hours_are_split_like_the_bill_and_need_no_price(
    database: Engine, prices: Sequence[Price]
) -> None:
    minutes = Minutes(database, *prices)
    busy_minute(minutes)
    (window,) = minutes.computed(91.0)
    rows = minutes.rows()
    hours = [row["gpu_hours"] for row in rows]
    assert sum(hours) == pytest.approx(window.work.busy_s / 3600) == 45 / 3600
    assert all(hours)
    costs = [pytest.approx(3.6 * each) for each in hours] if prices else [None, None]
    assert [row["cost_usd"] for row in rows] == costs


def test_tokens_are_counted_by_each_objective_that_was_met(database: Engine) -> None:
    minutes = Minutes(database)
    busy_minute(minutes)
    (window,) = minutes.computed(91.0)
    assert window.good_tokens == 26
    assert window.good_tokens_by_objective == {"chat": 26, "long": 52}


# Begin, length and output tokens of a request with 100 prompt tokens.
Stream = tuple[float, float, int]

# Two minutes and a half, of which the engine counts nothing before the last one.
LONG = ((11.0, 148.5, 2951),)
# Each ends two seconds after a sample, and then the engine idles.
SHORT = ((8.5, 13.5, 271), (68.5, 13.5, 271), (128.5, 13.5, 271))

at_end = pytest.mark.parametrize("dialect", ["sglang", "tgi", "trtllm", "llamacpp"])


def computed(
    database: Engine, dialect: str, streams: Sequence[Stream], without_row: Sequence[Stream] = ()
) -> list[MinuteRow]:
    minutes = Minutes(database, PRICE, dialect=dialect)
    every = (*streams, *without_row)
    for at in every_5_s(210):
        ended = [tokens for begin, length_s, tokens in every if begin + length_s <= at]
        running = sum(begin <= at < begin + length_s for begin, length_s, _ in every)
        begun = sum(begin <= at for begin, *_ in every)
        # TGI counts a prompt when it comes, llama.cpp when it is computed.
        prompts = begun if dialect in ("tgi", "llamacpp") else len(ended)
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
    found = minutes.computed(211.0)
    assert len(found) == 3
    return found


@at_end
@pytest.mark.parametrize("streams", [LONG, SHORT])
def test_a_request_with_a_row_is_counted_once_and_leaves_nothing_unseen(
    database: Engine, dialect: str, streams: Sequence[Stream]
) -> None:
    found = computed(database, dialect, streams)
    assert [cost_of(minute).unseen for minute in found] == pytest.approx([0, 0, 0], abs=1e-9)
    busy_s = fsum(length_s for _, length_s, _ in streams)
    assert fsum(minute.work.busy_s for minute in found) == pytest.approx(busy_s)
    tokens = sum(tokens for *_, tokens in streams)
    assert fsum(minute.work.counted_output_tokens for minute in found) == pytest.approx(tokens)
    for minute in found if streams is LONG else ():
        of = ledger(minute)
        assert of.row_output_tokens == pytest.approx(of.output_tokens)
        assert of.row_input_tokens == pytest.approx(of.input_tokens)


@at_end
def test_a_request_without_a_row_is_unseen(database: Engine, dialect: str) -> None:
    found = computed(database, dialect, SHORT[:1], SHORT[1:2])
    assert [cost_of(minute).unseen > 0 for minute in found] == [False, True, False]
    assert fsum(minute.work.counted_output_tokens for minute in found) == pytest.approx(2 * 271)
