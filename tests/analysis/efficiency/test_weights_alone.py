"""Efficiency of a model whose architecture is unknown, by the bytes of its weights."""

import pytest

from agent.analysis.efficiency.work import Serving
from agent.records.model import StoredWeights
from tests.analysis.cost.engine_days import minute_row, window_of
from tests.analysis.efficiency.test_minute_efficiency import (
    SINGLE,
    STREAM,
    STREAM_SAMPLES,
    TWO_TB_PER_S,
)


def test_of_a_model_whose_weights_alone_are_known_decode_has_a_bandwidth() -> None:
    files = StoredWeights(architecture="strange", stored_bytes=15 * 10**9, step_bytes=14 * 10**9)
    serving = Serving(weights=files, gpu=TWO_TB_PER_S)
    window = window_of(minute_row(STREAM_SAMPLES, STREAM, serving))
    assert window.decode is not None
    assert window.decode.mbu == pytest.approx(0.7, rel=0.001)
    assert (window.decode.mfu, window.decode.achieved_flops_per_s) == (None, None)
    assert (window.mfu, window.mbu, window.prefill, window.busy) == (None, None, None, None)
    assert window.weights_alone
    assert window.steps == {"counted"}


def test_a_model_whose_step_reads_unknown_bytes_has_no_bandwidth() -> None:
    files = StoredWeights(architecture="strange", stored_bytes=15 * 10**9)
    row = minute_row(STREAM_SAMPLES, STREAM, Serving(weights=files, gpu=TWO_TB_PER_S))
    assert row.work.decode_bytes is None
    window = window_of(row)
    assert (window.decode, window.weights_alone) == (None, False)


def test_an_engine_with_a_known_model_hides_one_whose_weights_alone_are_known() -> None:
    files = StoredWeights(architecture="strange", stored_bytes=15 * 10**9, step_bytes=14 * 10**9)
    strange = minute_row(STREAM_SAMPLES, STREAM, Serving(weights=files, gpu=TWO_TB_PER_S))
    known = minute_row(STREAM_SAMPLES, STREAM, SINGLE)
    both, alone = window_of(known, strange), window_of(known)
    assert (both.decode, both.mbu, both.weights_alone) == (alone.decode, alone.mbu, False)
