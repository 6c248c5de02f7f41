"""MFU and MBU of work on some GPUs."""

import pytest

from agent.analysis.efficiency.serving import Serving
from agent.records.model import Work
from tests.analysis.cost.engine_days import LLAMA_ON_H100


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_no_time_is_no_utilisation(seconds: float) -> None:
    assert LLAMA_ON_H100.utilisation(Work(1e12, 1e12), seconds) == (None, None)


def test_without_a_model_only_the_bandwidth_is_known() -> None:
    assert Serving(gpu=LLAMA_ON_H100.gpu).utilisation(Work(1e12, 3.35e12), 1.0) == (None, 1.0)
