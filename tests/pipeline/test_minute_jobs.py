"""Computing minutes: from stored rows to stored minutes and the cost of requests."""

from dataclasses import replace
from math import fsum

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from agent.analysis.efficiency.work import Role
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.pipeline import minute_jobs
from agent.records.columns import MinuteRequests
from agent.records.gpu import Facts, GpuSample
from agent.records.prices import Electricity, Price
from agent.records.request import Status
from agent.store.observations import ObservationStore
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
from tests.sources.model_config.published import published
from tests.store.making import NOON, engine_sample


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
    assert minutes.computed(89.0) == [], "rows may still come"
    (window,) = minutes.computed(91.0)
    assert (window.from_at, window.until) == (NOON, NOON + 60)
    assert window.work.busy_s == pytest.approx(10.0)
    assert window.work.idle_s == pytest.approx(50.0)
    assert cost_of(window).computed == pytest.approx(2 * A_SECOND_USD)
    assert cost_of(window).decode == pytest.approx(8 * A_SECOND_USD)
    assert cost_of(window).idle == pytest.approx(50 * A_SECOND_USD)
    assert minutes.costs() == [pytest.approx(10 * A_SECOND_USD)]
    assert (window.requests, window.good_tokens, window.method) == (1, 26, "tokens")


def test_work_without_a_row_is_unseen_until_the_row_arrives(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    (before,) = minutes.computed(91.0)
    assert cost_of(before).unseen == pytest.approx(10 * A_SECOND_USD)
    minutes.take(timed_request(1, 20.0, 10.0))
    minutes.read(every_5_s(150, after=95.0), steps=0.0)
    after, _ = minutes.computed(151.0)
    assert cost_of(after).unseen == pytest.approx(0.0, abs=1e-12)
    assert minutes.costs() == [pytest.approx(10 * A_SECOND_USD)]
    assert (replace(after, ledger_closed=False), before) in minutes.published
    assert adds_up(minutes, [after, _])


def test_a_request_over_several_minutes_has_the_sum_of_its_shares(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(210):
        minutes.read_one(at, running=1.0, steps=at, output=at, input=0.0)
    minutes.take(timed_request(1, 0.0, 170.0, output_tokens=171, prefill_s=0.0, decode_s=170.0))
    assert adds_up(minutes, minutes.computed(91.0))
    assert minutes.rows()[0]["priced_at"] is None, "its last minute is not counted"
    windows = minutes.computed(211.0)
    assert len(windows) == 3
    assert adds_up(minutes, windows)
    (row,) = minutes.rows()
    assert row["priced_at"] == NOON + 211


@pytest.mark.parametrize(
    ("prices", "deployed"),
    [([], {}), ([PRICE], {"parallelism": None})],
    ids=["no price", "unknown number of GPUs"],
)
def test_without_a_price_or_a_number_of_gpus_there_is_time_and_no_cost(
    database: Engine, prices: list[Price], deployed: dict[str, None]
) -> None:
    minutes = Minutes(database, *prices, **deployed)
    one_request(minutes)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.computed(91.0)
    assert window.work.busy_s == pytest.approx(10.0)
    assert (window.bill_usd, window.cost) == (None, None)
    assert minutes.costs() == [None]


def test_computed_minutes_keep_their_price(database: Engine) -> None:
    first = Minutes(database, PRICE)
    one_request(first)
    first.computed(91.0)
    second = Minutes(database, Price(setting="b", engine="chat-0", gpu_hour_usd=36.0))
    second.take(timed_request(1, 20.0, 10.0))
    second.read(every_5_s(150, after=95.0), steps=0.0)
    windows = second.computed(151.0)
    assert [window.bill_usd for window in windows] == pytest.approx([0.06, 0.6])
    assert second.costs() == [pytest.approx(10 * A_SECOND_USD)]


def test_after_a_stop_every_missed_minute_is_computed_once(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read(every_5_s(65), steps=0.0)
    assert len(minutes.computed(91.0)) == 1
    restarted = Minutes(database, PRICE)
    restarted.read(every_5_s(1300, after=1200.0), steps=0.0)
    windows = restarted.computed(1291.0)
    assert [window.starts_at - NOON for window in windows] == [60 * n for n in range(21)]
    assert billed_usd(windows) == pytest.approx((windows[-1].until - NOON) * A_SECOND_USD)
    unread = fsum(window.work.unknown_s for window in windows)
    assert unread == pytest.approx(1200.0 - 65.0)
    assert fsum(window.work.idle_s for window in windows) == pytest.approx(60.0 + 5.0 + 60.0)
    assert len(restarted.published) == 20
    restarted.computed(1291.0)
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
    electricity = Electricity(usd_per_kwh=0.5, pue=1.2)
    minutes = Minutes(database, PRICE, electricity=electricity)
    minutes.gpu_samples = [gpu(-1.0, 1000.0), gpu(0.0, 1000.0), gpu(60.0, 37000.0), gpu(61.0, 9e9)]
    one_request(minutes)
    (window,) = minutes.computed(91.0)
    assert window.joules == pytest.approx(36000.0)
    assert window.electricity_usd == pytest.approx(0.01 * 0.5 * 1.2)
    assert window.bill_usd == pytest.approx(0.06 + 0.006)


def test_an_unreachable_database_is_reported_and_the_minute_is_computed_later(
    database: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    minutes = Minutes(database, PRICE)
    one_request(minutes)
    with monkeypatch.context() as away:
        away.setattr(database.dialect, "do_execute", _refused)
        minutes.compute(91.0)
    assert minutes.failures == ["engine_minutes"]
    assert len(minutes.computed(91.0)) == 1


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
    for minute in range(8):
        minutes.take(*[timed_request(10 * minute + n, 60 * minute + 5 * n, 4.0) for n in range(5)])
        minutes.compute(60 * minute + 91.0)


@pytest.mark.slow
def test_a_request_among_too_many_others_has_no_share_and_lowers_no_others(
    minutes: Minutes,
) -> None:
    crowd(minutes)
    before = minutes.costs()
    minutes.take(timed_request(900, 30.0, 480.0, output_tokens=900))
    windows = minutes.computed(571.0)
    assert minutes.costs() == [*before, None]
    assert adds_up(minutes, windows)


@pytest.mark.slow
def test_a_long_request_among_few_others_has_a_share_of_all_its_minutes(minutes: Minutes) -> None:
    minutes.take(timed_request(900, 30.0, 480.0, output_tokens=900))
    for at in range(91, 600, 60):
        minutes.compute(float(at))
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

    def counted(engine: str, from_at: float, until: float) -> MinuteRequests:
        found = rows_of(engine, from_at, until)
        read.append(found.rows.size)
        return found

    monkeypatch.setattr(minutes.store, "requests", counted)
    minutes.take(timed_request(900, 30.0, 480.0), timed_request(901, 400.0, 110.0))
    minutes.compute(571.0)
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


@pytest.fixture
def sampled_database(database: Engine) -> Engine:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(780)[::3]:
        minutes.read_one(at, running=float(at < 600), steps=at, output=3 * at, input=9 * at)
    return database


@pytest.mark.slow
@settings(
    max_examples=4,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(_REQUESTS, st.sampled_from([MOST_ROWS, minute_jobs.MAX_ROWS_AGAIN]))
# The last but one request ends in the last computed minute, and shares an earlier minute.
@example(_ok(*[(0.0, 1.0, 0)] * 8, (350.0, 190.0, 2), (260.0, 41.0, 0)), MOST_ROWS)
@example(_ok(*[(0.0, 1.0, 0)] * 8, (350.0, 195.0, 2), (260.0, 41.0, 0)), MOST_ROWS)
# A request that ends with its first minute, and a later one: as many rows as may be read again.
@example(_ok(*[(0.0, 1.0, 0)] * 20, (0.0, 60.0, 0), (60.0, 1.0, 1)), MOST_ROWS)
def test_costs_add_up_to_the_bill_in_any_order_of_rows(
    sampled_database: Engine,
    timings: list[tuple[float, float, int, int, Status, int]],
    rows_again: int,
) -> None:
    """Rows arrive in four batches, and after each batch the costs add up to the bill."""
    emptied(sampled_database)
    minutes = Minutes(sampled_database, PRICE)
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
            windows = minutes.computed(until)
            assert adds_up(minutes, windows)
    assert billed_usd(windows) == pytest.approx(720 * A_SECOND_USD)


def test_a_minute_that_is_computed_again_keeps_its_gpu_figures(database: Engine) -> None:
    """Most GPU samples are kept only for some minutes."""
    minutes = Minutes(database, PRICE)
    sampled = gpu(30.0, 0.0)
    minutes.gpu_samples = [
        replace(sampled, facts={**sampled.facts, (gpu_facts.DRAM_ACTIVE.name, ()): 0.4})
    ]
    minutes.read(every_5_s(120), running=1.0, steps=1.0)
    (first,) = minutes.computed(91.0)
    minutes.gpu_samples = [gpu(100.0, 0.0)]
    minutes.take(timed_request(1, 10.0, 20.0))
    again, _ = minutes.computed(151.0)
    assert again.requests > first.requests
    assert (first.hardware_mbu, again.hardware_mbu) == (0.4, 0.4)


def test_a_minute_has_the_model_that_was_served_in_it(database: Engine) -> None:
    """Also when a long request has it computed again after a change of the model."""
    minutes = Minutes(database, PRICE)
    for at in every_5_s(330):
        minutes.read_one(at, "llama" if at < 120 else "qwen", running=1.0, output=at, steps=at)
    first = minutes.computed(151.0)
    assert [window.model for window in first] == ["llama", "llama"]
    minutes.take(timed_request(1, 10.0, 200.0, output_tokens=200))
    windows = minutes.computed(331.0)
    assert [window.model for window in windows] == ["llama", "llama", "qwen", "qwen", "qwen"]
    assert adds_up(minutes, windows)


@pytest.mark.parametrize("every_s", [45.0, 300.0])
def test_an_engine_with_few_samples_has_each_minute_once(database: Engine, every_s: float) -> None:
    """Some samples fail, so that two consecutive minutes end at the same sample."""
    minutes = Minutes(database, PRICE, max_gap_s=3 * every_s)
    for at in (every_s * step for step in range(60) if step % 4 != 1):
        minutes.read_one(at, steps=at, output=at)
    minutes.take(timed_request(1, 100.0, 300.0, output_tokens=300))
    windows = minutes.computed(3 * every_s + 1500.0)
    assert minutes.failures == []
    edges = [(window.from_at, window.until) for window in windows]
    assert all(from_at < until for from_at, until in edges)
    assert [until for _, until in edges[:-1]] == [from_at for from_at, _ in edges[1:]]
    assert billed_usd(windows) == pytest.approx((windows[-1].until - NOON) * 0.001)
    assert adds_up(minutes, windows)


def busy(minutes: Minutes, until: float, after: float = 0.0) -> None:
    for at in every_5_s(until, after=after):
        minutes.read_one(at, running=1.0, steps=at, output=at, input=at)


def test_a_row_that_arrives_too_late_changes_no_other_costs(database: Engine) -> None:
    """The second row arrives hours after its start; the third is in time and computed with it."""
    minutes = Minutes(database, PRICE)
    minutes.take(timed_request(1, 1000.0, 100.0))
    minutes.read(every_5_s(8000)[::3], running=1.0, steps=1.0, output=1.0, input=1.0)
    assert adds_up(minutes, minutes.computed(7991.0))
    minutes.take(
        timed_request(2, 900.0, 3500.0, output_tokens=2000), timed_request(3, 4200.0, 100.0)
    )
    minutes.read([8055.0, 8100.0], running=1.0, steps=1.0, output=1.0, input=1.0)
    windows = minutes.computed(8151.0)
    costs = minutes.costs()
    assert [cost is None for cost in costs] == [False, True, False]
    assert adds_up(minutes, windows)


def test_a_request_that_ran_when_the_agent_stopped_has_all_its_minutes(
    database: Engine,
) -> None:
    """It shares stored minutes with a computed request, whose share is lower now."""
    minutes = Minutes(database, PRICE)
    busy(minutes, 620)
    minutes.take(timed_request(1, 400.0, 100.0, output_tokens=250))
    assert adds_up(minutes, minutes.computed(631.0))
    (before,) = minutes.costs()
    minutes.take(timed_request(2, 300.0, 315.0, output_tokens=500))
    restarted = Minutes(database, PRICE)
    busy(restarted, 2500, after=2400.0)
    windows = restarted.computed(2491.0)
    assert (restarted.costs()[0] or 0.0) < (before or 0.0)
    assert adds_up(restarted, windows)


@pytest.mark.parametrize("role", Role)
def test_an_engine_of_one_phase_has_no_work_of_the_other(database: Engine, role: Role) -> None:
    """Otherwise both engines of a request would count the same work."""
    minutes = Minutes(database, PRICE, model=published("llama-3.1-8b"), role=role)
    busy(minutes, 90)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.computed(91.0)
    (row,) = minutes.rows()
    assert (row["prefill_flops"] > 0) is (role is not Role.DECODE)
    assert (row["decode_flops"] > 0) is (role is not Role.PREFILL)
    assert row["prefill_flops"] == pytest.approx(window.work.prefill_flops)
    assert row["decode_flops"] == pytest.approx(window.work.decode_flops)
    assert (row["prefill_kv_bytes"] > 0, row["decode_kv_bytes"] > 0) == (
        row["prefill_flops"] > 0,
        row["decode_flops"] > 0,
    )


def test_a_minute_stores_the_engines_counts_beyond_its_rows(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(90):
        counts = {"output": 2 * at, "drafts": 3 * at, "accepted": at, "preemptions": at // 20}
        counts |= {"draft_runs": at / 2, "prefix_queries": 10 * at, "prefix_hits": 4 * at}
        counts |= {"steps": 2 * at, "step_tokens": 8 * at, "places": 4, "step_budget": 16}
        minutes.read_one(at, running=1.0, **counts)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.computed(91.0)
    assert window.work.output_tokens == pytest.approx(26)
    assert window.work.counted_output_tokens == pytest.approx(120)
    assert (window.work.draft_tokens, window.work.accepted_draft_tokens) == pytest.approx((180, 60))
    assert window.work.drafts == pytest.approx(30)
    found = (window.work.prefix_query_tokens, window.work.prefix_hit_tokens)
    assert found == pytest.approx((600, 240))
    assert (window.work.preemptions, window.work.cache_full_s) == pytest.approx((3, 15))
    found = (window.work.running_request_s, window.work.place_s)
    assert found == pytest.approx((60, 240))
    found = (window.work.limited_step_tokens, window.work.step_room_tokens)
    assert found == pytest.approx((480, 1920))


def test_tokens_of_an_engine_without_token_counters_are_those_of_its_rows(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read(every_5_s(90), running=1.0)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.computed(91.0)
    assert window.work.counted_output_tokens == pytest.approx(26)
    assert (window.work.draft_tokens, window.work.preemptions) == (None, None)


def test_after_the_clock_was_set_back_no_minute_is_computed_twice_and_late_requests_are_added(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read(every_5_s(300), steps=1.0)
    before = minutes.computed(331.0)
    assert len(before) == 5
    # Set back by three minutes.
    minutes.take(timed_request(1, 155.0, 10.0))
    assert minutes.computed(175.0) == before
    minutes.read(every_5_s(390, after=305.0), steps=1.0)
    after = minutes.computed(391.0)
    assert [each.starts_at for each in after] == [NOON + 60 * number for number in range(6)]
    assert [each.requests for each in after] == [0, 0, 1, 0, 0, 0]
    assert adds_up(minutes, after)


def test_a_row_of_unknown_cached_tokens_has_the_engines_cached_share(
    database: Engine,
) -> None:
    """Its FLOPs are those of its minutes, not those of the whole prompt."""
    minutes = Minutes(database, PRICE, model=published("llama-3.1-8b"))
    for at in every_5_s(90):
        done = float(at > 20)
        minutes.read_one(at, output=26 * done, input=1000 * done, cached=800 * done)
    tokens = {"input_tokens": 1000, "output_tokens": 26}
    minutes.take(timed_request(1, 20.0, 10.0, **tokens, cached_tokens=None))
    (window,) = minutes.computed(91.0)
    (row,) = minutes.rows()
    assert row["prefill_flops"] == pytest.approx(window.work.prefill_flops)
    assert row["prefill_flops"] == pytest.approx(200 * 14e9, rel=0.05)


def test_a_late_row_that_began_while_a_minute_s_last_sample_was_read_leaves_it_idle(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(150):
        done = {"steps": 26.0, "output": 26.0, "input": 100.0} if at > 60 else {}
        nothing = dict.fromkeys(("steps", "output", "input"), 0.0)
        minutes.read_one(at, running=float(at == 60), **(nothing | done))
    (before,) = minutes.computed(91.0)
    assert cost_of(before).unseen == pytest.approx(0.005)
    minutes.take(timed_request(1, 60.2, 1.0))
    after, _ = minutes.computed(151.0)
    assert cost_of(after).unseen == 0.0
    assert cost_of(after).idle == pytest.approx(0.06)
    assert minutes.costs() == [pytest.approx(0.001)]


def test_kv_bytes_use_the_width_that_the_engine_reports(database: Engine) -> None:
    minutes = Minutes(database, PRICE, model=published("llama-3.1-8b"))
    busy(minutes, 90)
    width: Facts = {(fact.KV_VALUE_BYTES.name, ()): 1.0}
    ObservationStore(database, "agent-0").write_engine_sample(engine_sample(NOON + 57, facts=width))
    minutes.take(timed_request(1, 20.0, 10.0))
    minutes.compute(91.0)
    # 100 tokens are written, and read once in a prefill of one chunk; of 32 layers with 8 heads.
    (row,) = minutes.rows()
    assert row["prefill_kv_bytes"] == pytest.approx(2 * 100 * 32 * 2 * 8 * 128)
