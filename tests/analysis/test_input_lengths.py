"""Groups of input lengths."""

import pytest

from agent.analysis.tally import EDGES_TOKENS, INPUT_LENGTHS, input_length_of


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        *((None, None), (0, "0-1k"), (1023, "0-1k"), (1024, "1k-4k"), (4095, "1k-4k")),
        *((4096, "4k-16k"), (16383, "4k-16k"), (16384, "16k-64k"), (65535, "16k-64k")),
        *((65536, "64k+"), (10**9, "64k+")),
    ],
)
def test_an_input_length_includes_its_lower_edge_and_excludes_its_upper(
    tokens: int | None, expected: str | None
) -> None:
    assert input_length_of(tokens) == expected


def test_edges_are_powers_of_four_from_1024_on() -> None:
    assert tuple(1024 * 4**n for n in range(4)) == EDGES_TOKENS
    assert len(INPUT_LENGTHS) == len(EDGES_TOKENS) + 1
