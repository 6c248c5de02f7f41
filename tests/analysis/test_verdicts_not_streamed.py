"""Verdicts on responses with times that nobody can know: not streamed, or of several choices."""

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.joined_record import joined
from agent.analysis.verdicts import judge
from agent.catalog.definitions import DEFINITIONS, GOODPUT, Verdict
from agent.records.objective import Objective
from agent.records.request import ProxyView, RequestRecord, Vantage
from tests.records.making import objective, record

MET, MISSED, UNDETERMINED = Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED

# Sums of these have no rounding.
seconds = st.integers(1, 2048).map(lambda n: n / 1024)
limits = st.none() | seconds


@dataclass(frozen=True, slots=True)
class Generated:
    """One response of an engine: the times at which its tokens were there, from its arrival."""

    tokens_s: tuple[float, ...]

    @property
    def engines(self) -> RequestRecord:
        """What the engine's span says of it."""
        first_s, last_s, tokens = self.tokens_s[0], self.tokens_s[-1], len(self.tokens_s)
        return record(
            1,
            vantage=Vantage.ENGINE,
            ttft_s=first_s,
            tpot_s=(last_s - first_s) / (tokens - 1) if tokens > 1 else None,
            e2e_s=last_s,
            output_tokens=tokens,
        )

    @property
    def proxied(self) -> RequestRecord:
        """What the proxy sees of it: everything at once at the end."""
        view = ProxyView(streamed=False, choices=1)
        e2e_s, tokens = self.tokens_s[-1], len(self.tokens_s)
        return record(
            1,
            vantage=Vantage.PROXY,
            ttft_s=None,
            tpot_s=None,
            e2e_s=e2e_s,
            output_tokens=tokens,
            proxied=view,
        )

    def is_met(self, promise: Objective) -> bool:
        """Whether it kept the promise, from the times of its tokens alone."""
        gaps = [later - earlier for earlier, later in pairwise(self.tokens_s)]
        mean_gap_s = sum(gaps) / len(gaps) if gaps else 0.0
        pairs = (
            (self.tokens_s[0], promise.ttft_s),
            (mean_gap_s, promise.tpot_s),
            (self.tokens_s[-1], promise.e2e_s),
        )
        return all(limit is None or value <= limit for value, limit in pairs)


generated = st.lists(seconds, min_size=1, max_size=8).map(
    lambda gaps: Generated(tuple(accumulate(gaps)))
)


@given(generated, limits, limits, limits)
def test_the_proxy_changes_no_verdict_where_the_engine_sends_spans(
    response: Generated, ttft_s: float | None, tpot_s: float | None, e2e_s: float | None
) -> None:
    promise = objective("chat", ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)
    with_proxy = joined(response.proxied, response.engines)
    assert judge(with_proxy, promise) is (MET if response.is_met(promise) else MISSED)
    for definition in DEFINITIONS.values():
        by_definition = replace(promise, definition=definition)
        assert judge(with_proxy, by_definition) is judge(response.engines, by_definition)


SLOW_TOKENS = Generated((0.5, 0.9, 1.5))


@pytest.mark.parametrize(
    ("promise", "verdict"),
    [
        ({"e2e_s": 1.5}, MET),
        ({"e2e_s": 1.4}, MISSED),
        ({"ttft_s": 0.2, "tpot_s": 0.1, "e2e_s": 1.5}, MET),
        ({"ttft_s": 9.0, "tpot_s": 9.0, "e2e_s": 1.4}, MISSED),
        ({"ttft_s": 9.0, "tpot_s": 9.0}, UNDETERMINED),
        ({"ttft_s": 9.0}, UNDETERMINED),
    ],
)
def test_without_a_span_the_limits_that_can_be_known_judge(
    promise: dict[str, float], verdict: Verdict
) -> None:
    assert judge(SLOW_TOKENS.proxied, objective("chat", **promise)) is verdict


@pytest.mark.parametrize(
    ("ttft_s", "e2e_s", "verdict"), [(0.2, 1.5, MISSED), (0.5, 1.4, MISSED), (0.5, 1.5, MET)]
)
def test_with_a_span_the_engine_gives_the_times_of_tokens(
    ttft_s: float, e2e_s: float, verdict: Verdict
) -> None:
    both = joined(SLOW_TOKENS.proxied, SLOW_TOKENS.engines)
    assert judge(both, objective("chat", ttft_s=ttft_s, e2e_s=e2e_s)) is verdict
    # The figures of the row stay what the user saw.
    assert (both.ttft_s, both.tpot_s) == (None, None)


def test_the_span_of_one_choice_does_not_judge_several() -> None:
    proxied = SLOW_TOKENS.proxied._replace(proxied=ProxyView(streamed=False, choices=2))
    both = joined(proxied, SLOW_TOKENS.engines)
    assert judge(both, objective("chat", ttft_s=0.2)) is UNDETERMINED
    assert judge(both, objective("chat", ttft_s=0.2, e2e_s=2.0)) is MET


@pytest.mark.parametrize(
    ("promise", "verdict"),
    [
        ({"ttft_s": 0.5, "tpot_s": 0.1}, MET),
        ({"ttft_s": 0.4, "tpot_s": 0.1}, MISSED),
        ({"ttft_s": 0.5, "tpot_s": 0.1, "e2e_s": 1.4}, MISSED),
        ({"tpot_s": 0.1}, UNDETERMINED),
    ],
)
def test_a_stream_of_several_choices_is_judged_without_tpot(
    promise: dict[str, float], verdict: Verdict
) -> None:
    view = ProxyView(streamed=True, choices=2)
    streamed = SLOW_TOKENS.proxied._replace(ttft_s=0.5, output_tokens=6, proxied=view)
    assert judge(streamed, objective("chat", **promise)) is verdict
    assert judge(joined(streamed, SLOW_TOKENS.engines), objective("chat", **promise)) is verdict


def test_a_stream_is_judged_by_all_limits() -> None:
    streamed = SLOW_TOKENS.proxied._replace(proxied=ProxyView(streamed=True, choices=1))
    both = joined(streamed, SLOW_TOKENS.engines)
    assert judge(both, objective("chat", ttft_s=9.0, e2e_s=2.0)) is UNDETERMINED


@pytest.mark.parametrize("name", sorted(DEFINITIONS.keys() - {GOODPUT.name}))
def test_a_load_generators_definition_judges_unknown_values_as_before(name: str) -> None:
    promise = objective("chat", ttft_s=9.0, e2e_s=2.0)
    definition = DEFINITIONS[name]
    verdict = judge(SLOW_TOKENS.proxied, replace(promise, definition=definition))
    assert verdict is definition.unseen
