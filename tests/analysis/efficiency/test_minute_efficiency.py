"""MFU, MBU and the roofline of a minute."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.efficiency.minute_efficiency import MinuteEfficiency, minute_efficiency
from agent.analysis.efficiency.serving import Role, Serving
from agent.analysis.efficiency.time_range import TimeRange
from agent.analysis.physics.roofline import Bound
from agent.analysis.physics.traffic import step_weight_bytes
from agent.catalog import gpu_facts
from agent.catalog.hardware import GpuModel
from agent.catalog.precision import Precision
from agent.records.engine import EngineSample
from agent.records.gpu import GpuSample
from agent.records.model import (
    Attention,
    LayerGroup,
    ModelShape,
    Parallelism,
    WeightBlock,
    WeightFormat,
)
from agent.records.request import RequestRecord
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    MINUTE,
    UNKNOWN,
    busy_readings,
    minute_row,
    reading,
    request,
    seen,
    window_of,
)
from tests.sources.model_config.published import published

BF16 = WeightFormat(16, Precision.BF16)
SEVEN_BILLION = ModelShape(
    architecture="dense",
    embedding=WeightBlock(name="embedding", parameters=100_000_000, format=BF16),
    head=None,
    groups=(
        LayerGroup(
            layers=1,
            attention=Attention(
                kv_heads=1,
                values_per_kv_head=2,
                prefill_flops_per_pair=4,
                decode_flops_per_pair=4,
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


def found(
    samples: list[EngineSample],
    rows: list[RequestRecord],
    serving: Serving = LLAMA_ON_H100,
    gpus: list[GpuSample] | None = None,
    window: TimeRange = MINUTE,
) -> MinuteEfficiency:
    return minute_efficiency(seen(samples, window), rows, serving, gpus or [])


def gpu(at: float, name: str = "a", clock: float = 1980e6, **activity: float) -> GpuSample:
    told = {"tensor": gpu_facts.TENSOR_ACTIVE, "dram": gpu_facts.DRAM_ACTIVE}
    return GpuSample(
        gpu=name,
        index=0,
        name="NVIDIA H100 80GB HBM3",
        at=at,
        facts={
            **{(told[key].name, ()): value for key, value in activity.items()},
            (gpu_facts.CLOCK.name, ("sm",)): clock,
            (gpu_facts.CLOCK_MAX.name, ("sm",)): 1980e6,
        },
    )


# A single stream at 100 tokens/s for a minute, a token a step.
STREAM = [request(1, 0.0, prefill_s=0.0, decode_s=60.0, input_tokens=1, output_tokens=6001)]
STREAM_READINGS = busy_readings(output=6001, steps=6000, input=1, cached=0)
SINGLE = Serving(model=SEVEN_BILLION, gpu=TWO_TB_PER_S)


@pytest.mark.parametrize("readings", [STREAM_READINGS, busy_readings(output=6001)])
def test_seven_billion_weights_at_100_tokens_a_second_use_70_percent_of_2_tb(
    readings: list[EngineSample],
) -> None:
    told = found(readings, STREAM, SINGLE)
    booked = window_of(minute_row(readings, STREAM, SINGLE))
    assert booked.decode is not None
    assert booked.decode.mbu == pytest.approx(0.7, rel=0.001)
    assert told.requests.mbu == pytest.approx(0.7, rel=0.001)
    assert booked.decode.bound is Bound.BANDWIDTH
    assert booked.steps == {"counted" if readings is STREAM_READINGS else "estimated"}


def test_two_gpus_halve_the_share_that_the_same_stream_takes() -> None:
    pair = Serving(model=SEVEN_BILLION, gpu=TWO_TB_PER_S, parallelism=Parallelism(pipeline=2))
    assert found(STREAM_READINGS, STREAM, pair).requests.mbu == pytest.approx(0.35, rel=0.001)


def test_half_the_bits_of_weights_take_half_the_bandwidth() -> None:
    (group,) = SEVEN_BILLION.groups
    (block,) = group.blocks
    fp8 = replace(block, format=WeightFormat(8, Precision.BF16))
    model = replace(SEVEN_BILLION, groups=(replace(group, blocks=(fp8,)),))
    told = found(STREAM_READINGS, STREAM, Serving(model=model, gpu=TWO_TB_PER_S))
    assert told.requests.mbu == pytest.approx(0.7 * 7.1 / 14, rel=0.001)


# Prompts of 4,000 tokens one after the other, each in half a second, one token out of each.
PROMPTS = [
    request(number, number * 0.5, prefill_s=0.5, input_tokens=4000, output_tokens=1)
    for number in range(120)
]
PROMPT_READINGS = busy_readings(output=120, steps=120, input=480_000, cached=0)


def test_prefill_is_compute_bound_and_its_flops_are_those_of_its_prompts() -> None:
    booked = window_of(minute_row(PROMPT_READINGS, PROMPTS, LLAMA_ON_H100))
    assert booked.decode is None
    assert booked.prefill is not None
    # 4,000 tokens of 13.96 GFLOP, and 4 x 32 x 128 x 32 FLOPs for each of 8 million pairs.
    assert booked.prefill.mfu == pytest.approx(120 * (55.8e12 + 4.2e12) / 60 / 989.4e12, rel=0.01)
    assert booked.prefill.bound is Bound.COMPUTE
    assert booked.prefill.position is not None
    assert booked.prefill.position.achieved_flops_per_s == pytest.approx(120e12, rel=0.01)


def test_a_phase_counts_the_time_in_which_it_went_on_and_the_whole_the_minute() -> None:
    half = [row for row in PROMPTS if row.started_at < 30]
    readings = busy_readings(output=60, steps=60, input=240_000, cached=0)
    row = minute_row(readings, half, LLAMA_ON_H100)
    assert row.prefill_s == pytest.approx(30)
    prefill = window_of(row).prefill
    assert prefill is not None
    assert prefill.achieved_flops_per_s == pytest.approx(120e12, rel=0.01)
    assert found(readings, half).requests.mfu == pytest.approx((prefill.mfu or 0) / 2)


def test_cached_tokens_are_no_work_of_prefill() -> None:
    cached = [row._replace(cached_tokens=3000) for row in PROMPTS]
    whole = found(PROMPT_READINGS, PROMPTS).requests.mfu
    part = found(busy_readings(output=120, steps=120, input=480_000, cached=360_000), cached)
    assert whole is not None
    assert part.requests.mfu is not None
    assert part.requests.mfu < whole * 0.3


def test_prompts_of_which_no_row_tells_what_was_cached_have_the_engine_s_share() -> None:
    readings = busy_readings(output=120, steps=120, input=480_000, cached=360_000)
    told = found(readings, [row._replace(cached_tokens=3000) for row in PROMPTS])
    silent = found(readings, [row._replace(cached_tokens=None) for row in PROMPTS])
    assert silent.requests == told.requests


def test_decode_with_a_full_cache_is_bound_by_memory_capacity() -> None:
    readings = [replace(sample, facts={**sample.facts, **_waiting()}) for sample in STREAM_READINGS]
    decode = window_of(minute_row(readings, STREAM, SINGLE)).decode
    assert decode is not None
    assert decode.bound is Bound.CAPACITY


def _waiting() -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        ("llm_engine_kv_cache_usage_ratio", ()): 0.99,
        ("llm_engine_requests_waiting", ()): 3.0,
    }


def test_the_engine_s_counters_are_of_one_gpu_of_each_rank() -> None:
    readings = busy_readings(flops=2 * 60 * 98.94e12, read=2 * 60 * 1e12, written=0)
    readings = [
        replace(sample, facts={**sample.facts, ("llm_engine_data_parallel_ranks", ()): 2.0})
        for sample in readings
    ]
    spread = replace(LLAMA_ON_H100, parallelism=Parallelism(tensor=4, data=2))
    told = found(readings, [], spread).engine
    assert told.mfu == pytest.approx(0.1)
    assert told.mbu == pytest.approx(1 / 3.35)


def test_the_engine_s_counters_count_for_the_time_in_which_they_were_read() -> None:
    half = busy_readings(flops=60 * 98.94e12)[:7]
    told = found(half, []).engine
    assert told.mfu == pytest.approx(0.1)
    assert told.mbu is None


def test_a_clock_above_its_maximum_makes_no_more_of_the_activity() -> None:
    assert found([], [], gpus=[gpu(10.0, clock=2100e6, tensor=0.5)]).hardware.mfu == 0.5


def test_the_hardware_s_activity_is_at_the_clock_it_had_and_over_all_gpus() -> None:
    samples = [
        gpu(10.0, tensor=0.4, dram=0.6),
        gpu(20.0, tensor=0.6, dram=0.8),
        gpu(20.0, "b", clock=990e6, tensor=0.2, dram=0.1),
        gpu(0.0, tensor=1.0, dram=1.0),
        gpu(61.0, tensor=1.0, dram=1.0),
    ]
    told = found([], [], gpus=samples).hardware
    assert told.mfu == pytest.approx((0.5 + 0.1) / 2)
    assert told.mbu == pytest.approx((0.7 + 0.1) / 2)


def test_what_is_not_known_is_none() -> None:
    told = found(STREAM_READINGS, STREAM, UNKNOWN)
    assert told.totals is None
    for view in (told.requests, told.engine, told.hardware):
        assert (view.mfu, view.mbu) == (None, None)
    assert told.disagreements == ()


def test_a_gpu_without_a_peak_for_the_model_still_has_a_bandwidth() -> None:
    no_peak = replace(TWO_TB_PER_S, peak_flops_per_s={})
    serving = Serving(model=SEVEN_BILLION, gpu=no_peak)
    told = found(STREAM_READINGS, STREAM, serving)
    assert told.requests.mfu is None
    assert told.requests.mbu == pytest.approx(0.7, rel=0.001)
    decode = window_of(minute_row(STREAM_READINGS, STREAM, serving)).decode
    assert decode is not None
    assert decode.bound is None


def minute(running: float, moments: Iterable[float] = range(0, 61, 5)) -> list[EngineSample]:
    """Readings whose counters stand still."""
    return [reading(at, running=running, output=7.0, steps=7.0) for at in moments]


def test_an_idle_minute_was_not_used_at_all() -> None:
    told = found(minute(0.0), []).requests
    assert (told.mfu, told.mbu) == (0, 0)


@pytest.mark.parametrize(
    "readings",
    [
        [],
        [replace(sample, facts={}) for sample in minute(0.0)],
        # A quarter of an hour without a sample, in which the engine counted thousands of tokens.
        [reading(-400.0, running=1.0, output=0.0), reading(500.0, running=1.0, output=90_000.0)],
        minute(0.0, range(0, 26, 5)),
    ],
)
def test_of_time_that_was_not_read_no_use_is_told(readings: list[EngineSample]) -> None:
    told = found(readings, [])
    assert told.totals is None
    assert (told.requests.mfu, told.requests.mbu) == (None, None)


def test_use_is_over_the_time_that_is_known() -> None:
    """For a third of the minute the engine was not read, and no request was at work."""
    prompts = [row for row in PROMPTS if row.started_at < 20]
    readings = [sample for sample in PROMPT_READINGS if sample.at <= 40]
    whole = found(PROMPT_READINGS, prompts).requests
    part = found(readings, prompts).requests
    assert whole.mfu is not None
    assert part.mfu == pytest.approx(whole.mfu * 60 / 40)


def test_steps_of_a_batch_are_estimated_from_how_many_decode_at_once() -> None:
    batch = [row._replace(span_id=f"{number:016x}") for number in range(10) for row in STREAM]
    alone = found(busy_readings(), STREAM, SINGLE).requests.mbu
    together = found(busy_readings(), batch, SINGLE).requests.mbu
    assert together == pytest.approx(alone, rel=0.001)


def test_replicas_read_their_weights_each_and_share_experts() -> None:
    moe = published("deepseek-v3")
    dense_bytes = step_weight_bytes(moe, 0)
    # 1,000 steps of 8 tokens are 125 of all eight ranks together, of 64.
    experts_bytes = step_weight_bytes(moe, 64) - dense_bytes
    spread = Serving(model=moe, parallelism=Parallelism(data=8)).weight_bytes(1000, 8000)
    assert spread == pytest.approx(1000 * dense_bytes + 125 * experts_bytes)


def test_kv_heads_that_are_replicated_are_read_by_every_gpu() -> None:
    few, many = (replace(LLAMA_ON_H100, parallelism=Parallelism(tensor=ways)) for ways in (8, 16))
    assert many.decode(100, 50).bytes_moved == 2 * few.decode(100, 50).bytes_moved
    assert many.prefill(100, 50).bytes_moved == 2 * few.prefill(100, 50).bytes_moved


def test_decode_counts_the_time_in_which_any_request_decoded() -> None:
    rows = [request(number, 10.0 * number) for number in (1, 2)]
    totals = found(busy_readings(output=42), rows).totals
    assert totals is not None
    assert totals.decode_s == pytest.approx(8)


@pytest.mark.parametrize(("role", "kept"), [(Role.PREFILL, "prefill"), (Role.DECODE, "decode")])
def test_an_engine_of_one_phase_has_no_work_of_the_other(role: Role, kept: str) -> None:
    rows = [request(1, 10.0)]
    one = found(busy_readings(), rows, replace(LLAMA_ON_H100, role=role)).totals
    both = found(busy_readings(), rows).totals
    assert one is not None
    assert both is not None
    of_phase = getattr(one, f"{kept}_work").flops
    assert of_phase == getattr(both, f"{kept}_work").flops > 0
    assert one.work.flops == of_phase


@given(st.floats(1, 59))
def test_work_of_a_minute_is_that_of_its_parts(cut: float) -> None:
    rows = [request(number, 5.0 * number) for number in range(12)]
    windows = (TimeRange(0.0, cut), TimeRange(cut, 60.0), MINUTE)
    works = [found([], rows, window=window).totals for window in windows]
    one, two, both = [told.work.flops for told in works if told is not None]
    assert one + two == pytest.approx(both)
