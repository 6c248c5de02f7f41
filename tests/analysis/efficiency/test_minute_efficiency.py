"""MFU, MBU and the roofline of a minute."""

from collections.abc import Iterable
from dataclasses import replace
from math import fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.efficiency.engine_observation import observe
from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.window_efficiency import Utilisation
from agent.analysis.efficiency.work import Serving, decode_work
from agent.analysis.physics import Bound, step_weight_bytes
from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts
from agent.catalog.hardware import GpuModel, Precision
from agent.records.engine import EngineSample
from agent.records.gpu import Facts, GpuSample
from agent.records.minute import EngineWork
from agent.records.model import (
    Attention,
    LayerGroup,
    ModelShape,
    Parallelism,
    WeightBlock,
    WeightFormat,
    Work,
)
from agent.records.request import ProxyView, RequestRecord
from tests.analysis.cost.engine_days import (
    COUNTS,
    LLAMA_ON_H100,
    MINUTE,
    UNKNOWN,
    busy_samples,
    cost,
    efficiency_in,
    engine_sample,
    key,
    minute_row,
    needed,
    observation,
    request,
    samples_of,
    window_of,
    work,
)
from tests.records.columns import active
from tests.sources.model_config.published import published

BF16 = WeightFormat(16, Precision.BF16)
SEVEN_BILLION = ModelShape(
    architecture="dense",
    embedding=WeightBlock(name="embedding", parameters=100_000_000, format=BF16),
    head=None,
    groups=(
        LayerGroup(
            layers=1,
            attentions=(
                Attention(
                    kv_heads=1,
                    values_per_kv_head=2,
                    prefill_flops_per_pair=4,
                    decode_flops_per_pair=4,
                ),
            ),
            blocks=(WeightBlock(name="all", parameters=6_900_000_000, format=BF16),),
            vectors=0,
        ),
    ),
    vectors=0,
    precision=Precision.BF16,
    compute=Precision.BF16,
    cache_bits=16,
)
TWO_TB_PER_S = GpuModel(
    name="two",
    memory_bytes=80_000_000_000,
    bandwidth_bytes_per_s=2e12,
    peak_flops_per_s={Precision.BF16: 312e12},
)


def efficiency_of(
    samples: list[EngineSample],
    rows: list[RequestRecord],
    serving: Serving = LLAMA_ON_H100,
    gpus: list[GpuSample] | None = None,
    window: TimeRange = MINUTE,
) -> MinuteEfficiency:
    return efficiency_in(observation(samples, window), rows, serving, gpus or [])


def gpu(at: float, name: str = "a", clock: float = 1980e6, **activity: float) -> GpuSample:
    metrics = {"tensor": gpu_facts.TENSOR_ACTIVE, "dram": gpu_facts.DRAM_ACTIVE}
    return GpuSample(
        gpu=name,
        index=0,
        name="NVIDIA H100 80GB HBM3",
        at=at,
        facts={
            **{(metrics[key].name, ()): value for key, value in activity.items()},
            (gpu_facts.CLOCK.name, ("sm",)): clock,
            (gpu_facts.CLOCK_MAX.name, ("sm",)): 1980e6,
        },
    )


# One stream at 100 tokens/s for a minute, one token per step.
STREAM = [request(1, 0.0, prefill_s=0.0, decode_s=60.0, input_tokens=1, output_tokens=6001)]
STREAM_SAMPLES = busy_samples(output=6001, steps=6000, input=1, cached=0)
SINGLE = Serving(model=SEVEN_BILLION, gpu=TWO_TB_PER_S)


@pytest.mark.parametrize("samples", [STREAM_SAMPLES, busy_samples(output=6001)])
def test_seven_billion_weights_at_100_tokens_a_second_use_70_percent_of_2_tb(
    samples: list[EngineSample],
) -> None:
    efficiency = efficiency_of(samples, STREAM, SINGLE)
    computed = window_of(minute_row(samples, STREAM, SINGLE))
    assert computed.decode is not None
    assert computed.decode.mbu == pytest.approx(0.7, rel=0.001)
    assert efficiency.requests.mbu == pytest.approx(0.7, rel=0.001)
    assert computed.decode.bound is Bound.BANDWIDTH
    assert computed.steps == {"counted" if samples is STREAM_SAMPLES else "estimated"}


# Prompts of 4,000 tokens one after another, half a second each, with one output token each.
PROMPTS = [
    request(number, number * 0.5, prefill_s=0.5, input_tokens=4000, output_tokens=1)
    for number in range(120)
]
PROMPT_SAMPLES = busy_samples(output=120, steps=120, input=480_000, cached=0)


def test_prefill_is_measured_over_its_own_time_and_the_total_over_the_minute() -> None:
    half = [row for row in PROMPTS if row.started_at < 30]
    samples = busy_samples(output=60, steps=60, input=240_000, cached=0)
    row = minute_row(samples, half, LLAMA_ON_H100)
    assert row.work.prefill_s == pytest.approx(30)
    computed = window_of(row)
    assert computed.decode is None
    assert computed.prefill is not None
    # 4,000 tokens of 13.96 GFLOP, and 4 x 32 x 128 x 32 FLOPs for each of 8 million pairs.
    mfu = computed.prefill.mfu or 0
    assert mfu == pytest.approx(2 * (55.8e12 + 4.2e12) / 989.4e12, rel=0.01)
    assert computed.prefill.bound is Bound.COMPUTE
    assert computed.prefill.position is not None
    for found in (computed.prefill, computed.prefill.position):
        assert found.achieved_flops_per_s == pytest.approx(120e12, rel=0.01)
    assert efficiency_of(samples, half).requests.mfu == pytest.approx(mfu / 2)


def test_the_engines_counters_are_per_gpu_of_a_rank_and_over_the_time_with_samples() -> None:
    samples = busy_samples(flops=2 * 60 * 98.94e12, read=2 * 60 * 1e12, written=0)
    ranks = ("llm_engine_data_parallel_ranks", ())
    samples = [replace(each, facts={**each.facts, ranks: 2.0}) for each in samples]
    spread = replace(LLAMA_ON_H100, parallelism=Parallelism(tensor=4, data=2))
    engine = efficiency_of(samples, [], spread).engine
    assert (engine.mfu, engine.mbu) == pytest.approx((0.1, 1 / 3.35))
    half = efficiency_of(busy_samples(flops=60 * 98.94e12)[:7], []).engine
    assert half.mfu == pytest.approx(0.1)
    assert half.mbu is None


def test_the_hardware_s_activity_is_scaled_by_its_clock_and_averaged_over_gpus() -> None:
    samples = [
        gpu(10.0, tensor=0.4, dram=0.6),
        gpu(60.0, tensor=0.6, dram=0.8),
        gpu(20.0, "b", clock=990e6, tensor=0.2, dram=0.1),
        gpu(0.0, tensor=1.0, dram=1.0),
        gpu(61.0, tensor=1.0, dram=1.0),
    ]
    hardware = efficiency_of([], [], gpus=samples).hardware
    assert hardware.mfu == pytest.approx((0.5 + 0.1) / 2)
    assert hardware.mbu == pytest.approx((0.7 + 0.1) / 2)


@pytest.mark.parametrize(
    ("at", "cause"),
    [(-200.0, "wrong_configuration"), (30.0, "slow_clock"), (90.0, "wrong_configuration")],
)
def test_a_slow_clock_explains_only_its_own_minute(at: float, cause: str) -> None:
    samples = [gpu(at, clock=500e6), gpu(10.0, tensor=0.02)]
    (found,) = efficiency_of(PROMPT_SAMPLES, PROMPTS, gpus=samples).disagreements
    assert (found.higher, found.lower, found.cause) == ("requests", "hardware", cause)


def test_unknown_figures_are_none() -> None:
    efficiency = efficiency_of(STREAM_SAMPLES, STREAM, UNKNOWN)
    assert efficiency.work.needed is None
    for view in (efficiency.requests, efficiency.engine, efficiency.hardware):
        assert (view.mfu, view.mbu) == (None, None)
    assert efficiency.disagreements == ()


def test_a_gpu_without_a_peak_for_the_model_has_a_bandwidth_and_no_bound() -> None:
    no_peak = Serving(model=SEVEN_BILLION, gpu=replace(TWO_TB_PER_S, peak_flops_per_s={}))
    decode = window_of(minute_row(STREAM_SAMPLES, STREAM, no_peak)).decode
    assert decode is not None
    assert (decode.mfu, decode.bound) == (None, None)
    assert decode.mbu == pytest.approx(0.7, rel=0.001)


def minute(running: float, times: Iterable[float] = range(0, 61, 5)) -> list[EngineSample]:
    """Samples with constant counters."""
    return [engine_sample(at, running=running, output=7.0, steps=7.0) for at in times]


def test_an_idle_minute_has_a_utilisation_of_zero() -> None:
    requests = efficiency_of(minute(0.0), []).requests
    assert (requests.mfu, requests.mbu) == (0, 0)
    still = engine_sample(0.0, running=0.0, input=7.0, output=7.0, first=1.0)
    counters = counters_of([replace(still, at=float(at)) for at in range(0, 61, 5)])
    assert counters == (0, 0)


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [replace(sample, facts={}) for sample in minute(0.0)],
        # 15 minutes without a sample, in which the engine counted thousands of tokens.
        [
            engine_sample(-400.0, running=1.0, output=0.0),
            engine_sample(500.0, running=1.0, output=90_000.0),
        ],
        minute(0.0, range(0, 26, 5)),
    ],
)
def test_time_without_samples_has_no_utilisation(samples: list[EngineSample]) -> None:
    efficiency = efficiency_of(samples, [])
    assert efficiency.work.needed is None
    assert (efficiency.requests.mfu, efficiency.requests.mbu) == (None, None)


def test_utilisation_is_over_the_known_time() -> None:
    """For a third of the minute there are no samples and no active request."""
    prompts = [row for row in PROMPTS if row.started_at < 20]
    samples = [sample for sample in PROMPT_SAMPLES if sample.at <= 40]
    whole = efficiency_of(PROMPT_SAMPLES, prompts).requests
    part = efficiency_of(samples, prompts).requests
    assert whole.mfu is not None
    assert part.mfu == pytest.approx(whole.mfu * 60 / 40)


def test_steps_of_a_batch_are_estimated_from_the_requests_that_decode_at_once() -> None:
    batch = [row._replace(span_id=f"{number:016x}") for number in range(10) for row in STREAM]
    alone = efficiency_of(busy_samples(), STREAM, SINGLE).requests.mbu
    together = efficiency_of(busy_samples(), batch, SINGLE).requests.mbu
    assert together == pytest.approx(alone, rel=0.001)


def test_each_replica_reads_its_weights_and_experts_are_shared() -> None:
    moe = published("deepseek-v3")
    dense_bytes = step_weight_bytes(moe, 0)
    # 1,000 steps of 8 tokens are 125 of all eight ranks together, of 64.
    experts_bytes = step_weight_bytes(moe, 64) - dense_bytes
    spread = Serving(model=moe, parallelism=Parallelism(data=8)).weight_bytes(1000, 8000)
    assert spread == pytest.approx(1000 * dense_bytes + 125 * experts_bytes)


def test_replicated_kv_heads_are_read_by_every_gpu() -> None:
    few, many = (replace(LLAMA_ON_H100, parallelism=Parallelism(tensor=ways)) for ways in (8, 16))
    assert many.decode(100, 50).bytes_moved == 2 * few.decode(100, 50).bytes_moved
    assert many.prefill(100, 50).bytes_moved == 2 * few.prefill(100, 50).bytes_moved


@given(st.floats(1, 59))
def test_the_work_of_two_parts_is_the_work_of_the_minute(cut: float) -> None:
    rows = [request(number, 5.0 * number) for number in range(12)]
    windows = (TimeRange(0.0, cut), TimeRange(cut, 60.0), MINUTE)
    works = [efficiency_of([], rows, window=window).work for window in windows]
    one, two, both = [needed(work).flops for work in works]
    assert one + two == pytest.approx(both)


@pytest.mark.parametrize(
    ("serving", "seconds", "expected"),
    [
        (LLAMA_ON_H100, 0.0, (None, None)),
        (LLAMA_ON_H100, -1.0, (None, None)),
        # Without a model only the bandwidth is known.
        (Serving(gpu=LLAMA_ON_H100.gpu), 1.0, (None, 1.0)),
    ],
)
def test_utilisation_without_a_time_or_a_peak_is_unknown(
    serving: Serving, seconds: float, expected: tuple[float | None, float | None]
) -> None:
    assert serving.utilisation(Work(1e12, 3.35e12), seconds) == expected


# Work and time of each phase when rows cover only a part of the engine's work

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


@pytest.mark.parametrize(("since", "bound"), [(30, Bound.CAPACITY), (35, Bound.BANDWIDTH)])
def test_decode_is_bound_by_capacity_when_the_cache_is_full_most_of_the_time(
    since: float, bound: Bound
) -> None:
    samples = [
        replace(each, facts={**each.facts, key(COUNTS["kv"]): 0.99, key(COUNTS["waiting"]): 3.0})
        if each.at >= since
        else each
        for each in busy_samples(output=6001, steps=6000, input=64, cached=0)
    ]
    window = window_of(minute_row(samples, STREAMS[:1], LLAMA_ON_H100))
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
def test_a_busy_engine_without_rows_has_no_utilisation(counted: dict[str, float]) -> None:
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
    """Three choices of 11 tokens together need the work of three requests."""
    several = request(1, 10.0, decode_s=1.0, output_tokens=11, proxied=ProxyView(choices=3))
    activity = active([several])
    apart = [LLAMA_ON_H100.decode(100, tokens) for tokens in (4, 4, 3)]
    together = decode_work(activity, LLAMA_ON_H100)
    assert together.flops == sum(each.flops for each in apart)
    assert together.kv_bytes == sum(each.bytes_moved for each in apart)
    assert activity.decoded_tokens == 8
    assert activity.output_in(TimeRange(10.0, 15.0)) == 11
    # The joined span is the one of the choice that ended first; decode ends with the longest.
    begin_at, end_at = (each.item() for each in activity.decode)
    assert (begin_at, end_at) == (several.started_at + 1.0, several.ended_at)


def test_all_choices_of_a_request_are_counted() -> None:
    """The engine counted 44 tokens, four of them in the first step: none is unseen."""
    rows = [request(1, 10.0, output_tokens=44, proxied=ProxyView(choices=4))]
    assert cost(samples_of(*rows), rows).cost.unseen == pytest.approx(0.0, abs=1e-9)
    assert work(samples_of(*rows), rows).output_tokens == pytest.approx(44)


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


# By an engine's token counters alone


def counters_of(samples: list[EngineSample]) -> tuple[float | None, float | None]:
    return efficiency_of(samples, []).counters


def test_counters_alone_say_what_requests_of_one_length_say() -> None:
    """120 requests with 1,000 new tokens, 500 cached ones and 50 output tokens, in 600 steps."""
    rows = [
        request(
            *(number, number * 0.4),
            input_tokens=1500,
            cached_tokens=500,
            output_tokens=50,
        )
        for number in range(120)
    ]
    counts = {"input": 180_000, "cached": 60_000, "output": 6000, "first": 120, "steps": 600}
    samples = busy_samples(**counts)
    by_rows = efficiency_of(samples, rows).requests
    mfu, mbu = counters_of(samples)
    assert mfu == pytest.approx(by_rows.mfu, rel=0.01)
    assert mbu == pytest.approx(by_rows.mbu, rel=0.1)


def test_seven_billion_weights_are_two_flops_a_token_by_counters() -> None:
    """14e9 FLOPs of each of 60 x 1,000 prompt tokens, on a GPU of 312 TFLOP/s, for a minute."""
    counts = {"input": 60_000, "cached": 0, "output": 60, "first": 60, "steps": 60}
    mfu, _ = efficiency_of(busy_samples(**counts), [], SINGLE).counters
    assert mfu == pytest.approx(60_000 * 14e9 / (60 * 312e12), rel=0.02)


@pytest.mark.parametrize(
    "counts",
    [
        {"output": 600.0, "input": 0.0, "first": 0.0},
        {"output": 600.0},
        {"output": 600.0, "input": 1000.0},
        {"output": 600.0, "input": 0.0, "cached": 0.0, "first": 0.0, "finished": 5.0},
    ],
    ids=["all began before", "no prompts counted", "no requests counted", "requests only end"],
)
def test_without_lengths_counters_say_nothing(counts: dict[str, float]) -> None:
    assert counters_of(busy_samples(**counts)) == (None, None)


def test_without_a_row_a_busy_window_has_no_utilisation_by_requests() -> None:
    busy = minute_row(busy_samples(input=60_000, cached=0, output=600, first=60, steps=60), ())
    idle = minute_row(minute(0.0), (), LLAMA_ON_H100)
    found = window_of(idle, replace(busy, peak_flops_per_s=1e15, counters_mfu=0.3))
    assert (found.mfu, found.counters[0]) == (None, 0.3)


def test_in_a_burst_that_drains_output_is_shared_by_all_that_run() -> None:
    """One request begins while 60 others, which began before, give 90,000 tokens."""
    counts = {"input": 1000.0, "cached": 0.0, "output": 90_000.0, "first": 1.0, "steps": 1500.0}
    alone = busy_samples(**counts)
    together = [
        replace(each, facts={**each.facts, (fact.REQUESTS_RUNNING.name, ()): 60.0})
        for each in alone
    ]
    _, mbu = counters_of(together)
    _, steady = counters_of([replace_first(each, 60.0, 60_000.0) for each in together])
    assert mbu == pytest.approx(steady, rel=0.3)


def replace_first(sample: EngineSample, first: float, prompt_tokens: float) -> EngineSample:
    """The same with as many requests begun by the minute's end, and their prompts."""
    share = sample.at / 60
    counts: Facts = {
        (fact.FIRST_TOKENS, ()): first * share,
        (fact.INPUT_TOKENS.name, ()): prompt_tokens * share,
    }
    return replace(sample, facts={**sample.facts, **counts})


def test_minutes_without_a_row_do_not_lower_the_use_by_requests() -> None:
    rows = [
        request(number, number * 0.4, input_tokens=1500, output_tokens=50) for number in range(120)
    ]
    counts = {"input": 180_000, "cached": 0, "output": 6000, "first": 120, "steps": 600}
    traced = minute_row(busy_samples(**counts), rows, LLAMA_ON_H100)
    plain = minute_row(
        busy_samples(input=60_000, cached=0, output=2000, first=60, steps=60), (), LLAMA_ON_H100
    )
    assert window_of(traced, *5 * [plain]).mfu == window_of(traced).mfu
