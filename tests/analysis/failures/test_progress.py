"""Restarts found by comparing two samples."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.failures.progress import key_figures, restart_between
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from agent.records.event import Confidence

Facts = Mapping[tuple[str, tuple[str, ...]], float]

OUTPUT = (fact.OUTPUT_TOKENS.name, ())
INPUT = (fact.INPUT_TOKENS.name, ())
STOPPED = (fact.REQUESTS_FINISHED.name, ("stop",))
RANKS = (fact.DATA_PARALLEL_RANKS.name, ())
RUNNING = (fact.REQUESTS_RUNNING.name, ())


def sample(facts: Facts, *, at: float = 100.0, started: float | None = None) -> EngineSample:
    return EngineSample(
        engine="chat",
        at=at,
        dialect="vllm",
        model="m",
        facts=facts,
        process_started_at=started,
    )


@pytest.mark.parametrize(
    ("started", "output", "expected"),
    [
        (2000, 20, Confidence.CERTAIN),
        # Start times within a second are the same.
        (1000.02, 20, None),
        (1000, 3, Confidence.SUSPECTED),
    ],
)
def test_another_start_time_makes_a_restart_certain_and_a_fallen_counter_only_suspected(
    started: float, output: float, expected: Confidence | None
) -> None:
    before, after = sample({OUTPUT: 10}, started=1000), sample({OUTPUT: output}, started=started)
    assert restart_between(before, after) is expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({OUTPUT: 10, INPUT: 5}, {OUTPUT: 3, INPUT: 50}, Confidence.PROBABLE),
        ({OUTPUT: 10}, {OUTPUT: 0}, Confidence.PROBABLE),
        ({OUTPUT: 10, STOPPED: 5, RUNNING: 2}, {RUNNING: 0}, Confidence.PROBABLE),
        ({OUTPUT: 10, RANKS: 1}, {OUTPUT: 6, RANKS: 2}, Confidence.PROBABLE),
        ({OUTPUT: 10, RANKS: 2}, {OUTPUT: 6, RANKS: 1}, None),
        ({OUTPUT: 10, STOPPED: 5}, {OUTPUT: 11}, None),
        ({OUTPUT: 0}, {}, None),
        ({RUNNING: 4, OUTPUT: 1}, {RUNNING: 0, OUTPUT: 1}, None),
    ],
    ids=[
        "one fell", "one fell to 0", "all disappeared", "fell while a rank came",
        "fell with a removed rank", "one is missing", "one at 0 disappeared", "a gauge fell",
    ],
)  # fmt: skip
def test_counters_that_fell_or_all_disappeared_make_a_restart_probable(
    before: Facts, after: Facts, expected: Confidence | None
) -> None:
    assert restart_between(sample(before), sample(after)) is expected


def with_ranks(total: float, **ranks: float) -> EngineSample:
    """A sample of several ranks, with the output tokens of each."""
    by_rank = {rank[1:]: sample({OUTPUT: counted}) for rank, counted in ranks.items()}
    return replace(sample({OUTPUT: total, RANKS: max(len(ranks), 1)}), ranks=by_rank)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (with_ranks(31, r0=11, r1=20), None),
        (with_ranks(5, r0=2, r1=3), Confidence.PROBABLE),
        # A single rank is reported without its name.
        (with_ranks(11), None),
        (with_ranks(5), Confidence.PROBABLE),
    ],
)
def test_a_removed_rank_does_not_hide_a_counter_reset_of_another(
    after: EngineSample, expected: Confidence | None
) -> None:
    assert restart_between(with_ranks(60, r0=10, r1=20, r2=30), after) is expected


counts = st.integers(0, 10**15).map(float)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=3), st.floats(0, 1) | st.none())
def test_counters_that_only_grow_are_no_restart(
    counts_and_growth: list[tuple[float, float]], started: float | None
) -> None:
    keys = (OUTPUT, INPUT, STOPPED)
    before = {key: value for key, (value, _) in zip(keys, counts_and_growth, strict=False)}
    after = {key: value + more for key, (value, more) in zip(keys, counts_and_growth, strict=False)}
    assert restart_between(sample(before, started=started), sample(after, started=started)) is None


def test_the_key_figures_are_from_the_last_sample_and_unknown_ones_are_none() -> None:
    last = sample({OUTPUT: 10, RUNNING: 4}, at=123.0, started=1000)
    assert key_figures(last) == {
        "last_sample_at": 123.0,
        "process_started_at": 1000,
        "requests_running": 4,
        "requests_waiting": None,
        "kv_cache_usage": None,
        "preemptions": None,
        "output_tokens": 10,
    }
