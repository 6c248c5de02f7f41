"""Ratios of counters against what vLLM 0.32 itself logs of the same counts.

The lines are those of `SpecDecodingLogging.log` after seven drafts, and of `CachingMetrics` after
four requests:

    SpecDecoding metrics: Mean acceptance length: 2.29, ..., Accepted: 9 tokens, Drafted: 20 tokens,
    ..., Avg Draft acceptance rate: 45.0%
    Prefix cache hit rate: 57.9%
"""

import pytest

from agent.analysis.efficiency.window_efficiency import prefix_cache, speculation
from tests.records.minutes import minute

# Drafted and accepted tokens of each draft; looked up and found tokens of each request.
_DRAFTS = ((3, 3), (3, 1), (3, 0), (2, 2), (3, 2), (3, 0), (3, 1))
_LOOKUPS = ((1000, 0), (1200, 1184), (640, 512), (90, 0))

_DRAFT_MINUTES = [
    minute(at, drafts=1.0, draft_tokens=float(drafted), accepted_draft_tokens=float(accepted))
    for at, (drafted, accepted) in enumerate(_DRAFTS)
]
_CACHE_MINUTES = [
    minute(at, prefix_query_tokens=float(queried), prefix_hit_tokens=float(hit))
    for at, (queried, hit) in enumerate(_LOOKUPS)
]


def test_acceptance_is_that_of_vllms_own_log() -> None:
    found = speculation(_DRAFT_MINUTES)
    assert found is not None
    assert (found.drafts, found.draft_tokens, found.accepted_tokens) == (7, 20, 9)
    assert found.mean_accepted_length == pytest.approx(2.29, abs=0.005)
    assert found.acceptance_rate == pytest.approx(0.45, abs=0.0005)


def test_the_hit_ratio_in_tokens_is_that_of_vllms_own_log() -> None:
    found = prefix_cache(_CACHE_MINUTES)
    assert found is not None
    assert found.hit_ratio == pytest.approx(0.579, abs=0.0005)


def test_minutes_without_one_of_the_counters_are_left_out() -> None:
    half = minute(9, prefix_query_tokens=10_000.0, draft_tokens=1000.0)
    assert prefix_cache([*_CACHE_MINUTES, half]) == prefix_cache(_CACHE_MINUTES)
    assert speculation([*_DRAFT_MINUTES, half]) == speculation(_DRAFT_MINUTES)
    assert (prefix_cache([half]), speculation([half]), prefix_cache([])) == (None, None, None)


def test_ratios_without_a_draft_or_a_lookup_are_unknown() -> None:
    idle = minute(
        0,
        drafts=0.0,
        draft_tokens=0.0,
        accepted_draft_tokens=0.0,
        prefix_query_tokens=0.0,
        prefix_hit_tokens=0.0,
    )
    drafts, cache = speculation([idle]), prefix_cache([idle])
    assert drafts is not None
    assert cache is not None
    assert (drafts.acceptance_rate, drafts.mean_accepted_length) == (None, None)
    assert (cache.query_tokens, cache.hit_ratio) == (0.0, None)
