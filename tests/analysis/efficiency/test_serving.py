"""MFU and MBU of work on some GPUs."""

import pytest

from agent.analysis.efficiency.serving import Serving
from agent.records.model import Parallelism, Work
from tests.analysis.cost.engine_days import LLAMA_ON_H100
from tests.analysis.efficiency.test_minute_efficiency import SINGLE


def test_seven_billion_weights_of_two_bytes_at_100_tokens_per_second_use_70_percent_of_2_tb() -> (
    None
):
    needed = 7e9 * 2 * 100
    assert SINGLE.utilisation(Work(0.0, needed * 10), 10)[1] == pytest.approx(0.7)


def test_mfu_is_over_all_gpus() -> None:
    pair = Serving(
        model=LLAMA_ON_H100.model, gpu=LLAMA_ON_H100.gpu, parallelism=Parallelism(tensor=2)
    )
    assert pair.utilisation(Work(400e12 * 5, 0.0), 5)[0] == pytest.approx(400 / 989.4 / 2)


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_is_no_utilisation(seconds: float) -> None:
    assert LLAMA_ON_H100.utilisation(Work(1e12, 1e12), seconds) == (None, None)


def test_no_work_is_a_utilisation_of_zero() -> None:
    assert LLAMA_ON_H100.utilisation(Work(0.0, 0.0), 1.0) == (0, 0)


def test_without_a_model_only_the_bandwidth_is_known() -> None:
    assert Serving(gpu=LLAMA_ON_H100.gpu).utilisation(Work(1e12, 3.35e12), 1.0) == (None, 1.0)
