"""The parts of one request: a request of which every moment is known by hand."""

import pytest

from agent.analysis.latency import RequestParts, request_parts

# Arrives at 0; scheduled at 0.3 after 0.05 in the frontend; first token made at 0.5 and seen at
# 0.52; last token made at 1.5; the response ends at 1.55.
_REQUEST = {"ttft_s": 0.52, "e2e_s": 1.55, "queue_s": 0.25, "prefill_s": 0.2, "decode_s": 1.0}


def test_the_front_has_its_time_before_the_first_token() -> None:
    found = request_parts(**_REQUEST)
    assert found.front_s == pytest.approx(0.05 + 0.02)
    assert found.rest_s == pytest.approx(1.55 - 0.52 - 1.0)


@pytest.mark.parametrize("unknown", ["ttft_s", "queue_s", "prefill_s"])
def test_a_part_of_unknown_latencies_is_unknown(unknown: str) -> None:
    assert request_parts(**(_REQUEST | {unknown: None})) == RequestParts(None, None)


@pytest.mark.parametrize("unknown", ["e2e_s", "decode_s"])
def test_the_rest_is_unknown_without_decode_or_an_end(unknown: str) -> None:
    found = request_parts(**(_REQUEST | {unknown: None}))
    assert found.front_s == pytest.approx(0.07)
    assert found.rest_s is None
