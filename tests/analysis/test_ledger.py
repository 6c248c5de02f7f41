"""The ledger beside an engine whose every step, and every request that vanishes, is known."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from math import fsum

import pytest

from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.ledger import (
    ledgers_to_close,
    minute_ledger,
    unaccounted_requests,
    unmatched_requests,
)
from agent.catalog.engine_facts import REQUESTS_RUNNING
from agent.catalog.reasons import WithoutRow
from agent.records.engine import EngineSample
from agent.records.minute import Ledger, MinuteRow
from agent.records.request import ProxyView, RequestRecord, Status, Vantage
from tests.analysis.cost.engine_days import engine_sample, observation, request
from tests.analysis.cost.stepped_engine import Job, Machine, SteppedEngine
from tests.records.columns import minute_requests
from tests.records.minutes import minute

MINUTES = 6
# So slow that a request lasts for tens of seconds.
SLOW = Machine(flops_per_s=989.4e12, bytes_per_s=3.35e12, overhead_s=0.05)


@cache
def load(seed: int) -> SteppedEngine:
    """Requests over four minutes, most of a few seconds and some of minutes; some leave no row."""
    chance = random.Random(seed)
    jobs = []
    for number in range(1, 120):
        output = chance.choice((1, 20, 100, 100, 2000))
        leaves, lost = chance.random() < 0.15, chance.random() < 0.05
        jobs.append(
            Job(
                number=number,
                at=chance.uniform(0.0, 230.0),
                prompt=chance.choice((100, 1000, 9000)),
                output=output,
                cached=chance.choice((0, 90)),
                leaves_at=chance.randint(1, output) if leaves else None,
                has_row=not (leaves or lost),
            )
        )
    # The last sample, of a minute after all have ended, closes the ledger of the others.
    return SteppedEngine(SLOW, jobs, every_s=5.0, late_s=0.02, seed=seed).run(60.0 * MINUTES + 40)


def computed(engine: SteppedEngine, at: float) -> list[MinuteRow]:
    """The minutes that are over at this second, by the rows of the requests that ended by then."""
    rows = [job.row() for job in engine.ended if job.has_row and job.ended_at <= at]
    samples = [sample for sample in engine.samples if sample.at <= at]
    return [
        ledger_minute(samples, rows, number)
        for number in range(MINUTES)
        if 60.0 * (number + 1) + 15.0 <= at
    ]


def ledger_minute(
    samples: Sequence[EngineSample], rows: Sequence[RequestRecord], number: int
) -> MinuteRow:
    """One minute with its ledger."""
    observed = observation(samples, TimeRange(60.0 * number, 60.0 * (number + 1)))
    return replace(
        minute(number),
        from_at=60.0 * number,
        until=60.0 * (number + 1),
        ledger=minute_ledger(observed, minute_requests(rows)),
        unmatched=unmatched_requests(observed, samples, minute_requests(rows)),
    )


def known(found: MinuteRow) -> Ledger:
    assert found.ledger is not None
    return found.ledger


def unaccounted(minutes: Sequence[MinuteRow]) -> tuple[float, float, float]:
    """Input tokens, output tokens and requests without a row."""
    ledgers = [known(each) for each in minutes]
    return (
        fsum((each.input_tokens or 0.0) - each.row_input_tokens for each in ledgers),
        fsum((each.output_tokens or 0.0) - each.row_output_tokens for each in ledgers),
        fsum((each.requests or 0.0) - each.row_requests for each in ledgers),
    )


def vanished(engine: SteppedEngine) -> list[Job]:
    return [job for job in engine.ended if not job.has_row]


@pytest.mark.parametrize("seed", range(3))
def test_what_has_vanished_in_the_end_is_all_that_has_no_row(seed: int) -> None:
    engine = load(seed)
    assert not engine.running
    minutes = computed(engine, 60.0 * MINUTES + 30)
    gone = vanished(engine)
    assert len(gone) > 5
    true = (sum(job.prompt for job in gone), sum(job.generated for job in gone), len(gone))
    assert unaccounted(minutes) == pytest.approx(true, rel=1e-9)
    reasons = [unaccounted_requests(known(each)) for each in minutes]
    aborted = fsum(each[WithoutRow.ABORTED] for each in reasons)
    assert aborted == pytest.approx(sum(job.leaves_at is not None for job in gone))
    lost = fsum(each[WithoutRow.FINISHED] for each in reasons)
    assert lost == pytest.approx(sum(job.leaves_at is None for job in gone))


@pytest.mark.parametrize("vantage", [Vantage.PROXY, Vantage.ENGINE])
def test_where_each_request_has_a_row_nothing_has_vanished(vantage: Vantage) -> None:
    """The proxy tells of requests whose clients left, and so does the engine's plugin."""
    engine = load(3)
    rows = [job.row()._replace(vantage=vantage) for job in engine.ended]
    assert {row.status for row in rows} == {Status.OK, Status.CANCELLED}
    minutes = [ledger_minute(engine.samples, rows, number) for number in range(MINUTES)]
    assert unaccounted(minutes) == pytest.approx((0, 0, 0), abs=1e-6)
    reasons = [unaccounted_requests(known(each)) for each in minutes]
    assert {fsum(each[reason] for each in reasons) for reason in reasons[0]} == {0}


@pytest.mark.parametrize("seed", range(3))
def test_work_of_open_requests_has_not_vanished(seed: int) -> None:
    """At every minute, closed minutes hold at most what has vanished by then, and miss little."""
    engine = load(seed)
    # Computed once more, with all rows.
    now = {each.starts_at: each for each in computed(engine, 60.0 * MINUTES + 30)}
    for at in range(75, 60 * MINUTES + 30, 60):
        minutes = computed(engine, at)
        closed = ledgers_to_close(minutes, at)
        if not closed:
            continue
        settled = unaccounted([now[each.starts_at] for each in closed])
        found = unaccounted(closed)
        counted = fsum(known(each).output_tokens or 0.0 for each in closed)
        assert found[1] == pytest.approx(settled[1], abs=0.005 * counted)
        assert found[2] == pytest.approx(settled[2], abs=0.5)
    assert closed, "the last minutes are closed"


@pytest.mark.parametrize("per_s", [1, 10])
def test_a_long_stream_is_open_until_its_row_is_there(per_s: int) -> None:
    """Beside many short requests, of which some begin or end while a sample is read."""
    chance = random.Random(per_s)
    jobs = [Job(number=1, at=2.0, prompt=500, output=3000)]
    jobs += [
        Job(
            number=number,
            at=number / per_s + chance.random(),
            prompt=chance.choice((50, 500, 4000)),
            output=chance.randint(1, 80),
        )
        for number in range(2, 170 * per_s)
    ]
    engine = SteppedEngine(SLOW, jobs, every_s=1.0, late_s=0.15, seed=per_s).run(260.0)
    stream = next(job for job in engine.ended if job.number == 1)
    assert stream.ended_at > 150
    for at in (75, 135):
        assert ledgers_to_close(computed(engine, at), at) == []
    assert len(ledgers_to_close(computed(engine, 255.0), 255.0)) == 3


def test_where_a_fifth_is_always_aborted_minutes_are_closed_soon() -> None:
    """The engine is never empty, and at most moments has a request that leaves no row."""
    chance = random.Random(1)
    jobs = []
    for number in range(1, 60 * MINUTES * 2):
        output = chance.randint(50, 200)
        gone_at = chance.randint(20, output) if chance.random() < 0.2 else None
        jobs.append(
            Job(
                number=number,
                at=number / 2 + chance.random(),
                prompt=200,
                output=output,
                leaves_at=gone_at,
                has_row=gone_at is None,
            )
        )
    engine = SteppedEngine(SLOW, jobs, every_s=1.0, late_s=0.02, seed=1).run(60.0 * MINUTES + 40)
    held = [sample.fact(REQUESTS_RUNNING.name) or 0 for sample in engine.samples]
    assert min(held[20 : 60 * MINUTES]) > 0
    closed = ledgers_to_close(computed(engine, 60.0 * MINUTES + 20), 60.0 * MINUTES + 20)
    assert len(closed) == MINUTES - 1
    over = [job for job in vanished(engine) if job.ended_at < closed[-1].until]
    true = (sum(job.prompt for job in over), sum(job.generated for job in over), len(over))
    # Requests at the edge of the last minute are in it in part.
    assert unaccounted(closed) == pytest.approx(true, rel=0.1)


def test_after_a_quarter_of_an_hour_a_ledger_is_closed_in_any_case() -> None:
    busy = [engine_sample(5.0 * n, running=3.0, input=0.0, output=n) for n in range(13)]
    (found,) = [ledger_minute(busy, [], 0)]
    assert found.unmatched == 3
    assert ledgers_to_close([found, replace(found, unmatched=3.0)], 960.0) == []
    assert ledgers_to_close([found], 961.0) == [found]


def test_what_ran_when_the_engine_ended_died() -> None:
    """Two ran at the last sample before its end: one has a row. The rest is counted from anew."""
    samples = [
        engine_sample(0.0, 1.0, running=0.0, input=0.0, output=0.0, first=0.0, finished=0.0),
        engine_sample(5.0, 1.0, running=2.0, input=300.0, output=40.0, first=2.0, finished=0.0),
        engine_sample(20.0, 15.0, running=0.0, input=100.0, output=5.0, first=1.0, finished=1.0),
        engine_sample(25.0, 15.0, running=0.0, input=150.0, output=9.0, first=2.0, finished=2.0),
    ]
    failed = request(
        1, 1.0, status=Status.ERROR, vantage=Vantage.PROXY, queue_s=None, prefill_s=None,
        decode_s=None, input_tokens=200, output_tokens=21,
    )._replace(ended_at=5.1)  # fmt: skip
    after = request(2, 16.0, prefill_s=0.5, input_tokens=100, output_tokens=5)
    last = request(3, 21.0, prefill_s=0.5, decode_s=1.0, input_tokens=50, output_tokens=4)
    found = ledger_minute(samples, [failed, after, last._replace(ended_at=23.0)], 0)
    ledger = known(found)
    assert (ledger.input_tokens, ledger.requests, ledger.died) == (350, 4 - 1, 1)
    assert found.unmatched == 0
    assert ledger.row_requests == 2
    assert unaccounted_requests(ledger)[WithoutRow.DIED] == 1


def test_times_between_samples_far_apart_are_counted_and_those_without_are_unknown() -> None:
    samples = [
        engine_sample(0.0, running=0.0, input=0.0, output=0.0, first=0.0),
        engine_sample(50.0, running=0.0, input=300.0, output=62.0, first=3.0),
    ]
    rows = [request(1, 10.0), request(2, 30.0), request(3, 52.0)]
    found = known(ledger_minute(samples, rows, 0))
    assert (found.input_tokens, found.row_input_tokens) == (300, 200)
    assert (found.row_output_tokens, found.row_requests) == pytest.approx((42, 2))
    assert ledger_minute(samples, rows, 2).ledger is None
    assert ledger_minute(samples[:1], rows, 0).ledger is None


def proxied(number: int, at: float, /, **given: object) -> RequestRecord:
    """A row of the proxy alone."""
    view = ProxyView(choices=given.pop("choices", 1))  # type: ignore[arg-type]
    own = {"vantage": Vantage.PROXY, "queue_s": None, "prefill_s": None, "decode_s": None}
    return request(number, at, proxied=view, **(own | given))


def test_rows_of_the_proxy_alone_count_choices_and_say_which_tokens_they_lack() -> None:
    """Three choices of a chat, of which an engine counts the prompt three times."""
    samples = [
        engine_sample(0.0, running=0.0, input=0.0, output=0.0, first=0.0, finished=0.0),
        engine_sample(50.0, running=0.0, input=430.0, output=70.0, first=5.0, finished=3.0),
    ]
    chat = "/v1/chat/completions"
    rows = [
        proxied(1, 5.0, route=chat, choices=3, input_tokens=100, output_tokens=60),
        # Their clients left: one after the first token, one before.
        proxied(2, 8.0, status=Status.CANCELLED, input_tokens=None, output_tokens=None),
        proxied(3, 9.0, status=Status.CANCELLED, ttft_s=None, input_tokens=None, output_tokens=0),
        proxied(4, 9.0, status=Status.THROTTLED, ttft_s=None, output_tokens=None),
    ]
    found = known(ledger_minute(samples, rows, 0))
    assert (found.row_requests, found.row_finished, found.rows_without_tokens) == (4, 3, 1)
    assert (found.row_input_tokens, found.row_output_tokens) == pytest.approx((300, 60))
    reasons = unaccounted_requests(found)
    assert reasons == {WithoutRow.ABORTED: 1, WithoutRow.FINISHED: 0, WithoutRow.DIED: 0}


def test_requests_of_an_engine_that_does_not_count_them_are_unknown() -> None:
    assert unaccounted_requests(Ledger(input_tokens=1.0, output_tokens=1.0)) == {}
    without = {WithoutRow.DIED: 1, WithoutRow.UNKNOWN: 3}
    assert unaccounted_requests(Ledger(requests=9.0, row_requests=5.0, died=1.0)) == without
    assert unaccounted_requests(Ledger(refused=5.0, row_refused=2.0)) == {WithoutRow.REFUSED: 3}
