"""Work and seconds of each phase, where rows tell of a part of what the engine did."""

from dataclasses import replace

import pytest

from agent.analysis.efficiency.engine_observation import observe
from agent.analysis.efficiency.phase_work import PhaseTotals
from agent.analysis.efficiency.request_activity import request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.window_efficiency import Utilisation
from agent.analysis.efficiency.work import decode_work
from agent.analysis.physics.roofline import Bound
from agent.records.engine import EngineSample
from agent.records.request import ProxyView, RequestRecord
from tests.analysis.cost.engine_days import (
    COUNTS,
    LLAMA_ON_H100,
    MINUTE,
    busy_readings,
    key,
    minute_row,
    reading,
    request,
    shares,
    window_of,
)
from tests.analysis.efficiency.test_minute_efficiency import SINGLE, found

# A request that decodes alone for ten seconds, a token every hundredth of one.
TEN_SECONDS = request(1, 20.0, prefill_s=0.5, decode_s=10.0, input_tokens=8, output_tokens=1001)


def totals(
    samples: list[EngineSample], rows: list[RequestRecord], serving: Serving = LLAMA_ON_H100
) -> PhaseTotals:
    told = found(samples, rows, serving).totals
    assert told is not None
    return told


def prefill(
    samples: list[EngineSample], rows: list[RequestRecord], serving: Serving = LLAMA_ON_H100
) -> Utilisation:
    """Prefill of the minute as it is booked."""
    used = window_of(minute_row(samples, rows, serving)).prefill
    assert used is not None
    return used


# Short prompts, one each half a second, and two streams that decode 100 tokens/s all the minute.
SHORT = [
    request(number, 0.5 * number, prefill_s=0.1, decode_s=0.0, input_tokens=64, output_tokens=1)
    for number in range(120)
]
STREAMS = [
    request(number, 0.0, prefill_s=0.0, decode_s=60.0, input_tokens=64, output_tokens=6001)
    for number in (1001, 1002)
]


@pytest.mark.parametrize("steps", [{"steps": 6000.0}, {}])
def test_short_prompts_beside_streams_are_bound_as_they_are_alone(steps: dict[str, float]) -> None:
    """In each step that computes one, all weights are read: they are 64 tokens at once."""
    alone = prefill(busy_readings(output=120, steps=120, input=7680, cached=0), SHORT)
    beside = prefill(busy_readings(output=12_122, input=7808, cached=0, **steps), SHORT + STREAMS)
    assert alone.bound is beside.bound is Bound.BANDWIDTH
    assert beside.mbu == pytest.approx(alone.mbu, rel=0.05)


def test_weights_that_both_phases_read_together_are_counted_once_for_both() -> None:
    readings = busy_readings(output=12_122, steps=6000, input=7808, cached=0)
    told = totals(readings, SHORT + STREAMS)
    weights = LLAMA_ON_H100.weight_bytes(6000, 12_000)
    kept = 2 * LLAMA_ON_H100.decode(64, 6001).bytes_moved
    assert told.shared_bytes == pytest.approx(weights * 122 / 6000)
    assert told.work.bytes_moved == pytest.approx(weights + kept, rel=1e-4)
    apart = told.prefill_work.bytes_moved + told.decode_work.bytes_moved
    assert apart == pytest.approx(weights * (1 + 122 / 6000) + kept, rel=1e-4)
    mbu = found(readings, SHORT + STREAMS).requests.mbu
    assert mbu == pytest.approx((weights + kept) / 60 / 3.35e12, rel=1e-4)


def test_prompts_that_share_a_step_read_its_weights_once() -> None:
    batch = [request(number, 10.0, input_tokens=64, output_tokens=1) for number in range(8)]
    told = totals(busy_readings(output=8, steps=1, input=512, cached=0), batch)
    assert told.prefill_work.bytes_moved == pytest.approx(LLAMA_ON_H100.weight_bytes(1, 512), 0.01)
    beside = totals(busy_readings(output=12_010, steps=6000, input=640), batch + STREAMS)
    # Each of the two streams has a prompt of its own, at the beginning.
    assert beside.prefill_work.bytes_moved == pytest.approx(
        (10 / 8) * told.prefill_work.bytes_moved, rel=0.01
    )


def test_a_prompt_whose_steps_give_nothing_yet_reads_the_weights_once() -> None:
    """Its chunks are steps that the engine does not count, and it is half done."""
    long = request(1, 50.0, prefill_s=20.0, decode_s=0.0, input_tokens=64, output_tokens=1)
    readings = busy_readings(output=0, steps=0, input=0, cached=0)
    half = LLAMA_ON_H100.weight_bytes(1, 64) / 2
    assert totals(readings, [long]).prefill_work.bytes_moved == pytest.approx(half, rel=0.01)
    assert prefill(readings, [long]).bound is Bound.BANDWIDTH


def full_for(*moments: float) -> list[EngineSample]:
    """An engine that decodes, and whose cache is full at some samples."""
    return [
        replace(
            sample,
            facts={
                **sample.facts,
                key(COUNTS["kv"]): 0.99 if sample.at in moments else 0.5,
                key(COUNTS["waiting"]): 3.0,
            },
        )
        for sample in busy_readings(output=6001, steps=6000, input=64, cached=0)
    ]


@pytest.mark.parametrize(
    ("moments", "bound"),
    [
        ((30.0,), Bound.BANDWIDTH),
        (tuple(range(30, 61, 5)), Bound.CAPACITY),
        (tuple(range(35, 61, 5)), Bound.BANDWIDTH),
    ],
)
def test_a_cache_that_is_full_most_of_the_time_is_what_bounds_decode(
    moments: tuple[float, ...], bound: Bound
) -> None:
    told = window_of(minute_row(full_for(*moments), STREAMS[:1], LLAMA_ON_H100))
    assert told.decode is not None
    assert told.busy is not None
    assert told.decode.bound is told.busy.bound is bound


def test_steps_for_requests_without_a_row_are_no_work_of_those_with_one() -> None:
    """The engine decodes all the minute, and the row tells of ten seconds of it."""
    readings = busy_readings(output=6000, steps=6000, input=8, cached=0)
    decode = window_of(minute_row(readings, [TEN_SECONDS], SINGLE)).decode
    assert decode is not None
    assert decode.mbu == pytest.approx(0.7, rel=0.01)


def test_steps_that_decode_for_others_are_no_work_of_a_prompt() -> None:
    """The row tells of one prompt and one token, and the engine decodes ten seconds for others."""
    prompt = request(1, 20.0, prefill_s=0.5, input_tokens=8, output_tokens=1)
    readings = busy_readings(output=1001, steps=1001, input=8, cached=0)
    told = totals(readings, [prompt], SINGLE)
    assert told.decode_work.bytes_moved == 0
    assert told.work.bytes_moved == pytest.approx(14e9, rel=0.02)
    assert prefill(readings, [prompt], SINGLE).mbu == pytest.approx(0.014, rel=0.02)


@pytest.mark.parametrize("counted", [{"steps": 6000.0}, {}])
def test_an_engine_at_work_for_nobody_that_is_known_has_no_figures(
    counted: dict[str, float],
) -> None:
    told = found(busy_readings(output=6000, input=8, cached=0, **counted), [], SINGLE)
    assert told.totals is None
    assert (told.requests.mfu, told.requests.mbu) == (None, None)


def test_the_last_step_of_an_engine_that_goes_idle_is_no_prefill() -> None:
    """It gives no token, and no prompt is computed in it."""
    quiet = [
        reading(at, running=float(at == 0), steps=float(at > 0), output=0, input=0)
        for at in range(0, 61, 5)
    ]
    told = totals(quiet, [], SINGLE)
    assert told.work.bytes_moved == 0


def test_prompts_of_unknown_length_do_not_make_others_fast() -> None:
    """Of answers that came whole nobody saw when the first token was there."""
    timed = request(1, 10.0, prefill_s=1.0, input_tokens=1000)
    whole = [
        request(number, 20.0, prefill_s=None, ttft_s=None, decode_s=None, input_tokens=1000)
        for number in range(2, 12)
    ]
    told = totals(busy_readings(output=231), [timed, *whole], SINGLE)
    assert told.prefill_s is None
    row = minute_row(busy_readings(output=231), [timed, *whole], SINGLE)
    assert window_of(row).prefill is None
    assert told.prefill_work.flops == pytest.approx(11 * 1000 * 13.8e9, rel=0.02)
    alone = totals(busy_readings(output=21), [timed], SINGLE)
    assert alone.prefill_s == pytest.approx(1.0)


def test_choices_of_one_request_go_on_from_its_prompt_each() -> None:
    """Eight answers of 500 tokens are eight requests, and not one answer of 4,000."""
    several = request(1, 10.0, input_tokens=100, output_tokens=4000, proxied=ProxyView(choices=8))
    (activity,) = request_activities([several])
    (single,) = request_activities([several._replace(output_tokens=500, proxied=None)])
    each = decode_work(single, LLAMA_ON_H100)
    together = decode_work(activity, LLAMA_ON_H100)
    assert together.bytes_moved == 8 * each.bytes_moved
    assert together.flops == 8 * each.flops
    assert activity.decoded_tokens == 8 * single.decoded_tokens


def test_choices_of_unequal_length_are_shared_out_to_the_last_token() -> None:
    several = request(1, 10.0, output_tokens=11, proxied=ProxyView(choices=3))
    (activity,) = request_activities([several])
    lengths = [LLAMA_ON_H100.decode(100, tokens).flops for tokens in (4, 4, 3)]
    assert decode_work(activity, LLAMA_ON_H100).flops == sum(lengths)
    assert activity.decoded_tokens == 8
    assert activity.output_in(activity.whole) == 11


def test_several_choices_of_one_request_are_seen_whole() -> None:
    """The engine counted 44 tokens, four of them with the first step: none is unseen."""
    rows = [request(1, 10.0, output_tokens=44, proxied=ProxyView(choices=4))]
    told = shares(busy_readings(output=44, input=100), rows)
    assert told.unseen == pytest.approx(0.0, abs=1e-9)
    assert told.output_tokens == pytest.approx(44)


def test_the_longest_of_several_choices_ends_their_decode() -> None:
    """The span that was joined is that of the first to end."""
    several = request(1, 10.0, decode_s=1.0, output_tokens=40, proxied=ProxyView(choices=4))
    (activity,) = request_activities([several])
    assert activity.decode == (several.started_at + 1.0, several.ended_at)


def test_a_counter_that_falls_alone_does_not_make_the_others_begin_anew() -> None:
    """A page that loses one series has not counted all its tokens in five seconds."""
    before, after = (
        reading(at, 1.0, running=1.0, output=1e9 + 10 * at, steps=1e9 + 10 * at, preemptions=fell)
        for at, fell in ((0.0, 5.0), (60.0, 3.0))
    )
    told = observe([before, after], MINUTE, max_gap_s=60.0)
    assert told.growth.output_tokens == pytest.approx(600)
    assert told.growth.steps == pytest.approx(600)


def test_another_process_counts_from_zero_also_where_it_counted_more() -> None:
    before, after = reading(0.0, 1.0, output=100.0), reading(60.0, 30.0, output=150.0)
    assert observe([before, after], MINUTE, max_gap_s=60.0).growth.output_tokens == 150


def test_the_minute_of_the_efficiency_page() -> None:
    """docs/efficiency.md: forty requests of 2,000 and 401 tokens in 44 s of a minute."""
    rows = [
        request(
            number,
            float(number),
            prefill_s=0.05,
            decode_s=4.0,
            input_tokens=2000,
            output_tokens=401,
        )._replace(ended_at=number + 4.05)
        for number in range(40)
    ]
    totals = {"output": 40 * 401.0, "input": 80_000.0, "cached": 0.0, "steps": 4040.0}
    readings = [
        reading(
            at, running=4.0 * (at < 44), **{k: min(at / 44, 1.0) * n for k, n in totals.items()}
        )
        for at in range(0, 61, 5)
    ]
    booked = minute_row(readings, rows, LLAMA_ON_H100)
    used = window_of(booked)
    assert (booked.busy_s, booked.prefill_s, booked.decode_s) == pytest.approx((45, 2, 43))
    for phase, mfu, mbu in (
        (used.prefill, 0.586, 0.093),
        (used.decode, 0.006, 0.453),
        (used.busy, 0.032, 0.433),
        (used, 0.024, 0.325),
    ):
        assert phase is not None
        assert (phase.mfu, phase.mbu) == pytest.approx((mfu, mbu), abs=0.0006)
