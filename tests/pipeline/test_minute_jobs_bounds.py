"""Minutes of engines with few samples, with outages, or with a new model."""

from math import fsum

import pytest
from sqlalchemy import Engine

from agent.analysis.efficiency.serving import Role
from agent.records.request import Status
from tests.pipeline.minutes import PRICE, Minutes, adds_up, billed_usd, every_5_s, timed_request
from tests.records.minutes import cost_of
from tests.sources.model_config.published import published
from tests.store.making import NOON


def test_a_minute_has_the_model_that_was_served_in_it(database: Engine) -> None:
    """Also when a long request has it booked again after a change of the model."""
    minutes = Minutes(database, PRICE)
    for at in every_5_s(330):
        minutes.read_one(at, "llama" if at < 120 else "qwen", running=1.0, output=at, steps=at)
    first = minutes.booked(151.0)
    assert [window.model for window in first] == ["llama", "llama"]
    minutes.take(timed_request(1, 10.0, 200.0, output_tokens=200))
    windows = minutes.booked(331.0)
    assert [window.model for window in windows] == ["llama", "llama", "qwen", "qwen", "qwen"]
    assert adds_up(minutes, windows)


@pytest.mark.parametrize("every_s", [30.0, 45.0, 100.0, 300.0])
def test_an_engine_with_few_samples_has_each_minute_once(database: Engine, every_s: float) -> None:
    """Some samples fail, so that two consecutive minutes end at the same sample."""
    minutes = Minutes(database, PRICE, max_gap_s=3 * every_s)
    for at in (every_s * step for step in range(60) if step % 4 != 1):
        minutes.read_one(at, steps=at, output=at)
    minutes.take(timed_request(1, 100.0, 300.0, output_tokens=300))
    windows = minutes.booked(3 * every_s + 1500.0)
    assert minutes.failures == []
    edges = [(window.from_at, window.until) for window in windows]
    assert all(from_at < until for from_at, until in edges)
    assert [until for _, until in edges[:-1]] == [from_at for from_at, _ in edges[1:]]
    assert billed_usd(windows) == pytest.approx((windows[-1].until - NOON) * 0.001)
    assert adds_up(minutes, windows)


def test_an_outage_during_a_minute_is_unknown_time(
    database: Engine,
) -> None:
    """Its counters are reset, and no tokens are counted twice."""
    minutes = Minutes(database, PRICE)
    for at in every_5_s(20):
        minutes.read_one(at, running=1.0, steps=1000 + at, output=1000 + at, input=0.0)
    for at in every_5_s(90, after=40.0):
        minutes.read_one(at, running=1.0, steps=at - 35, output=at - 35, input=0.0)
    minutes.take(timed_request(1, 0.0, 20.0, prefill_s=0.0, decode_s=20.0, output_tokens=21))
    minutes.take(timed_request(2, 35.0, 25.0, prefill_s=0.0, decode_s=25.0, output_tokens=26))
    windows = minutes.booked(91.0)
    assert windows[0].work.unknown_s == pytest.approx(15.0)
    assert fsum((windows[0].work.busy_s, windows[0].work.unknown_s)) == pytest.approx(60.0)
    assert cost_of(windows[0]).unseen == pytest.approx(0.0, abs=1e-9)
    assert adds_up(minutes, windows)


def busy(minutes: Minutes, until: float, after: float = 0.0) -> None:
    for at in every_5_s(until, after=after):
        minutes.read_one(at, running=1.0, steps=at, output=at, input=at)


def test_a_row_that_arrives_too_late_changes_no_other_costs(database: Engine) -> None:
    """The second row arrives hours after its start; the third is in time and booked with it."""
    minutes = Minutes(database, PRICE)
    minutes.take(timed_request(1, 1000.0, 100.0))
    minutes.read(every_5_s(8000)[::3], running=1.0, steps=1.0, output=1.0, input=1.0)
    assert adds_up(minutes, minutes.booked(7991.0))
    minutes.take(
        timed_request(2, 900.0, 3500.0, output_tokens=2000), timed_request(3, 4200.0, 100.0)
    )
    minutes.read([8055.0, 8100.0], running=1.0, steps=1.0, output=1.0, input=1.0)
    windows = minutes.booked(8151.0)
    costs = minutes.costs()
    assert [cost is None for cost in costs] == [False, True, False]
    assert adds_up(minutes, windows)


def test_a_request_that_ran_when_the_agent_stopped_for_hours_has_all_its_minutes(
    database: Engine,
) -> None:
    """It shares stored minutes with a booked request, whose share is lower now."""
    minutes = Minutes(database, PRICE)
    busy(minutes, 620)
    minutes.take(timed_request(1, 400.0, 100.0, output_tokens=250))
    assert adds_up(minutes, minutes.booked(631.0))
    (before,) = minutes.costs()
    minutes.take(timed_request(2, 300.0, 315.0, output_tokens=500))
    restarted = Minutes(database, PRICE)
    busy(restarted, 12100, after=12000.0)
    windows = restarted.booked(12091.0)
    assert (restarted.costs()[0] or 0.0) < (before or 0.0)
    assert adds_up(restarted, windows)


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
    (window,) = minutes.booked(91.0)
    (row,) = minutes.rows()
    assert row["prefill_flops"] == pytest.approx(window.work.prefill_flops)
    assert row["prefill_flops"] == pytest.approx(200 * 14e9, rel=0.05)


@pytest.mark.parametrize("role", Role)
def test_an_engine_of_one_phase_has_no_work_of_the_other(database: Engine, role: Role) -> None:
    """Otherwise both engines of a request would count the same work."""
    minutes = Minutes(database, PRICE, model=published("llama-3.1-8b"), role=role)
    busy(minutes, 90)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.booked(91.0)
    (row,) = minutes.rows()
    assert (row["prefill_flops"] > 0) is (role is not Role.DECODE)
    assert (row["decode_flops"] > 0) is (role is not Role.PREFILL)
    assert row["prefill_flops"] == pytest.approx(window.work.prefill_flops)
    assert row["decode_flops"] == pytest.approx(window.work.decode_flops)
    assert (row["prefill_kv_bytes"] > 0, row["decode_kv_bytes"] > 0) == (
        row["prefill_flops"] > 0,
        row["decode_flops"] > 0,
    )


def test_refused_requests_have_no_share_of_the_bill(database: Engine) -> None:
    """Each of the ten served requests costs the same as without them."""
    minutes = Minutes(database, PRICE)
    busy(minutes, 90)
    refused = dict.fromkeys(("queue_s", "prefill_s", "decode_s", "ttft_s", "output_tokens"))
    minutes.take(*[timed_request(number, 20.0, 10.0) for number in range(10)])
    minutes.take(
        *[
            timed_request(number, 20.0, 0.001, status=Status.THROTTLED, **refused)
            for number in range(10, 110)
        ]
    )
    windows = minutes.booked(91.0)
    assert windows[0].requests == 10
    assert adds_up(minutes, windows)


def test_a_minute_stores_the_engines_counts_beyond_its_rows(database: Engine) -> None:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(90):
        counts = {"output": 2 * at, "drafts": 3 * at, "accepted": at, "preemptions": at // 20}
        counts |= {"draft_runs": at / 2, "prefix_queries": 10 * at, "prefix_hits": 4 * at}
        counts |= {"steps": 2 * at, "step_tokens": 8 * at, "places": 4, "step_budget": 16}
        minutes.read_one(at, running=1.0, **counts)
    minutes.take(timed_request(1, 20.0, 10.0))
    (window,) = minutes.booked(91.0)
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
    (window,) = minutes.booked(91.0)
    assert window.work.counted_output_tokens == pytest.approx(26)
    assert (window.work.draft_tokens, window.work.preemptions) == (None, None)


def test_a_late_row_that_began_while_a_minute_s_last_sample_was_read_leaves_it_idle(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    for at in every_5_s(150):
        done = {"steps": 26.0, "output": 26.0, "input": 100.0} if at > 60 else {}
        nothing = dict.fromkeys(("steps", "output", "input"), 0.0)
        minutes.read_one(at, running=float(at == 60), **(nothing | done))
    (before,) = minutes.booked(91.0)
    assert cost_of(before).unseen == pytest.approx(0.005)
    minutes.take(timed_request(1, 60.2, 1.0))
    after, _ = minutes.booked(151.0)
    assert cost_of(after).unseen == 0.0
    assert cost_of(after).idle == pytest.approx(0.06)
    assert minutes.costs() == [pytest.approx(0.001)]


def test_after_the_clock_was_set_back_no_minute_is_booked_twice_and_late_requests_are_added(
    database: Engine,
) -> None:
    minutes = Minutes(database, PRICE)
    minutes.read(every_5_s(300), steps=1.0)
    before = minutes.booked(331.0)
    assert len(before) == 5
    # Set back by three minutes.
    minutes.take(timed_request(1, 155.0, 10.0))
    assert minutes.booked(175.0) == before
    minutes.read(every_5_s(390, after=305.0), steps=1.0)
    after = minutes.booked(391.0)
    assert [each.starts_at for each in after] == [NOON + 60 * number for number in range(6)]
    assert [each.requests for each in after] == [0, 0, 1, 0, 0, 0]
    assert adds_up(minutes, after)
