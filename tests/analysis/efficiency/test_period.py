"""How well GPUs were used over windows of several engines."""

import pytest

from agent.analysis.efficiency.period import PeriodEfficiency, period_efficiency
from agent.records.window import EngineWindow
from tests.records.windows import UNKNOWN, window


def period(*windows: EngineWindow) -> PeriodEfficiency:
    found = period_efficiency(windows)
    assert found is not None
    return found


def test_each_source_counts_a_large_engine_for_what_it_is() -> None:
    """Nine tenths of all FLOPs and bytes are in the engine that is at half of its peaks."""
    told = {"engine_mfu": 0.5, "engine_mbu": 0.4, "hardware_mfu": 0.5, "hardware_mbu": 0.4}
    large = window(0, **told, peak_flops_per_s=900.0, peak_bytes_per_s=90.0)
    small = window(0, engine="chat-1", **dict.fromkeys(told, 0.0))
    found = period(large, small)
    assert found.engine == pytest.approx((0.45, 0.36))
    assert found.hardware == pytest.approx((0.45, 0.36))


def test_without_peaks_each_gpu_counts_alike() -> None:
    large = window(0, **UNKNOWN | {"gpus": 3, "hardware_mfu": 0.4})
    small = window(0, engine="chat-1", **UNKNOWN | {"gpus": 1, "hardware_mfu": 0.0})
    assert period(large, small).hardware == pytest.approx((0.3, None))


def test_disagreements_are_those_of_all_engines_in_the_newest_minute() -> None:
    old = window(0, disagreements=({"figure": "old"},))
    here = window(1, disagreements=({"figure": "mfu"},))
    there = window(1, engine="chat-1", disagreements=({"figure": "mbu"},))
    silent = window(1, engine="chat-2")
    found = period(old, here, there, silent)
    assert [each["figure"] for each in found.disagreements] == ["mfu", "mbu"]


def test_minutes_whose_prompts_have_no_length_are_no_part_of_prefill() -> None:
    """Their FLOPs are work of the engine, over no time that is known."""
    found = period(window(0), window(1, prefill_s=None))
    assert found.prefill is not None
    assert found.prefill.mfu == pytest.approx(0.5)
    assert found.mfu == pytest.approx(2 * 650 / (120 * 100))
    assert period(window(0, prefill_s=None)).prefill is None
