"""Screened phases of requests, and the parts that add up to a request."""

from math import inf, isfinite, nan, nextafter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.analysis.latency import (
    CLOCK_SLACK_S,
    MAX_TOKENS,
    ReportedPhases,
    request_parts,
    screen,
    tpot_s,
)

SECONDS = ("e2e_s", "ttft_s", "queue_s", "prefill_s", "decode_s")
TOKENS = ("input_tokens", "output_tokens")
LONGEST_S = 1e9

# A request as vLLM 0.32 reports it.
PLAIN = ReportedPhases(0.5, 0.1, 0.01, 0.09, 0.4, 100, 21)

any_seconds = (
    st.none()
    | st.floats()
    | st.sampled_from([0.0, -0.0, -0.0005, 1e-9, 0.5, 0.501, 1e9, 1e9 + 1, -1.79e9, 5e5, 1e308])
)
any_tokens = st.none() | st.integers() | st.sampled_from([-1, 0, 1, MAX_TOKENS, MAX_TOKENS + 1])
anything = st.builds(ReportedPhases, *[any_seconds] * 5, *[any_tokens] * 2)


@st.composite
def plausible(draw: st.DrawFn) -> ReportedPhases:
    """Plausible values of an engine: every phase fits into the request, a token was produced."""
    e2e_s = draw(st.floats(1e-6, 1e6))
    within = st.floats(0, e2e_s)
    queue_s, prefill_s, decode_s = draw(within), draw(within), draw(within)
    ttft_s = draw(st.floats(1e-9, e2e_s))
    tokens = draw(st.integers(0, MAX_TOKENS)), draw(st.integers(1, MAX_TOKENS))
    return ReportedPhases(e2e_s, ttft_s, queue_s, prefill_s, decode_s, *tokens)


def changed(reported: ReportedPhases, field: str, value: Any) -> ReportedPhases:
    """The same values with one field changed."""
    change: dict[str, Any] = {field: value}
    return reported._replace(**change)


@given(plausible(), st.sets(st.sampled_from(ReportedPhases._fields)))
def test_plausible_and_absent_values_are_unchanged(
    reported: ReportedPhases, absent: set[str]
) -> None:
    unknown: dict[str, Any] = dict.fromkeys(absent)
    partial = reported._replace(**unknown)
    assert screen(partial) == (partial, (), False)


@given(anything)
@example(ReportedPhases(-0.0005, 0.0001, 0.0, 0.0, 0.0, 1, 1))
@example(ReportedPhases(inf, 0.1, 0.0, 0.0, 0.0, 1, 1))
@example(ReportedPhases(nan, nan, nan, nan, nan, -1, -1))
def test_no_value_is_outside_its_bounds(reported: ReportedPhases) -> None:
    phases = screen(reported).phases
    longest_s = LONGEST_S if phases.e2e_s is None else phases.e2e_s + CLOCK_SLACK_S
    for name in SECONDS:
        value_s = getattr(phases, name)
        assert value_s is None or (isfinite(value_s) and 0 <= value_s <= longest_s), name
    for name in TOKENS:
        count = getattr(phases, name)
        assert count is None or 0 <= count <= MAX_TOKENS, name
    assert phases.ttft_s != 0
    if phases.output_tokens == 0:
        assert phases.ttft_s is phases.prefill_s is phases.decode_s is None


@given(anything)
def test_a_value_is_kept_or_refused_once_with_a_reason(reported: ReportedPhases) -> None:
    screened = screen(reported)
    refused = [field for field, _ in screened.findings]
    gone = [
        name
        for name in ReportedPhases._fields
        if getattr(reported, name) is not None and getattr(screened.phases, name) is None
    ]
    assert sorted(refused) == sorted(gone)
    for name in set(ReportedPhases._fields) - set(gone):
        assert getattr(screened.phases, name) == getattr(reported, name)


@pytest.mark.parametrize("field", ["ttft_s", "queue_s", "prefill_s", "decode_s"])
def test_a_phase_may_be_longer_than_its_request_by_the_clock_slack(field: str) -> None:
    longest_s = 0.5 + CLOCK_SLACK_S
    assert screen(changed(PLAIN, field, longest_s)).findings == ()
    longer = screen(changed(PLAIN, field, nextafter(longest_s, 1)))
    assert longer.findings == ((field, "longer_than_request"),)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        *((name, -0.001, "negative") for name in SECONDS),
        *((name, nan, "not_finite") for name in SECONDS),
        *((name, inf, "not_finite") for name in SECONDS),
        *((name, -inf, "not_finite") for name in SECONDS),
        ("e2e_s", 2e9, "longer_than_request"),
        ("ttft_s", 0.0, "zero"),
        ("input_tokens", -1, "negative"),
        ("output_tokens", -1, "negative"),
        ("input_tokens", MAX_TOKENS + 1, "too_large"),
        ("output_tokens", MAX_TOKENS + 1, "too_large"),
    ],
)
def test_one_bad_value_is_removed_alone(field: str, value: float, reason: str) -> None:
    screened = screen(changed(PLAIN, field, value))
    assert screened.findings == ((field, reason),)
    assert screened.phases == changed(PLAIN, field, None)
    assert not screened.ended_before_first_token


def test_a_request_ended_before_its_first_token_is_detected_by_its_phases() -> None:
    # scheduled_ts and first_token_ts stayed at zero on a machine that is up for 90000 s.
    reported = ReportedPhases(0.02, 0.02, -90000.0, 0.0, 0.0, 12, 0)
    screened = screen(reported)
    assert screened.phases == ReportedPhases(0.02, None, None, None, None, 12, 0)
    assert screened.ended_before_first_token
    up_for_long = screen(reported._replace(queue_s=0.0, prefill_s=90000.0))
    assert up_for_long.ended_before_first_token
    with_tokens = screen(PLAIN._replace(queue_s=-3.0, prefill_s=90000.0))
    assert not with_tokens.ended_before_first_token


def test_a_response_without_tokens_and_with_valid_phases_is_no_failure() -> None:
    screened = screen(ReportedPhases(0.02, 0.02, 0.001, 0.019, 0.0, 12, 0))
    assert screened.phases == ReportedPhases(0.02, None, 0.001, None, None, 12, 0)
    assert set(screened.findings) == {
        ("ttft_s", "no_output"),
        ("prefill_s", "no_output"),
        ("decode_s", "no_output"),
    }
    assert not screened.ended_before_first_token


# TPOT


@pytest.mark.parametrize(("decode_s", "tokens"), [(0.4, 1), (0.4, 0), (None, 21), (0.4, None)])
def test_tpot_is_unknown_when_it_is_not_defined(decode_s: float | None, tokens: int | None) -> None:
    assert tpot_s(decode_s, tokens) is None


# Arrives at 0; scheduled at 0.3 after 0.05 in the frontend; first token made at 0.5 and seen at
# 0.52; last token made at 1.5; the response ends at 1.55.
_REQUEST = {"ttft_s": 0.52, "e2e_s": 1.55, "queue_s": 0.25, "prefill_s": 0.2, "decode_s": 1.0}


@pytest.mark.parametrize(
    ("unknown", "front_s", "rest_s"),
    [
        ([], 0.05 + 0.02, 1.55 - 0.52 - 1.0),
        *((name, None, None) for name in (["ttft_s"], ["queue_s"], ["prefill_s"])),
        (["e2e_s"], 0.07, None),
        (["decode_s"], 0.07, None),
    ],
)
def test_the_time_before_the_first_token_and_after_the_last_of_the_engine(
    unknown: list[str], front_s: float | None, rest_s: float | None
) -> None:
    found = request_parts(**(_REQUEST | dict.fromkeys(unknown)))
    assert (found.front_s, found.rest_s) == pytest.approx((front_s, rest_s))
