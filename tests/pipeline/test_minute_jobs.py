"""Booking minutes: from stored rows to stored minutes and the cost of requests."""

from dataclasses import replace
from math import fsum

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from agent.catalog import gpu_facts
from agent.catalog.definitions import Verdict
from agent.pipeline import minute_jobs
from agent.records.columns import BookedRequests
from agent.records.gpu import GpuSample
from agent.records.prices import Electricity, Price
from agent.records.request import Status
from tests.pipeline.minutes import (
    A_SECOND_USD,
    PRICE,
    Minutes,
    adds_up,
    billed_usd,
    emptied,
    every_5_s,
    timed_request,
)
from tests.records.minutes import cost_of
from tests.store.making import NOON
from tests.store.making import judgement as judged_as


def one_request(minutes: Minutes) -> None:
    """Samples with work between 20 s and 30 s: 100 tokens in, 26 out."""
    for at in every_5_s(90):
        done = min(max(at - 20.0, 0.0), 10.0) / 10.0
        minutes.read_one(at, steps=26 * done, output=26 * done, input=100 * done)


def test_a_minute_is_split_as_computed_by_hand(database: Engine) -> None:
    """10 s busy: 2 s of prefill and 8 s of decode."""
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.booked(91.0)
    assert (window.from_at, window.until) == (NOON, NOON + 60)
    assert window.work.busy_s == pytest.approx(10.0)
    assert window.work.idle_s == pytest.approx(50.0)
    assert cost_of(window).computed == pytest.approx(2 * A_SECOND_USD)
    assert cost_of(window).decode == pytest.approx(8 * A_SECOND_USD)
    assert cost_of(window).idle == pytest.approx(50 * A_SECOND_USD)
    assert minutes.costs() == [pytest.approx(10 * A_SECOND_USD)]
    assert (window.requests, window.good_tokens, window.method) == (1, 26, "tokens")


def test_a_minute_is_booked_after_the_wait_for_its_rows(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    assert minutes.booked(89.0) == []
    assert len(minutes.booked(91.0)) == 1


def test_work_without_a_row_is_unseen_until_the_row_arrives(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    (before,) = minutes.booked(91.0)
    assert cost_of(before).unseen == pytest.approx(10 * A_SECOND_USD)
    minutes.take(timed_request(1, 20.0, 10.0))
    minutes.read(every_5_s(150, after=95.0), steps=0.0)
    after, _ = minutes.booked(151.0)
    assert cost_of(after).unseen == pytest.approx(0.0, abs=1e-12)
    assert minutes.costs() == [pytest.approx(10 * A_SECOND_USD)]
    assert (replace(after, ledger_closed=False), before) in minutes.published
    assert adds_up(minutes, [after, _])


def test_a_request_over_several_minutes_has_the_sum_of_its_shares(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(210):
        minutes.read_one(at, running=1.0, steps=at, output=at, input=0.0)
    minutes.take(timed_request(1, 0.0, 170.0, output_tokens=171, prefill_s=0.0, decode_s=170.0))
    assert adds_up(minutes, minutes.booked(91.0))
    assert minutes.rows()[0]["priced_at"] is None, "its last minute is not counted"
    windows = minutes.booked(211.0)
    assert len(windows) == 3
    assert adds_up(minutes, windows)
    (row,) = minutes.rows()
    assert row["priced_at"] == NOON + 211


def test_a_shared_minute_lowers_the_stored_cost_of_an_earlier_request(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    minutes.take(timed_request(1, 20.0, 10.0))
    minutes.booked(91.0)
    minutes.take(timed_request(2, 20.0, 10.0))
    minutes.read(every_5_s(150, after=95.0), steps=0.0)
    windows = minutes.booked(151.0)
    assert minutes.costs() == [pytest.approx(5 * A_SECOND_USD)] * 2
    assert adds_up(minutes, windows)


def test_an_aborted_request_is_wasted_and_part_of_the_sum(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    missed = judged_as(Verdict.MISSED)
    minutes.take(timed_request(1, 20.0, 10.0, status=Status.CANCELLED, judged=missed))
    windows = minutes.booked(91.0)
    assert cost_of(windows[0]).aborted == pytest.approx(10 * A_SECOND_USD)
    assert cost_of(windows[0]).aborted_prefill == pytest.approx(2 * A_SECOND_USD)
    assert windows[0].good_tokens == 0
    assert adds_up(minutes, windows)


def test_without_a_price_there_is_time_and_no_cost(database: Engine) -> None:
    minutes = Minutes(database)
    one_request(minutes)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.booked(91.0)
    assert window.work.busy_s == pytest.approx(10.0)
    assert (window.bill_usd, window.cost) == (None, None)
    assert minutes.costs() == [None]


def test_without_a_number_of_gpus_there_is_no_cost(database: Engine) -> None:
    minutes = Minutes(database, PRICE, parallelism=None)
    one_request(minutes)
    (window,) = minutes.booked(91.0)
    assert (window.gpus, window.bill_usd) == (None, None)


def test_a_price_applies_from_its_date(database: Engine) -> None:
    cheap = Price(setting="a", engine="chat-0", gpu_hour_usd=3.6, until=NOON + 90.0)
    dear = Price(setting="b", engine="chat-0", gpu_hour_usd=7.2, from_at=NOON + 90.0)
    minutes = Minutes(database, cheap, dear)
    minutes.read(every_5_s(210), steps=0.0)
    bills_usd = [window.bill_usd for window in minutes.booked(211.0)]
    assert bills_usd == pytest.approx([0.06, 0.03 + 0.06, 0.12])


def test_booked_minutes_keep_their_price(database: Engine) -> None:
    first = Minutes(database, PRICE)
    one_request(first)
    first.booked(91.0)
    second = Minutes(database, Price(setting="b", engine="chat-0", gpu_hour_usd=36.0))
    second.take(timed_request(1, 20.0, 10.0))
    second.read(every_5_s(150, after=95.0), steps=0.0)
    windows = second.booked(151.0)
    assert [window.bill_usd for window in windows] == pytest.approx([0.06, 0.6])
    assert second.costs() == [pytest.approx(10 * A_SECOND_USD)]


def test_after_a_stop_every_missed_minute_is_booked_once(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read(every_5_s(65), steps=0.0)
    assert len(minutes.booked(91.0)) == 1
    restarted = Minutes(database, PRICE)
    restarted.read(every_5_s(1300, after=1200.0), steps=0.0)
    windows = restarted.booked(1291.0)
    assert [window.starts_at - NOON for window in windows] == [60 * n for n in range(21)]
    assert billed_usd(windows) == pytest.approx((windows[-1].until - NOON) * A_SECOND_USD)
    unread = fsum(window.work.unknown_s for window in windows)
    assert unread == pytest.approx(1200.0 - 65.0)
    assert fsum(window.work.idle_s for window in windows) == pytest.approx(60.0 + 5.0 + 60.0)
    assert len(restarted.published) == 20
    restarted.booked(1291.0)
    assert len(restarted.published) == 20


def gpu(at: float, joules: float, name: str = "NVIDIA H200") -> GpuSample:
    return GpuSample(
        gpu="GPU-1",
        index=0,
        name=name,
        at=NOON + at,
        facts={(gpu_facts.ENERGY.name, ()): joules},
    )


def test_energy_is_read_from_the_counters_and_its_price_is_in_the_bill(database: Engine) -> None:
    """36 kJ are 0.01 kWh."""
    electricity = Electricity(usd_per_kwh=0.5, pue=1.2)
    minutes = Minutes(database, PRICE, electricity=electricity)
    minutes.gpu_samples = [gpu(-1.0, 1000.0), gpu(0.0, 1000.0), gpu(60.0, 37000.0), gpu(61.0, 9e9)]
    one_request(minutes)
    (window,) = minutes.booked(91.0)
    assert window.joules == pytest.approx(36000.0)
    assert window.electricity_usd == pytest.approx(0.01 * 0.5 * 1.2)
    assert window.bill_usd == pytest.approx(0.06 + 0.006)


def test_a_gpu_of_unknown_peak_is_reported_and_its_time_is_priced(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    minutes.gpu_samples = [gpu(0.0, 0.0, name="NVIDIA Tomorrow")]
    one_request(minutes)
    (window,) = minutes.booked(91.0)
    assert window.peak_flops_per_s is None
    assert window.bill_usd == pytest.approx(0.06)
    ((reason, why),) = minutes.missing
    assert reason == "gpu_unknown"
    assert "no peak of its GPU 'NVIDIA Tomorrow' is known" in why


def test_an_unreachable_database_is_reported_and_the_minute_is_booked_later(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    with monkeypatch.context() as away:
        away.setattr(database.dialect, "do_execute", _refused)
        minutes.book(91.0)
    assert minutes.failures == ["engine_windows"]
    assert len(minutes.booked(91.0)) == 1


def _refused(*_args: object, **_kwargs: object) -> None:
    import sqlite3

    raise sqlite3.OperationalError("disk I/O error")


MOST_ROWS = 20


@pytest.fixture
def minutes(database: Engine, monkeypatch: pytest.MonkeyPatch) -> Minutes:
    """An engine that is busy for eleven minutes, with a low limit of rows to read again."""
    monkeypatch.setattr(minute_jobs, "MAX_ROWS_AGAIN", MOST_ROWS)
    at_work = Minutes(database, PRICE)
    for at in every_5_s(690)[::3]:
        at_work.read_one(at, running=1.0, steps=at, output=3 * at, input=9 * at)
    return at_work


def crowd(minutes: Minutes) -> None:
    """Stores and books five requests in each of eight minutes."""
    for minute in range(8):
        minutes.take(*[timed_request(10 * minute + n, 60 * minute + 5 * n, 4.0) for n in range(5)])
        minutes.book(60 * minute + 91.0)


@pytest.mark.slow
def test_a_request_among_too_many_others_has_no_share_and_lowers_no_others(
    minutes: Minutes,
) -> None:
    crowd(minutes)
    before = minutes.costs()
    minutes.take(timed_request(900, 30.0, 480.0, output_tokens=900))
    windows = minutes.booked(571.0)
    assert minutes.costs() == [*before, None]
    assert adds_up(minutes, windows)


@pytest.mark.slow
def test_a_long_request_among_few_others_has_a_share_of_all_its_minutes(minutes: Minutes) -> None:
    minutes.take(timed_request(900, 30.0, 480.0, output_tokens=900))
    for at in range(91, 600, 60):
        minutes.book(float(at))
    (cost,) = minutes.costs()
    # Its cost is more than two whole minutes of the GPU.
    assert cost is not None
    assert cost > 0.12


@pytest.mark.slow
def test_rows_read_again_are_limited_for_a_request_of_any_length(
    minutes: Minutes, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd(minutes)
    read: list[int] = []
    rows_of = minutes.store.requests

    def counted(engine: str, from_at: float, until: float) -> BookedRequests:
        found = rows_of(engine, from_at, until)
        read.append(found.rows.size)
        return found

    monkeypatch.setattr(minutes.store, "requests", counted)
    minutes.take(timed_request(900, 30.0, 480.0), timed_request(901, 400.0, 110.0))
    minutes.book(571.0)
    assert 5 < max(read) <= MOST_ROWS + 2


_REQUESTS = st.lists(
    st.tuples(
        st.floats(0.0, 500.0),
        st.floats(0.0, 300.0),
        st.integers(0, 3000),
        st.integers(0, 300),
        st.sampled_from(Status),
        st.integers(0, 3),
    ),
    max_size=40,
)


def _ok(*timings: tuple[float, float, int]) -> list[tuple[float, float, int, int, Status, int]]:
    return [(start, lasted, 100, 26, Status.OK, when) for start, lasted, when in timings]


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(_REQUESTS, st.sampled_from([MOST_ROWS, minute_jobs.MAX_ROWS_AGAIN]))
# The last but one request ends in the last booked minute, and shares an earlier minute.
@example(_ok(*[(0.0, 1.0, 0)] * 8, (350.0, 190.0, 2), (260.0, 41.0, 0)), MOST_ROWS)
@example(_ok(*[(0.0, 1.0, 0)] * 8, (350.0, 195.0, 2), (260.0, 41.0, 0)), MOST_ROWS)
# A request that ends with its first minute, and a later one: as many rows as may be read again.
@example(_ok(*[(0.0, 1.0, 0)] * 20, (0.0, 60.0, 0), (60.0, 1.0, 1)), MOST_ROWS)
def test_costs_add_up_to_the_bill_in_any_order_of_rows(
    database: Engine,
    timings: list[tuple[float, float, int, int, Status, int]],
    rows_again: int,
) -> None:
    """Rows arrive in four batches, and after each batch the costs add up to the bill."""
    emptied(database)
    minutes = Minutes(database, PRICE)
    for at in every_5_s(780)[::3]:
        minutes.read_one(at, running=float(at < 600), steps=at, output=3 * at, input=9 * at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minute_jobs, "MAX_ROWS_AGAIN", rows_again)
        for batch, until in enumerate((200.0, 400.0, 600.0, 781.0)):
            minutes.take(
                *[
                    timed_request(
                        *(n, start, min(lasted, 600.0 - start)),
                        input_tokens=tokens_in, output_tokens=out, status=status,
                    )
                    for n, (start, lasted, tokens_in, out, status, when) in enumerate(timings)
                    if when == batch
                ]
            )  # fmt: skip
            windows = minutes.booked(until)
            assert adds_up(minutes, windows)
    assert billed_usd(windows) == pytest.approx(720 * A_SECOND_USD)


def test_a_minute_that_is_booked_again_keeps_its_gpu_figures(database: Engine) -> None:
    """Most GPU samples are kept only for some minutes."""
    minutes = Minutes(database, PRICE)
    sampled = gpu(30.0, 0.0)
    minutes.gpu_samples = [
        replace(sampled, facts={**sampled.facts, (gpu_facts.DRAM_ACTIVE.name, ()): 0.4})
    ]
    minutes.read(every_5_s(120), running=1.0, steps=1.0)
    (first,) = minutes.booked(91.0)
    minutes.gpu_samples = [gpu(100.0, 0.0)]
    minutes.take(timed_request(1, 10.0, 20.0))
    again, _ = minutes.booked(151.0)
    assert again.requests > first.requests
    assert (first.hardware_mbu, again.hardware_mbu) == (0.4, 0.4)
