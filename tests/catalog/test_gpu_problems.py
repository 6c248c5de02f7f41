"""Each word of a source for a GPU that it cannot read is judged, and in one way."""

from itertools import combinations

from agent.catalog.gpu_problems import HELD, LOST, UNSEEN
from agent.sources.dcgm import watch as dcgm
from agent.sources.nvml import library
from agent.sources.nvml import watch as nvml


def test_every_word_of_a_source_is_a_loss_a_held_call_or_blindness() -> None:
    of_nvml = {*library.REASONS.values(), library.INTERNAL, nvml.NOT_ANSWERING}
    of_dcgm = {dcgm.GPU_MISSING, dcgm.GPU_SILENT, dcgm.NO_GPU, dcgm.EXPORTER_STALE}
    assert of_nvml | of_dcgm <= LOST | HELD | set(UNSEEN)


def test_no_word_is_judged_in_two_ways() -> None:
    ways = (LOST, HELD, frozenset(UNSEEN))
    assert not any(one & other for one, other in combinations(ways, 2))


def test_an_exporter_that_stands_still_and_an_error_of_the_agent_are_no_lost_gpu() -> None:
    assert {dcgm.EXPORTER_STALE, library.INTERNAL} <= set(UNSEEN)
