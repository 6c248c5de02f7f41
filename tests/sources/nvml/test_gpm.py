import math

import pynvml  # type: ignore[import-untyped]
import pytest

from agent.sources.nvml.gpm import ACTIVITIES
from tests.sources.nvml.fake_driver import ScriptedNvml

NOT_SUPPORTED, NO_PERMISSION = 3, 4
RATIOS = [fact.name for _, fact in ACTIVITIES]


@pytest.mark.parametrize(("name", "fact"), ACTIVITIES, ids=RATIOS)
def test_each_activity_is_the_mean_since_the_last_poll_as_a_ratio(
    nvml: ScriptedNvml, name: str, fact: object
) -> None:
    number = getattr(pynvml, name)
    nvml.poll(f"activity 0 {number} 20")
    assert all(nvml.fact(name) is None for name in RATIOS)
    nvml.poll(f"activity 0 {number} 60")
    ratios = {name: nvml.fact(name) for name in RATIOS}
    assert ratios == {name: 0.4 if name == getattr(fact, "name", "") else 0 for name in RATIOS}
    nvml.poll()
    assert nvml.fact(getattr(fact, "name", "")) == 0.6


def test_polls_too_close_for_the_hardware_give_no_activity(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll("activity 0 2 50", after_s=0.05)
    assert nvml.fact("gpu_sm_active_ratio") is None
    nvml.poll()
    assert nvml.fact("gpu_sm_active_ratio") == 0.25


def test_a_mean_over_a_long_interval_is_left_out(nvml: ScriptedNvml) -> None:
    nvml.poll()
    nvml.poll(after_s=600)
    assert nvml.fact("gpu_sm_active_ratio") is None
    nvml.poll()
    assert nvml.fact("gpu_sm_active_ratio") == 0


def test_polls_rarer_than_every_minute_give_activity_too(nvml: ScriptedNvml) -> None:
    nvml.driver.do("activity 0 2 50")
    for _ in range(2):
        nvml.poll(after_s=120)
        assert nvml.fact("gpu_sm_active_ratio") is None
    for after_s in (120, 130, 200):
        nvml.poll(after_s=after_s)
        assert nvml.fact("gpu_sm_active_ratio") == 0.5
    nvml.poll(after_s=600)
    assert nvml.fact("gpu_sm_active_ratio") is None


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_unknown_and_costs_the_others_nothing(
    nvml: ScriptedNvml, number: float
) -> None:
    nvml.poll()
    nvml.poll(f"activity 0 10 {number}")
    assert nvml.fact("gpu_dram_active_ratio") is None
    assert nvml.fact("gpu_sm_active_ratio") == 0


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_an_activity_that_a_gpu_has_not_is_left_out(nvml: ScriptedNvml, code: int) -> None:
    nvml.driver.do(f"noactivity 0 2 {code}", "activity 0 5 30", "activity 0 10 40")
    for _ in range(3):
        nvml.poll()
    assert nvml.fact("gpu_sm_active_ratio") is None
    assert nvml.fact("gpu_tensor_active_ratio") == 0.3
    assert nvml.fact("gpu_dram_active_ratio") == 0.4


def test_a_gpu_before_hopper_is_not_asked(nvml: ScriptedNvml) -> None:
    nvml.poll("set 0 gpm 0")
    nvml.poll()
    assert all(nvml.fact(name) is None for name in RATIOS)
    assert nvml.driver.calls("nvmlGpmSampleGet") == 0
    assert not nvml.failures


def test_samples_of_a_lost_gpu_are_given_back(nvml: ScriptedNvml) -> None:
    nvml.driver.do("gpus 2")
    nvml.poll()
    nvml.poll("lose 1 15")
    assert nvml.driver.calls("nvmlGpmSampleFree") == 2
