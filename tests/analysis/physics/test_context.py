"""Attended pairs and cached tokens."""

from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics.context import attended_pairs, cached_tokens
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


@given(LENGTHS, st.integers(1, 5000))
def test_a_cache_keeps_no_more_than_its_window(context: int, window: int) -> None:
    assert cached_tokens(context, window) == min(context, window)
    assert cached_tokens(context, None) == context
