"""Groups of input and output lengths: long prompts take longer to the first token than short ones.

The edges are powers of four, of inputs from 1024 tokens on. A group includes its lower edge.
"""

from bisect import bisect_right

EDGES_TOKENS = (1024, 4096, 16384, 65536)
INPUT_LENGTHS = ("0-1k", "1k-4k", "4k-16k", "16k-64k", "64k+")
OUTPUT_EDGES_TOKENS = (64, 256, 1024, 4096)
OUTPUT_LENGTHS = ("0-64", "64-256", "256-1k", "1k-4k", "4k+")


def input_length_of(input_tokens: int | None) -> str | None:
    """The group of a number of input tokens; None where it is unknown."""
    return None if input_tokens is None else INPUT_LENGTHS[bisect_right(EDGES_TOKENS, input_tokens)]
