"""Uneven data-parallel ranks: even is 1, everything on one of N is N."""

from collections.abc import Mapping, Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.rank_skew import GAP_COUNT, GAP_SUM, WINDOW_S, RankWindow, skew
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from tests.records.making import NOON

LOADS = st.lists(st.floats(0, 1e6), min_size=2, max_size=16)


def rank(running: float, **more: float) -> EngineSample:
    facts = {
        fact.REQUESTS_RUNNING.name: running,
        fact.REQUESTS_WAITING.name: more.get("waiting"),
        fact.KV_CACHE_USAGE.name: more.get("kv"),
        GAP_SUM: more.get("gap_s"),
        GAP_COUNT: more.get("gaps"),
    }
    return EngineSample(
        engine="chat-0",
        at=NOON,
        dialect="vllm",
        model="llama",
        facts={(name, ()): value for name, value in facts.items() if value is not None},
    )


def window(*polls: tuple[float, Sequence[EngineSample] | Mapping[str, EngineSample]]) -> RankWindow:
    found = RankWindow()
    for after_s, ranks in polls:
        named = ranks if isinstance(ranks, Mapping) else dict(zip("0123", ranks, strict=False))
        found.sample(
            EngineSample(
                engine="chat-0",
                at=NOON + after_s,
                dialect="vllm",
                model="llama",
                facts={},
                ranks=named,
            )
        )
    return found


@given(LOADS)
def test_skew_is_from_1_where_all_are_even_to_the_number_of_ranks(loads: list[float]) -> None:
    found = skew(loads)
    if sum(loads) == 0:
        assert found is None
    elif sum(loads) < inf and found is not None:
        assert found * (1 + 1e-9) >= 1
        assert found <= len(loads) * (1 + 1e-9)
    assert skew([3.0] * len(loads)) == 1


def test_the_example_of_the_docs() -> None:
    ranks = [
        rank(8, waiting=0, kv=0.31),
        rank(7, waiting=0, kv=0.28),
        rank(16, waiting=12, kv=0.97),
        rank(9, waiting=0, kv=0.35),
    ]
    found = window((0, ranks)).skews()
    assert found == {
        "requests": pytest.approx(28 / 13),
        "running": pytest.approx(1.6),
        "waiting": 4,
        "kv_cache_usage": pytest.approx(0.97 / 0.4775),
    }


def test_ranks_that_take_turns_are_even_over_the_minutes() -> None:
    first, then = [rank(8), rank(2)], [rank(2), rank(8)]
    assert window((0, first), (5, then)).skews() == {"running": 1}
    assert window((0, first)).skews() == {"running": 1.6}


def test_what_is_older_than_the_window_is_forgotten() -> None:
    first, then = [rank(8), rank(2)], [rank(5), rank(5)]
    assert window((0, first), (WINDOW_S + 1, then)).skews() == {"running": 1}


def test_a_step_takes_the_time_between_two_outputs_of_the_window() -> None:
    first = [rank(4, gap_s=10, gaps=400), rank(4, gap_s=10, gaps=400), rank(0, gap_s=1, gaps=9)]
    last = [rank(4, gap_s=12, gaps=480), rank(4, gap_s=16, gaps=480), rank(0, gap_s=1, gaps=9)]
    found = window((0, first), (60, last))
    assert found.step_times() == {"0": pytest.approx(0.025), "1": pytest.approx(0.075)}
    assert found.skews()["step_time"] == pytest.approx(1.5)


def test_counts_that_began_again_give_no_step_time() -> None:
    first, last = [rank(4, gap_s=10, gaps=400)] * 2, [rank(4, gap_s=1, gaps=40)] * 2
    assert window((0, first), (5, last)).step_times() == {}


def test_a_rank_that_came_begins_the_window_anew() -> None:
    few, more = [rank(8), rank(2)], [rank(4), rank(4), rank(4)]
    assert window((0, few), (5, more)).skews() == {"running": 1}


def test_one_rank_and_unknown_loads_have_no_skew() -> None:
    assert window((0, {})).skews() == {}
    unknown = rank(4)
    assert "requests" not in window((0, [rank(4, waiting=1), unknown])).skews()
    assert RankWindow().skews() == RankWindow().step_times() == {}
