"""Efficiency over minutes of several engines."""

import pytest

from agent.analysis.efficiency.window_efficiency import WindowEfficiency, window_efficiency
from agent.analysis.physics.roofline import Bound
from agent.records.minute import MinuteRow
from tests.records.minutes import UNKNOWN, minute


def window_of(*minutes: MinuteRow) -> WindowEfficiency:
    found = window_efficiency(minutes)
    assert found is not None
    return found


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


def test_weights_read_by_both_phases_are_counted_once() -> None:
    found = window_of(minute(0, shared_bytes=8.0))
    assert found.mbu == pytest.approx((160 - 8) / 550)
    assert found.busy is not None
    assert found.busy.achieved_bytes_per_s == pytest.approx(152 / 40)
    assert found.decode is not None
    assert found.decode.achieved_bytes_per_s == pytest.approx(150 / 30)


def test_a_window_is_bound_by_capacity_when_the_cache_is_full_most_of_the_decode() -> None:
    full, free = minute(0, cache_full_s=30.0), minute(1)
    assert [bound_of(full), bound_of(full, free)] == [Bound.CAPACITY, Bound.BANDWIDTH]
    assert bound_of(full, free, minute(2, cache_full_s=10.0)) is Bound.BANDWIDTH
    assert bound_of(full, free, minute(2, cache_full_s=20.0)) is Bound.CAPACITY
    assert bound_of(minute(0, cache_full_s=60.0), *map(minute, range(1, 60))) is Bound.BANDWIDTH


def bound_of(*minutes: MinuteRow) -> Bound | None:
    use = window_of(*minutes).decode
    return None if use is None else use.bound


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
