"""The objective's `compat` against what each load generator computes of the same requests.

The functions below repeat the tools' arithmetic in their terms: latencies as their clients measure
them, limits in milliseconds.
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


class ClientRequest(NamedTuple):
    """One request as a load generator's client saw it."""

    success: bool
    ttft_s: float
    latency_s: float
    output_tokens: int


class Score(NamedTuple):
    """The number of good requests, and of all requests that count."""

    good: int
    population: int


def tpot_of(request: ClientRequest) -> float | None:
    more = request.output_tokens - 1
    return (request.latency_s - request.ttft_s) / more if more > 0 else None


def within(request: ClientRequest, tpot: float | None) -> bool:
    return (
        request.ttft_s <= TTFT_MS / 1000
        and request.latency_s <= E2E_MS / 1000
        and tpot is not None
        and tpot <= TPOT_MS / 1000
    )


def vllm_bench(requests: Sequence[ClientRequest]) -> Score:
    """`calculate_metrics` of vllm/benchmarks/serve.py: failures are left out, TPOT of one is 0."""
    completed = [request for request in requests if request.success]
    tpots = [tpot_of(request) or 0.0 for request in completed]
    good = sum(within(request, tpot) for request, tpot in zip(completed, tpots, strict=True))
    return Score(good, len(completed))


def aiperf(requests: Sequence[ClientRequest]) -> Score:
    """Good over valid and errors; a metric without a value fails its objective."""
    return Score(sum(s.success and within(s, tpot_of(s)) for s in requests), len(requests))


def guidellm(requests: Sequence[ClientRequest]) -> Score:
    """Errors are misses; undetermined requests do not count, unless another limit failed."""
    verdicts = [_guidellm_verdict(request) for request in requests]
    return Score(verdicts.count(True), len(verdicts) - verdicts.count(None))


def _guidellm_verdict(request: ClientRequest) -> bool | None:
    if not request.success or request.ttft_s > TTFT_MS / 1000 or request.latency_s > E2E_MS / 1000:
        return False
    tpot = tpot_of(request)
    return None if tpot is None else tpot <= TPOT_MS / 1000


def inference_perf(requests: Sequence[ClientRequest]) -> Score:
    """Failures are left out; a request without a TPOT is not good."""
    completed = [request for request in requests if request.success]
    return Score(sum(within(request, tpot_of(request)) for request in completed), len(completed))


TOOLS: dict[str, Callable[[Sequence[ClientRequest]], Score]] = {
    "vllm": vllm_bench,
    "aiperf": aiperf,
    "guidellm": guidellm,
    "inference-perf": inference_perf,
}


def score_of(requests: Sequence[ClientRequest], compat: str) -> Score:
    limits = objective(
        definition=DEFINITIONS[compat],
        ttft_s=TTFT_MS / 1000,
        tpot_s=TPOT_MS / 1000,
        e2e_s=E2E_MS / 1000,
    )
    verdicts = Counter(
        judge(
            record(
                status=Status.OK if request.success else Status.ERROR,
                ttft_s=request.ttft_s,
                e2e_s=request.latency_s,
                tpot_s=tpot_s(request.latency_s - request.ttft_s, request.output_tokens),
                output_tokens=request.output_tokens,
            ),
            limits,
        )
        for request in requests
    )
    met, missed = verdicts[Verdict.MET], verdicts[Verdict.MISSED]
    return Score(met, met + missed)


# Values close to the limits and exactly on them.
client_requests = st.lists(
    st.builds(
        lambda success, ttft_ms, rest_ms, tokens: ClientRequest(
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
@given(requests=client_requests)
def test_good_requests_and_their_population_equal_those_of_the_tool(
    tool: str, requests: list[ClientRequest]
) -> None:
    assert score_of(requests, tool) == TOOLS[tool](requests)


def test_every_definition_except_goodput_belongs_to_a_tool() -> None:
    assert set(DEFINITIONS) == {"goodput", *TOOLS}


# Ten requests of 11 tokens, two that failed, and three of one token, one of them too late.
MIXED = (
    *[ClientRequest(True, 0.1, 0.3, 11)] * 6,
    *[ClientRequest(True, 0.3, 0.5, 11)] * 4,
    *[ClientRequest(False, 0.1, 0.3, 11)] * 2,
    *[ClientRequest(True, 0.1, 0.1, 1)] * 2,
    ClientRequest(True, 0.3, 0.3, 1),
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
def test_attainment_of_one_run_differs_by_definition(compat: str, attainment: Fraction) -> None:
    assert Fraction(*score_of(MIXED, compat)) == attainment
