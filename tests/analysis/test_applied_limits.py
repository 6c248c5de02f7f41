"""By how much requests exceed the limits that judge them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.verdicts import E2E, FAILURE, TPOT, TTFT, excesses, judge
from agent.catalog.definitions import DEFINITIONS, GOODPUT, Definition, Verdict
from agent.records.objective import Objective
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage

OBJECTIVE = Objective(
    name="chat", definition=GOODPUT, target=0.9, window_s=3600, ttft_s=0.2, tpot_s=0.05, e2e_s=2.0
)
RECORD = RequestRecord(
    trace_id="a" * 32,
    span_id="b" * 16,
    vantage=Vantage.PROXY,
    status=Status.OK,
    started_at=100.0,
    ended_at=103.0,
    received_at=103.0,
    ttft_s=0.5,
    tpot_s=0.1,
    e2e_s=3.0,
    output_tokens=11,
    proxied=ProxyView(streamed=True, choices=1),
)


def test_each_broken_limit_has_its_excess() -> None:
    found = {each.limit: each.seconds for each in excesses(RECORD, OBJECTIVE)}
    # TPOT: ten tokens after the first, each 50 ms over.
    assert found == pytest.approx({TTFT: 0.3, TPOT: 0.5, E2E: 1.0})


def test_a_limit_of_the_client_replaces_the_objectives() -> None:
    strict = RECORD._replace(proxied=ProxyView(streamed=True, choices=1, ttft_limit_s=0.1))
    assert excesses(strict, OBJECTIVE)[0].seconds == pytest.approx(0.4)


def test_a_whole_response_is_judged_by_the_engines_own_times() -> None:
    whole = RECORD._replace(
        vantage=Vantage.JOINED,
        proxied=ProxyView(streamed=False, choices=1),
        engine_view=EngineView(status=Status.OK, ttft_s=0.25, tpot_s=0.04, e2e_s=3.0),
    )
    found = {each.limit: each.seconds for each in excesses(whole, OBJECTIVE)}
    assert found == pytest.approx({TTFT: 0.05, E2E: 1.0})


def test_the_excess_over_a_tpot_is_no_longer_than_the_request() -> None:
    # Of 1,001 tokens most came before the first event: 2.5 s after it at 100 ms each are 25.
    hidden = RECORD._replace(output_tokens=1001, reasoning_tokens=970)
    (tpot,) = [each for each in excesses(hidden, OBJECTIVE) if each.limit == TPOT]
    assert (tpot.value_s, tpot.limit_s) == pytest.approx((2.5, 25 * 0.05))


def test_tokens_that_nobody_counted_are_estimated_from_the_times() -> None:
    uncounted = RECORD._replace(output_tokens=None)
    (tpot,) = [each for each in excesses(uncounted, OBJECTIVE) if each.limit == TPOT]
    # 2.5 s after the first token at 100 ms each are 25 tokens.
    assert tpot.seconds == pytest.approx(25 * 0.05)


@pytest.mark.parametrize("status", [Status.ERROR, Status.TIMEOUT, Status.THROTTLED])
def test_a_failure_has_no_seconds(status: Status) -> None:
    (only,) = excesses(RECORD._replace(status=status), OBJECTIVE)
    assert (only.limit, only.seconds) == (FAILURE, None)


_latency = st.one_of(st.none(), st.floats(0.001, 10.0))


@given(
    st.sampled_from(list(DEFINITIONS.values())),
    st.tuples(_latency, _latency, _latency),
    st.tuples(_latency, _latency, _latency),
    st.sampled_from([Status.OK, Status.CANCELLED]),
    st.sampled_from([None, 0, 1, 9]),
)
def test_a_missed_request_has_an_excess_and_only_a_missed_one(
    definition: Definition,
    values: tuple[float | None, ...],
    limits: tuple[float | None, ...],
    status: Status,
    output_tokens: int | None,
) -> None:
    """The verdict is the oracle: a request without any broken limit is not missed by limits."""
    objective = replace(
        OBJECTIVE, definition=definition, ttft_s=limits[0], tpot_s=limits[1], e2e_s=limits[2]
    )
    record = RECORD._replace(
        status=status,
        ttft_s=values[0],
        tpot_s=values[1],
        e2e_s=values[2],
        output_tokens=output_tokens,
    )
    seconds = [each.seconds for each in excesses(record, objective)]
    if judge(record, objective) is not Verdict.MISSED:
        assert definition is not GOODPUT or seconds == [None]
    elif definition is GOODPUT:
        assert all(value is not None and value > 0 for value in seconds)
    assert seconds
