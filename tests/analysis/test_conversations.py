"""Turns of sessions: their numbers, gaps, caches and verdicts, against sums of the raw requests."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.conversations import (
    BLOCK_TOKENS,
    TURN_BUCKETS,
    TurnRequest,
    bucket_of,
    conversations_of,
    figures_by_turn,
    session_verdict,
    turns_of,
)
from agent.analysis.quantiles import RELATIVE_ERROR
from agent.catalog.definitions import Verdict
from agent.records.objective import SessionLimits
from tests.records.making import NOON

MET, MISSED, UNDETERMINED = Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED


def turn(at: float, *, session: str = "s", lasted_s: float = 1.0, **given: Any) -> TurnRequest:
    facts: dict[str, Any] = {"engine": "chat-0", "ttft_s": 0.1, **given}
    return TurnRequest(session, NOON + at, NOON + at + lasted_s, **facts)


REQUESTS = st.lists(
    st.builds(
        turn,
        st.floats(0, 1000),
        session=st.sampled_from("abc"),
        lasted_s=st.floats(0.1, 50),
        ttft_s=st.none() | st.floats(0.001, 10),
        input_tokens=st.none() | st.integers(1, 5000),
        cached_tokens=st.none() | st.integers(0, 5000),
    ),
    max_size=60,
)


@given(REQUESTS)
def test_every_request_is_one_turn_of_its_session_in_the_order_of_their_begin(
    requests: list[TurnRequest],
) -> None:
    found = conversations_of(requests)
    assert Counter(each.request for one in found for each in one.turns) == Counter(requests)
    for one in found:
        assert {each.request.session for each in one.turns} == {one.session}
        assert [each.number for each in one.turns] == [*range(1, len(one.turns) + 1)]
        begins = [each.request.started_at for each in one.turns]
        assert begins == sorted(begins)


@given(REQUESTS)
def test_figures_by_turn_are_those_of_the_raw_turns(requests: list[TurnRequest]) -> None:
    turns = [each for one in conversations_of(requests) for each in one.turns]
    for figures in figures_by_turn(turns):
        low, high = TURN_BUCKETS[figures.bucket]
        here = [each for each in turns if low <= each.number <= (high or np.inf)]
        assert figures.turns == len(here)
        ttft = [each.request.ttft_s for each in here if each.request.ttft_s is not None]
        for share, value in ((50, figures.ttft_p50_s), (95, figures.ttft_p95_s)):
            true = np.percentile(ttft, share, method="inverted_cdf") if ttft else None
            assert value == (true and pytest.approx(true, rel=RELATIVE_ERROR + 1e-9))
        both = [(each.request.cached_tokens, each.request.input_tokens) for each in here]
        known = np.array([pair for pair in both if None not in pair]).reshape(-1, 2)
        ratio = known[:, 0].sum() / known[:, 1].sum() if len(known) else None
        assert figures.cached_ratio == ratio
    assert sum(each.turns for each in figures_by_turn(turns)) == len(turns)


@pytest.mark.parametrize(
    ("number", "bucket"),
    [(1, "1"), (2, "2-3"), (3, "2-3"), (4, "4-7"), (15, "8-15"), (16, "16+"), (999, "16+")],
)
def test_turns_are_in_buckets_that_double(number: int, bucket: str) -> None:
    assert bucket_of(number) == bucket


# Gaps


def test_a_gap_is_from_the_end_of_the_turn_before_and_unknown_beside_it() -> None:
    turns = turns_of([turn(0), turn(4), turn(4.5), turn(20)])
    assert [each.gap_s for each in turns] == [None, 3.0, None, 14.5]


# The cache


def refilled(*turns: TurnRequest) -> list[tuple[int | None, bool]]:
    return [(each.refilled_tokens, each.moved) for each in turns_of(turns)[1:]]


def test_tokens_of_the_prompt_before_that_the_cache_lost_are_computed_again() -> None:
    first = turn(0, input_tokens=1000, cached_tokens=0)
    assert refilled(first, turn(5, input_tokens=1400, cached_tokens=992)) == [(0, False)]
    assert refilled(first, turn(5, input_tokens=1400, cached_tokens=200)) == [(800, False)]
    # The output of the turn before was computed, too, but is often written anew by its client.
    assert refilled(first, turn(5, input_tokens=1400, cached_tokens=1200)) == [(0, False)]


def test_on_another_engine_it_is_a_move_and_no_eviction() -> None:
    first = turn(0, input_tokens=1000)
    moved = turn(5, input_tokens=1400, cached_tokens=0, engine="chat-1")
    assert refilled(first, moved) == [(1000, True)]
    (_, later) = turns_of([first, moved])
    (figures,) = figures_by_turn([later])
    assert (figures.evicted_tokens, figures.moved_tokens) == (0, 1000)


@pytest.mark.parametrize(
    "later",
    [
        # Its client shortened the conversation.
        turn(5, input_tokens=900, cached_tokens=0),
        turn(5, input_tokens=1400, cached_tokens=None),
        turn(5, input_tokens=None, cached_tokens=0),
    ],
)
def test_what_was_computed_again_is_unknown_without_a_longer_prompt_and_a_known_cache(
    later: TurnRequest,
) -> None:
    assert refilled(turn(0, input_tokens=1000), later) == [(None, False)]
    (figures,) = figures_by_turn(turns_of([turn(0, input_tokens=1000), later])[1:])
    assert figures.evicted_tokens is None


@given(REQUESTS)
def test_no_more_is_computed_again_than_the_prompt_before_had(requests: list[TurnRequest]) -> None:
    for one in conversations_of(requests):
        for before, after in pairwise(one.turns):
            if after.refilled_tokens:
                assert before.request.input_tokens is not None
                assert BLOCK_TOKENS < after.refilled_tokens <= before.request.input_tokens


# Verdicts

LIMITS = SessionLimits(first_turn_ttft_s=1.0, turn_ttft_s=0.2, share_of_turns=0.75)


@pytest.mark.parametrize(
    ("ttft_s", "verdict"),
    [
        ([0.9], MET),
        ([1.1], MISSED),
        ([None], UNDETERMINED),
        ([0.9, 0.1, 0.1, 0.1, 9.0], MET),
        ([0.9, 0.1, 0.1, 9.0], MISSED),
        ([0.9, 0.1, 0.1, 0.1, None], MET),
        ([0.9, 0.1, 0.1, 9.0, None], UNDETERMINED),
        ([0.9, 0.1, 9.0, 9.0, None], MISSED),
        ([1.1, None], MISSED),
    ],
)
def test_a_session_meets_by_its_first_turn_and_by_enough_of_the_others(
    ttft_s: Sequence[float | None], verdict: Verdict
) -> None:
    turns = turns_of(turn(5 * number, ttft_s=each) for number, each in enumerate(ttft_s))
    assert session_verdict(turns, LIMITS) is verdict


def test_a_limit_that_is_not_set_judges_nothing() -> None:
    slow_first = turns_of([turn(0, ttft_s=9.0), turn(5, ttft_s=0.1)])
    assert session_verdict(slow_first, SessionLimits(turn_ttft_s=0.2)) is MET
    assert session_verdict(slow_first[:1], SessionLimits(turn_ttft_s=0.2)) is UNDETERMINED


@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=20), st.floats(0.01, 1.0))
def test_the_share_is_that_of_the_later_turns(ttft_s: list[float], share: float) -> None:
    limits = SessionLimits(turn_ttft_s=0.2, share_of_turns=share)
    turns = turns_of(
        [turn(0), *(turn(5.0 + number, ttft_s=each) for number, each in enumerate(ttft_s))]
    )
    met = float(np.mean(np.array(ttft_s) <= 0.2))
    if abs(met - share) > 1e-6:
        assert session_verdict(turns, limits) is (MET if met > share else MISSED)
