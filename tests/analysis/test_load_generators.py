"""The objective's `compat` against what each load generator computes of the same requests.

The functions below are the tools' own arithmetic, in their own terms: latencies as their clients
take them, limits in milliseconds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.latency import tpot_s
from agent.analysis.verdicts import judge
from agent.catalog.definitions import DEFINITIONS, Verdict
from agent.records.request import Status
from tests.records.making import objective, record

TTFT_MS, TPOT_MS, E2E_MS = 200.0, 30.0, 1000.0


class Seen(NamedTuple):
    """One request as a load generator's client saw it."""

    success: bool
    ttft_s: float
    latency_s: float
    output_tokens: int


class Score(NamedTuple):
    """Good requests, and those among which they are counted."""

    good: int
    population: int


def tpot_of(seen: Seen) -> float | None:
    more = seen.output_tokens - 1
    return (seen.latency_s - seen.ttft_s) / more if more > 0 else None


def within(seen: Seen, tpot: float | None) -> bool:
    return (
        seen.ttft_s <= TTFT_MS / 1000
        and seen.latency_s <= E2E_MS / 1000
        and tpot is not None
        and tpot <= TPOT_MS / 1000
    )


def vllm_bench(requests: Sequence[Seen]) -> Score:
    """`calculate_metrics` of vllm/benchmarks/serve.py: failures are left out, TPOT of one is 0."""
    completed = [seen for seen in requests if seen.success]
    tpots = [tpot_of(seen) or 0.0 for seen in completed]
    good = sum(within(seen, tpot) for seen, tpot in zip(completed, tpots, strict=True))
    return Score(good, len(completed))


def aiperf(requests: Sequence[Seen]) -> Score:
    """Good over valid and errors; a metric without a value fails its objective."""
    return Score(sum(s.success and within(s, tpot_of(s)) for s in requests), len(requests))


def guidellm(requests: Sequence[Seen]) -> Score:
    """Errors are misses; what cannot be judged leaves the population, unless it failed before."""
    verdicts = [_guidellm_verdict(seen) for seen in requests]
    return Score(verdicts.count(True), len(verdicts) - verdicts.count(None))


def _guidellm_verdict(seen: Seen) -> bool | None:
    if not seen.success or seen.ttft_s > TTFT_MS / 1000 or seen.latency_s > E2E_MS / 1000:
        return False
    tpot = tpot_of(seen)
    return None if tpot is None else tpot <= TPOT_MS / 1000


def inference_perf(requests: Sequence[Seen]) -> Score:
    """Failures are left out; a TPOT that does not exist is not good."""
    completed = [seen for seen in requests if seen.success]
    return Score(sum(within(seen, tpot_of(seen)) for seen in completed), len(completed))


TOOLS: dict[str, Callable[[Sequence[Seen]], Score]] = {
    "vllm": vllm_bench,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "inference-perf": inference_perf,
}


def ours(requests: Sequence[Seen], compat: str) -> Score:
    promised = objective(
        definition=DEFINITIONS[compat],
        ttft_s=TTFT_MS / 1000,
        tpot_s=TPOT_MS / 1000,
        e2e_s=E2E_MS / 1000,
    )
    verdicts = Counter(
        judge(
            record(
                status=Status.OK if seen.success else Status.ERROR,
                ttft_s=seen.ttft_s,
                e2e_s=seen.latency_s,
                tpot_s=tpot_s(seen.latency_s - seen.ttft_s, seen.output_tokens),
                output_tokens=seen.output_tokens,
            ),
            promised,
        )
        for seen in requests
    )
    met, missed = verdicts[Verdict.MET], verdicts[Verdict.MISSED]
    return Score(met, met + missed)


# Dense around the limits, and exactly on them.
requests_seen = st.lists(
    st.builds(
        lambda success, ttft_ms, rest_ms, tokens: Seen(
            success, ttft_ms / 1000, (ttft_ms + rest_ms) / 1000, tokens
        ),
        st.booleans(),
        st.integers(150, 250) | st.just(200),
        st.integers(0, 1000) | st.just(800),
        st.integers(1, 40) | st.just(1),
    ),
    max_size=40,
)


@pytest.mark.parametrize("tool", TOOLS)
@given(requests=requests_seen)
def test_good_requests_and_their_population_are_those_of_the_tool(
    tool: str, requests: list[Seen]
) -> None:
    assert ours(requests, tool) == TOOLS[tool](requests)


def test_every_definition_but_our_own_is_that_of_a_tool() -> None:
    assert set(DEFINITIONS) == {"goodput", *TOOLS}


# Ten plain requests, two that failed, three of one token and one of those too late.
MIXED = (
    *[Seen(True, 0.1, 0.3, 11)] * 6,
    *[Seen(True, 0.3, 0.5, 11)] * 4,
    *[Seen(False, 0.1, 0.3, 11)] * 2,
    *[Seen(True, 0.1, 0.1, 1)] * 2,
    Seen(True, 0.3, 0.3, 1),
)


@pytest.mark.parametrize(
    ("compat", "attainment"),
    [
        ("goodput", Fraction(8, 15)),
        ("vllm", Fraction(8, 13)),
        ("aiperf", Fraction(6, 15)),
        ("guidellm", Fraction(6, 13)),
        ("inference-perf", Fraction(6, 13)),
    ],
)
def test_one_run_has_as_many_attainments_as_there_are_definitions(
    compat: str, attainment: Fraction
) -> None:
    assert Fraction(*ours(MIXED, compat)) == attainment
