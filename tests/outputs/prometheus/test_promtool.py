"""Promtool accepts the exposition."""

import pytest

from agent.outputs.prometheus.meter import Meter
from tests.outputs.prometheus.filled import FULL_SAMPLE, OBJECTIVES, exposition_of, filled_meter
from tests.real_parts.prometheus import complaints_about


def meter_with_every_engine_fact() -> Meter:
    meter = Meter((), ["chat-0"])
    meter.sample(FULL_SAMPLE)
    return meter


METERS = {
    "at start": Meter(OBJECTIVES, ["chat-0"]),
    "after requests": filled_meter(),
    "with every engine fact": meter_with_every_engine_fact(),
}


@pytest.mark.parametrize("when", METERS)
def test_promtool_accepts_the_exposition(when: str) -> None:
    assert complaints_about(exposition_of(METERS[when])) == []
