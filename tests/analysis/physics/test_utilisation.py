import pytest

from agent.analysis.physics.utilisation import (
    bandwidth_utilisation,
    flops_utilisation,
    single_stream_bytes_per_s,
)


def test_seven_billion_weights_of_two_bytes_at_100_tokens_per_second_use_70_percent_of_2_tb() -> (
    None
):
    needed = single_stream_bytes_per_s(7e9, 16, 100)
    assert needed == 1.4e12
    used = bandwidth_utilisation(needed * 10, 10, gpus=1, bandwidth_bytes_per_s=2e12)
    assert used == pytest.approx(0.7)


def test_mfu_is_of_all_gpus_together() -> None:
    used = flops_utilisation(400e12 * 5, 5, gpus=2, peak_flops_per_s=989.4e12)
    assert used == pytest.approx(400 / 989.4 / 2)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_is_no_utilisation(seconds: float) -> None:
    assert flops_utilisation(1e12, seconds, gpus=1, peak_flops_per_s=1e12) is None
    assert bandwidth_utilisation(1e12, seconds, gpus=1, bandwidth_bytes_per_s=1e12) is None


def test_no_work_is_a_utilisation_of_zero() -> None:
    assert flops_utilisation(0, 1, gpus=1, peak_flops_per_s=1e12) == 0
