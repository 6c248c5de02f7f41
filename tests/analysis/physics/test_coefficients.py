"""How many tokens a token attends to, and how many the KV cache stores."""

from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics.coefficients import attended_pairs, cached_tokens
from agent.records.model import Reach
from tests.analysis.physics.shapes import LENGTHS, WINDOWS


@given(st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(1, 70))
def test_each_token_attends_to_itself_and_to_earlier_tokens_in_the_window(
    new: int, cached: int, window: int | None
) -> None:
    contexts = range(cached + 1, cached + new + 1)
    bounded = [context if window is None else min(context, window) for context in contexts]
    assert attended_pairs(new, cached, window) == sum(bounded)


@given(LENGTHS, LENGTHS, LENGTHS, WINDOWS)
def test_the_pairs_of_a_prompt_are_the_sum_of_its_chunks(
    first: int, second: int, cached: int, window: int | None
) -> None:
    chunks = attended_pairs(first, cached, window) + attended_pairs(second, cached + first, window)
    assert chunks == attended_pairs(first + second, cached, window)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20))
def test_a_token_in_a_chunk_attends_to_itself_and_to_earlier_tokens_of_its_chunk(
    new: int, cached: int, size: int
) -> None:
    """As in `create_chunked_causal_mask` of transformers: same quotient, and not later."""
    pairs = sum(
        1
        for token in range(cached, cached + new)
        for other in range(token + 1)
        if other // size == token // size
    )
    assert attended_pairs(new, cached, size, Reach.CHUNK) == pairs
    kept = [other for other in range(cached) if other // size == (cached - 1) // size]
    assert cached_tokens(cached, size, Reach.CHUNK) == len(kept)


@given(LENGTHS, st.integers(1, 5000))
def test_a_selection_bounds_the_pairs_and_not_the_cache(context: int, selected: int) -> None:
    assert cached_tokens(context, selected, Reach.SELECTION) == context
    assert attended_pairs(1, context, selected, Reach.SELECTION) == min(context + 1, selected)


@given(LENGTHS, st.integers(1, 5000))
def test_a_cache_keeps_no_more_than_its_window(context: int, window: int) -> None:
    assert cached_tokens(context, window) == min(context, window)
    assert cached_tokens(context, None) == context
