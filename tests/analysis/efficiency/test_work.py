"""Work and time of each phase when rows cover only a part of the engine's work."""

from dataclasses import replace
from math import fsum

import pytest

from agent.analysis.efficiency.engine_observation import observe
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.window_efficiency import Utilisation
from agent.analysis.efficiency.work import Serving, decode_work
from agent.analysis.physics import Bound
from agent.records.engine import EngineSample
from agent.records.minute import EngineWork
from agent.records.request import ProxyView, RequestRecord
from tests.analysis.cost.engine_days import (
    COUNTS,
    LLAMA_ON_H100,
    MINUTE,
    busy_samples,
    cost,
    engine_sample,
    key,
    minute_row,
    needed,
    request,
    samples_of,
    window_of,
    work,
)
from tests.analysis.efficiency.test_minute_efficiency import SINGLE, efficiency_of
from tests.records.columns import active

# A request that decodes alone for ten seconds, one token every 10 ms.
TEN_SECONDS = request(1, 20.0, prefill_s=0.5, decode_s=10.0, input_tokens=8, output_tokens=1001)


def totals(
    samples: list[EngineSample], rows: list[RequestRecord], serving: Serving = LLAMA_ON_H100
) -> EngineWork:
    return efficiency_of(samples, rows, serving).work


def prefill(
    samples: list[EngineSample], rows: list[RequestRecord], serving: Serving = LLAMA_ON_H100
) -> Utilisation:
    """Prefill of the computed minute."""
    utilisation = window_of(minute_row(samples, rows, serving)).prefill
    assert utilisation is not None
    return utilisation


# Short prompts, one each 0.5 s, and two streams that decode 100 tokens/s for the whole minute.
SHORT = [
    request(number, 0.5 * number, prefill_s=0.1, decode_s=0.0, input_tokens=64, output_tokens=1)
    for number in range(120)
]
STREAMS = [
    request(number, 0.0, prefill_s=0.0, decode_s=60.0, input_tokens=64, output_tokens=6001)
    for number in (1001, 1002)
]


@pytest.mark.parametrize("steps", [{"steps": 6000.0}, {}])
def test_short_prompts_have_the_same_bound_beside_streams_as_alone(steps: dict[str, float]) -> None:
    """Each step with a prompt of 64 tokens reads all weights."""
    alone = prefill(busy_samples(output=120, steps=120, input=7680, cached=0), SHORT)
    beside = prefill(busy_samples(output=12_122, input=7808, cached=0, **steps), SHORT + STREAMS)
    assert alone.bound is beside.bound is Bound.BANDWIDTH
    assert beside.mbu == pytest.approx(alone.mbu, rel=0.05)


def test_weights_read_by_both_phases_in_one_step_are_counted_once() -> None:
    samples = busy_samples(output=12_122, steps=6000, input=7808, cached=0)
    result = totals(samples, SHORT + STREAMS)
    weights = LLAMA_ON_H100.weight_bytes(6000, 12_000)
    cache_bytes = 2 * LLAMA_ON_H100.decode(64, 6001).bytes_moved
    assert result.shared_bytes == pytest.approx(weights * 122 / 6000)
    assert needed(result).bytes_moved == pytest.approx(weights + cache_bytes, rel=1e-4)
    apart = (result.prefill_bytes, result.decode_bytes)
    assert fsum(each or 0.0 for each in apart) == pytest.approx(
        weights * (1 + 122 / 6000) + cache_bytes, rel=1e-4
    )
    mbu = efficiency_of(samples, SHORT + STREAMS).requests.mbu
    assert mbu == pytest.approx((weights + cache_bytes) / 60 / 3.35e12, rel=1e-4)


def test_prompts_that_share_a_step_read_its_weights_once() -> None:
    batch = [request(number, 10.0, input_tokens=64, output_tokens=1) for number in range(8)]
    result = totals(busy_samples(output=8, steps=1, input=512, cached=0), batch)
    assert result.prefill_bytes == pytest.approx(LLAMA_ON_H100.weight_bytes(1, 512), 0.01)
    beside = totals(busy_samples(output=12_010, steps=6000, input=640), batch + STREAMS)
    # Each of the two streams starts with its own prompt.
    assert beside.prefill_bytes == pytest.approx((10 / 8) * (result.prefill_bytes or 0.0), rel=0.01)


def test_a_prompt_without_output_yet_reads_the_weights_once() -> None:
    """The engine does not count the steps of its chunks. Half of it is in this minute."""
    long = request(1, 50.0, prefill_s=20.0, decode_s=0.0, input_tokens=64, output_tokens=1)
    samples = busy_samples(output=0, steps=0, input=0, cached=0)
    half = LLAMA_ON_H100.weight_bytes(1, 64) / 2
    assert totals(samples, [long]).prefill_bytes == pytest.approx(half, rel=0.01)
    assert prefill(samples, [long]).bound is Bound.BANDWIDTH


def full_for(*times: float) -> list[EngineSample]:
    """Samples of an engine that decodes; its cache is full at these times."""
    return [
        replace(
            sample,
            facts={
                **sample.facts,
                key(COUNTS["kv"]): 0.99 if sample.at in times else 0.5,
                key(COUNTS["waiting"]): 3.0,
            },
        )
        for sample in busy_samples(output=6001, steps=6000, input=64, cached=0)
    ]


@pytest.mark.parametrize(
    ("times", "bound"),
    [
        ((30.0,), Bound.BANDWIDTH),
        (tuple(range(30, 61, 5)), Bound.CAPACITY),
        (tuple(range(35, 61, 5)), Bound.BANDWIDTH),
    ],
)
def test_decode_is_bound_by_capacity_when_the_cache_is_full_most_of_the_time(
    times: tuple[float, ...], bound: Bound
) -> None:
    window = window_of(minute_row(full_for(*times), STREAMS[:1], LLAMA_ON_H100))
    assert window.decode is not None
    assert window.busy is not None
    assert window.decode.bound is window.busy.bound is bound


def test_steps_of_requests_without_a_row_are_no_work_of_other_requests() -> None:
    """The engine decodes for the whole minute; the row covers ten seconds."""
    samples = busy_samples(output=6000, steps=6000, input=8, cached=0)
    decode = window_of(minute_row(samples, [TEN_SECONDS], SINGLE)).decode
    assert decode is not None
    assert decode.mbu == pytest.approx(0.7, rel=0.01)


def test_decode_steps_of_other_requests_are_no_work_of_a_prompt() -> None:
    """The row has one prompt and one token; the engine decodes ten seconds for other requests."""
    prompt = request(1, 20.0, prefill_s=0.5, input_tokens=8, output_tokens=1)
    samples = busy_samples(output=1001, steps=1001, input=8, cached=0)
    result = totals(samples, [prompt], SINGLE)
    assert result.decode_bytes == 0
    assert needed(result).bytes_moved == pytest.approx(14e9, rel=0.02)
    assert prefill(samples, [prompt], SINGLE).mbu == pytest.approx(0.014, rel=0.02)


@pytest.mark.parametrize("counted", [{"steps": 6000.0}, {}])
def test_a_busy_engine_without_rows_has_no_utilisation(
    counted: dict[str, float],
) -> None:
    efficiency = efficiency_of(busy_samples(output=6000, input=8, cached=0, **counted), [], SINGLE)
    assert efficiency.work.needed is None
    assert (efficiency.requests.mfu, efficiency.requests.mbu) == (None, None)


def test_the_last_step_before_idle_time_is_no_prefill() -> None:
    """The step has no token and no prompt."""
    quiet = [
        engine_sample(at, running=float(at == 0), steps=float(at > 0), output=0, input=0)
        for at in range(0, 61, 5)
    ]
    result = totals(quiet, [], SINGLE)
    assert needed(result).bytes_moved == 0


def test_prompts_of_unknown_duration_make_the_prefill_time_unknown() -> None:
    """Responses without a stream have no time of a first token."""
    timed = request(1, 10.0, prefill_s=1.0, input_tokens=1000)
    whole = [
        request(number, 20.0, prefill_s=None, ttft_s=None, decode_s=None, input_tokens=1000)
        for number in range(2, 12)
    ]
    result = totals(busy_samples(output=231), [timed, *whole], SINGLE)
    assert result.prefill_s is None
    row = minute_row(busy_samples(output=231), [timed, *whole], SINGLE)
    assert window_of(row).prefill is None
    assert result.prefill_flops == pytest.approx(11 * 1000 * 13.8e9, rel=0.02)
    alone = totals(busy_samples(output=21), [timed], SINGLE)
    assert alone.prefill_s == pytest.approx(1.0)


def test_each_choice_of_a_request_starts_from_its_prompt() -> None:
    """Eight choices of 500 tokens need the work of eight requests, not of one with 4,000 tokens."""
    several = request(1, 10.0, input_tokens=100, output_tokens=4000, proxied=ProxyView(choices=8))
    activity = active([several])
    single = active([several._replace(output_tokens=500, proxied=None)])
    each = decode_work(single, LLAMA_ON_H100)
    together = decode_work(activity, LLAMA_ON_H100)
    assert together.kv_bytes == 8 * each.kv_bytes
    assert together.flops == 8 * each.flops
    assert activity.decoded_tokens == 8 * single.decoded_tokens


def test_tokens_of_choices_of_unequal_length_add_up() -> None:
    several = request(1, 10.0, output_tokens=11, proxied=ProxyView(choices=3))
    activity = active([several])
    lengths = [LLAMA_ON_H100.decode(100, tokens).flops for tokens in (4, 4, 3)]
    assert decode_work(activity, LLAMA_ON_H100).flops == sum(lengths)
    assert activity.decoded_tokens == 8
    assert activity.output_in(TimeRange(10.0, 15.0)) == 11


def test_all_choices_of_a_request_are_counted() -> None:
    """The engine counted 44 tokens, four of them in the first step: none is unseen."""
    rows = [request(1, 10.0, output_tokens=44, proxied=ProxyView(choices=4))]
    assert cost(samples_of(*rows), rows).cost.unseen == pytest.approx(0.0, abs=1e-9)
    assert work(samples_of(*rows), rows).output_tokens == pytest.approx(44)


def test_decode_ends_with_the_longest_choice() -> None:
    """The joined span is the one of the choice that ended first."""
    several = request(1, 10.0, decode_s=1.0, output_tokens=40, proxied=ProxyView(choices=4))
    activity = active([several])
    begin_at, end_at = (each.item() for each in activity.decode)
    assert (begin_at, end_at) == (several.started_at + 1.0, several.ended_at)


def test_a_counter_that_falls_alone_is_no_reset_of_the_others() -> None:
    """A lower count of one series does not reset the other counters."""
    before, after = (
        engine_sample(
            at, 1.0, running=1.0, output=1e9 + 10 * at, steps=1e9 + 10 * at, preemptions=preemptions
        )
        for at, preemptions in ((0.0, 5.0), (60.0, 3.0))
    )
    observed = observe([before, after], MINUTE, max_gap_s=60.0)
    assert observed.increase.output_tokens == pytest.approx(600)
    assert observed.increase.steps == pytest.approx(600)


def test_a_new_process_counts_from_zero_even_when_its_count_is_higher() -> None:
    before, after = engine_sample(0.0, 1.0, output=100.0), engine_sample(60.0, 30.0, output=150.0)
    assert observe([before, after], MINUTE, max_gap_s=60.0).increase.output_tokens == 150


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
    samples = [
        engine_sample(
            at, running=4.0 * (at < 44), **{k: min(at / 44, 1.0) * n for k, n in totals.items()}
        )
        for at in range(0, 61, 5)
    ]
    computed = minute_row(samples, rows, LLAMA_ON_H100)
    window = window_of(computed)
    done = computed.work
    assert (done.busy_s, done.prefill_s, done.decode_s) == pytest.approx((43.7, 2, 43), abs=0.03)
    for phase, mfu, mbu in (
        (window.prefill, 0.586, 0.093),
        (window.decode, 0.006, 0.453),
        (window.busy, 0.033, 0.446),
        (window, 0.024, 0.325),
    ):
        assert phase is not None
        assert (phase.mfu, phase.mbu) == pytest.approx((mfu, mbu), abs=0.0006)
