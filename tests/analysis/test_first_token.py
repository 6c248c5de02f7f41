"""The parts of the time to the first token of a request with a prefill engine."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.latency import FirstTokenParts, first_token_parts


@dataclass(frozen=True)
class Case:
    user_ttft_s: float | None
    prefill_gap_s: float | None
    parts: tuple[float, float, float, float, float]


# At the prefill engine 0.4 s; at the other one 0.3 s to the first token, 0.25 s of it in its queue.
CASES = {
    "the user's view, one engine after the other": Case(0.8, None, (0.8, 0.1, 0.4, 0.25, 0.05)),
    "the user's view, clocks that differ by 5 s": Case(0.8, -5.0, (0.8, 0.1, 0.4, 0.25, 0.05)),
    # The second engine waits for the first one within its own queue.
    "the user's view, both at once": Case(0.5, None, (0.5, 0.2, 0.3, 0.0, 0.0)),
    "the engines alone, one after the other": Case(None, 0.02, (0.72, 0.02, 0.4, 0.25, 0.05)),
    "the engines alone, both at once": Case(None, -0.2, (0.5, 0.0, 0.4, 0.05, 0.05)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_parts_of_the_time_to_the_first_token(case: Case) -> None:
    parts = first_token_parts(
        user_ttft_s=case.user_ttft_s,
        decode_ttft_s=0.3,
        decode_queue_s=0.25,
        prefill_hop_s=0.4,
        prefill_gap_s=case.prefill_gap_s,
    )
    assert parts == pytest.approx(FirstTokenParts(*case.parts))


@pytest.mark.parametrize("missing", ["prefill_hop_s", "decode_ttft_s", "prefill_gap_s"])
def test_the_parts_are_unknown_without_both_engines_times(missing: str) -> None:
    known = {
        "user_ttft_s": None,
        "decode_ttft_s": 0.3,
        "decode_queue_s": 0.25,
        "prefill_hop_s": 0.4,
        "prefill_gap_s": 0.02,
    }
    assert first_token_parts(**(known | {missing: None})) is None


def test_of_an_engine_without_a_queue_time_the_wait_for_kv_is_unknown() -> None:
    parts = first_token_parts(
        user_ttft_s=0.8,
        decode_ttft_s=0.3,
        decode_queue_s=None,
        prefill_hop_s=0.4,
        prefill_gap_s=None,
    )
    assert parts is not None
    assert parts.kv_wait_s is None
    assert parts.decode_s == pytest.approx(0.3)


seconds = st.floats(0, 1e3)


@given(
    user=st.none() | seconds,
    decode=seconds,
    queue=st.floats(0, 1),
    hop=seconds,
    gap=st.floats(-1e3, 1e3),
)
def test_no_part_is_negative_and_all_add_up(
    user: float | None, decode: float, queue: float, hop: float, gap: float
) -> None:
    parts = first_token_parts(
        user_ttft_s=user,
        decode_ttft_s=decode,
        decode_queue_s=queue * decode,
        prefill_hop_s=hop,
        prefill_gap_s=gap,
    )
    assert parts is not None
    assert parts.kv_wait_s is not None
    rest = (parts.router_s, parts.prefill_s, parts.kv_wait_s, parts.decode_s)
    assert min(rest) >= -1e-9
    assert sum(rest) == pytest.approx(parts.whole_s, abs=1e-6)
