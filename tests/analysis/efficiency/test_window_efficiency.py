"""Efficiency over a window, and ratios of an engine's own counts."""

from random import Random

import pytest

from agent.analysis.efficiency.engine_observation import BatchUse
from agent.analysis.efficiency.request_activity import TimeRange
from agent.analysis.efficiency.window_efficiency import (
    BatchFill,
    batch_fill,
    prefix_cache,
    speculation,
)
from agent.analysis.physics import Bound
from agent.records.engine import EngineSample
from tests.analysis.cost.engine_days import MINUTE, engine_sample, observation, window_of
from tests.records.minutes import UNKNOWN, minute


def test_a_source_weights_engines_by_their_peaks() -> None:
    """The engine at half of its peaks has nine tenths of all FLOPs and bytes."""
    utilisations = {"engine_mfu": 0.5, "engine_mbu": 0.4, "hardware_mfu": 0.5, "hardware_mbu": 0.4}
    large = minute(0, **utilisations, peak_flops_per_s=900.0, peak_bytes_per_s=90.0)
    small = minute(0, engine="chat-1", **dict.fromkeys(utilisations, 0.0))
    found = window_of(large, small)
    assert found.engine == pytest.approx((0.45, 0.36))
    assert found.hardware == pytest.approx((0.45, 0.36))


def test_without_peaks_each_gpu_has_the_same_weight() -> None:
    large = minute(0, **UNKNOWN | {"gpus": 3, "hardware_mfu": 0.4})
    small = minute(0, engine="chat-1", **UNKNOWN | {"gpus": 1, "hardware_mfu": 0.0})
    assert window_of(large, small).hardware == pytest.approx((0.3, None))


def test_unknown_time_is_not_idle() -> None:
    idle = {"busy_s": 0.0, "idle_s": 60.0, "unknown_s": 0.0}
    work = ("prefill_s", "prefill_flops", "prefill_bytes", "decode_s", "decode_flops")
    still = minute(0, **idle, **dict.fromkeys((*work, "decode_bytes"), 0.0))
    unread = minute(1, busy_s=0.0, idle_s=0.0, unknown_s=60.0, **dict.fromkeys(work))
    assert (window_of(still).mfu, window_of(unread).mfu) == (0, None)
    assert window_of(still, unread).mfu == 0
    at_work = minute(2, idle_s=20.0, unknown_s=0.0)
    assert window_of(at_work, unread).mfu == pytest.approx(650 / 6000)


@pytest.mark.parametrize(
    ("cache_full_s", "bound"),
    [
        # Of 30 s of decoding in each minute.
        ([30.0], Bound.CAPACITY),
        ([30.0, 0.0], Bound.BANDWIDTH),
        ([30.0, 0.0, 10.0], Bound.BANDWIDTH),
        ([30.0, 0.0, 20.0], Bound.CAPACITY),
        ([60.0, *[0.0] * 59], Bound.BANDWIDTH),
    ],
)
def test_a_window_is_bound_by_capacity_when_the_cache_is_full_most_of_the_decode(
    cache_full_s: list[float], bound: Bound
) -> None:
    minutes = [minute(n, cache_full_s=full_s) for n, full_s in enumerate(cache_full_s)]
    decode = window_of(*minutes).decode
    assert decode is not None
    assert decode.bound is bound


def test_rejected_drafts_are_a_share_of_the_computed_tokens() -> None:
    drafted = minute(0, draft_tokens=150.0, accepted_draft_tokens=100.0)
    assert window_of(drafted, minute(1)).rejected_draft_share == pytest.approx(50 / 250)
    assert window_of(minute(1)).rejected_draft_share is None
    assert window_of(minute(0, draft_tokens=0.0, accepted_draft_tokens=0.0)).preemptions is None
    assert window_of(minute(0, preemptions=2.0), minute(1, preemptions=0.0)).preemptions == 2


def test_disagreements_are_from_the_newest_minute_of_all_engines() -> None:
    old = minute(0, disagreements=({"figure": "old"},))
    here = minute(1, disagreements=({"figure": "mfu"},))
    there = minute(1, engine="chat-1", disagreements=({"figure": "mbu"},))
    silent = minute(1, engine="chat-2")
    found = window_of(old, here, there, silent)
    assert [each["figure"] for each in found.disagreements] == ["mfu", "mbu"]


def test_minutes_without_a_prefill_time_do_not_count_for_prefill() -> None:
    """Their FLOPs count for the engine, but their prefill time is unknown."""
    found = window_of(minute(0), minute(1, prefill_s=None))
    assert found.prefill is not None
    assert found.prefill.mfu == pytest.approx(0.5)
    assert found.mfu == pytest.approx(2 * 650 / (110 * 100))
    assert window_of(minute(0, prefill_s=None)).prefill is None


# Drafted and accepted tokens of each draft; looked up and found tokens of each request.
_DRAFTS = ((3, 3), (3, 1), (3, 0), (2, 2), (3, 2), (3, 0), (3, 1))
_LOOKUPS = ((1000, 0), (1200, 1184), (640, 512), (90, 0))

_DRAFT_MINUTES = [
    minute(at, drafts=1.0, draft_tokens=float(drafted), accepted_draft_tokens=float(accepted))
    for at, (drafted, accepted) in enumerate(_DRAFTS)
]
_CACHE_MINUTES = [
    minute(at, prefix_query_tokens=float(queried), prefix_hit_tokens=float(hit))
    for at, (queried, hit) in enumerate(_LOOKUPS)
]


def test_acceptance_and_the_hit_ratio_are_those_of_vllms_own_log() -> None:
    half = minute(9, prefix_query_tokens=10_000.0, draft_tokens=1000.0)
    # A minute without one of the counters is left out.
    drafts, cache = speculation([*_DRAFT_MINUTES, half]), prefix_cache([*_CACHE_MINUTES, half])
    assert drafts is not None
    assert (drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens) == (7, 20, 9)
    assert drafts.mean_accepted_length == pytest.approx(2.29, abs=0.005)
    assert drafts.acceptance_rate == pytest.approx(0.45, abs=0.0005)
    assert cache is not None
    assert cache.hit_ratio == pytest.approx(0.579, abs=0.0005)
    assert (prefix_cache([half]), speculation([half]), prefix_cache([])) == (None, None, None)


def test_ratios_without_a_draft_or_a_lookup_are_unknown() -> None:
    counts = ("drafts", "draft_tokens", "accepted_draft_tokens")
    idle = minute(0, **dict.fromkeys((*counts, "prefix_query_tokens", "prefix_hit_tokens"), 0.0))
    drafts, cache = speculation([idle]), prefix_cache([idle])
    assert drafts is not None
    assert cache is not None
    assert (drafts.acceptance_rate, drafts.mean_accepted_length) == (None, None)
    assert (cache.query_tokens, cache.hit_ratio) == (0.0, None)


_STEP_S = 0.01
_PLACES, _BUDGET = 16, 64
_LIMITS = {"places": float(_PLACES), "step_budget": float(_BUDGET)}
_NOTHING = BatchUse(None, None, None, None)


def simulated_minute() -> tuple[list[EngineSample], float, float]:
    """A sample each second, and the mean of running requests and of tokens over all steps."""
    chance = Random(7)
    left: list[int] = []
    samples, ran, computed, steps = [], 0.0, 0, 0
    for tick in range(6001):
        if tick % 100 == 0:
            counts = {"running": float(len(left)), "steps": steps, "step_tokens": computed}
            samples.append(engine_sample(tick * _STEP_S, **counts, **_LIMITS))
        if chance.random() < 0.03 and len(left) < _PLACES:
            left.append(chance.randint(50, 800))
        ran += len(left) * _STEP_S
        steps += bool(left)
        computed += len(left)
        left = [tokens - 1 for tokens in left if tokens > 1]
    return samples, ran / 60, computed / steps


def test_the_batch_is_as_full_as_that_of_a_simulated_engine() -> None:
    samples, running, tokens = simulated_minute()
    use = observation(samples).batch
    found = batch_fill([minute(0, **use._asdict())])
    assert found is not None
    assert found.requests == pytest.approx(running / _PLACES, rel=0.02)
    assert found.tokens == pytest.approx(tokens / _BUDGET, rel=0.001)
    assert 0.05 < running / _PLACES < 0.95


def test_only_the_part_of_an_interval_that_is_in_the_minute_counts() -> None:
    counts = {"running": 4.0, "steps": 0.0, "step_tokens": 0.0}
    later = {"running": 4.0, "steps": 100.0, "step_tokens": 400.0}
    samples = [engine_sample(-5, **counts, **_LIMITS), engine_sample(5, **later, **_LIMITS)]
    use = observation(samples, TimeRange(0.0, 5.0)).batch
    assert use == BatchUse(20.0, 80.0, 200.0, 3200.0)


@pytest.mark.parametrize(
    "samples",
    [
        [engine_sample(at, running=1.0, steps=at, step_tokens=at) for at in (0, 5)],
        [engine_sample(at, **_LIMITS) for at in (0, 5)],
        [engine_sample(at, running=1.0, steps=at, step_tokens=at, **_LIMITS) for at in (0, 50)],
    ],
    ids=["no limit is known", "nothing is counted", "not read for long"],
)
def test_the_batch_is_unknown_where(samples: list[EngineSample]) -> None:
    assert observation(samples, MINUTE).batch == _NOTHING


def test_steps_fuller_than_their_budget_are_unknown() -> None:
    """vLLM counts the tokens of a prompt in its last step alone."""
    steps = minute(0, limited_step_tokens=300.0, step_room_tokens=100.0)
    places = minute(1, running_request_s=30.0, place_s=120.0)
    assert batch_fill([steps, places]) == BatchFill(requests=0.25, tokens=None)
    assert batch_fill([minute(0)]) is None
