"""Tallies of requests, sums that merge, and groups of lengths."""

from collections.abc import Iterable
from copy import deepcopy
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.quantiles import bin_of
from agent.analysis.tally import (
    ALL_OBJECTIVES,
    MEASURES,
    Tally,
    VerdictCounts,
    input_length_of,
    tally_of,
)
from agent.records.objective import JudgedRequest, Match
from agent.records.request import RequestRecord, Status, Vantage
from tests.records.making import judged, objective, record

OBJECTIVES = (
    objective("fast", ttft_s=0.05),
    objective("fair", ttft_s=0.5, match=Match(model="llama*")),
)

seconds = st.none() | st.floats(0, 1e6)
tokens = st.none() | st.integers(0, 1000)
records: st.SearchStrategy[RequestRecord] = st.builds(
    record,
    st.integers(0, 99),
    status=st.sampled_from(Status),
    vantage=st.sampled_from(Vantage),
    model=st.sampled_from(["llama", "qwen", None]),
    ttft_s=seconds,
    tpot_s=seconds,
    e2e_s=seconds,
    queue_s=seconds,
    input_tokens=tokens,
    output_tokens=tokens,
)
judged_requests = st.lists(records, max_size=30).map(lambda all_of: judged(all_of, OBJECTIVES))


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of these tallies."""
    summed = Tally()
    for tally in tallies:
        summed.add(tally)
    return summed


@given(judged_requests)
def test_counting_many_requests_equals_adding_one_by_one(requests: list[JudgedRequest]) -> None:
    assert tally_of(requests) == total(tally_of([item]) for item in requests)


@given(st.lists(judged_requests, min_size=2, max_size=4))
def test_groups_add_up_in_any_order(groups: list[list[JudgedRequest]]) -> None:
    whole = tally_of([item for group in groups for item in group])
    for order in permutations(groups):
        assert total(tally_of(group) for group in order) == whole


@given(judged_requests, judged_requests)
def test_adding_does_not_change_the_added_tally(
    some: list[JudgedRequest], others: list[JudgedRequest]
) -> None:
    added = tally_of(others)
    before = deepcopy(added)
    into = total([added, tally_of(some)])
    into.add(tally_of(some))
    assert added == before


def test_no_requests_give_an_empty_tally() -> None:
    assert tally_of([]) == total([]) == Tally()


def test_counts_of_four_requests() -> None:
    requests = judged(
        [
            record(1, ttft_s=0.01, input_tokens=100, output_tokens=7),
            record(2, ttft_s=0.1, input_tokens=None, output_tokens=None, vantage=Vantage.PROXY),
            record(3, status=Status.ERROR, model="qwen", output_tokens=0, tpot_s=None),
            record(4, ttft_s=None, tpot_s=None, e2e_s=None, queue_s=None, vantage=Vantage.JOINED),
        ],
        OBJECTIVES,
    )
    tally = tally_of(requests)
    assert tally.requests == 4
    assert tally.statuses == {"ok": 3, "error": 1}
    assert tally.seen_at_proxy == 2
    assert (tally.input_tokens, tally.input_tokens_known) == (300, 3)
    assert (tally.output_tokens, tally.output_tokens_known) == (28, 3)
    assert tally.verdicts == {
        ("fast", "met"): VerdictCounts(1, 7),
        ("fast", "missed"): VerdictCounts(2, 0),
        ("fast", "undetermined"): VerdictCounts(1, 21),
        ("fair", "met"): VerdictCounts(2, 7),
        ("fair", "undetermined"): VerdictCounts(1, 21),
        (ALL_OBJECTIVES, "met"): VerdictCounts(1, 7),
        (ALL_OBJECTIVES, "missed"): VerdictCounts(2, 0),
        (ALL_OBJECTIVES, "undetermined"): VerdictCounts(1, 21),
    }
    assert tally.bins["ttft_s"] == {bin_of(0.01): 1, bin_of(0.1): 2}
    assert tally.bins["tpot_s"] == {bin_of(0.02): 2}


@given(judged_requests)
def test_each_request_counts_once_for_each_objective_and_once_for_all(
    requests: list[JudgedRequest],
) -> None:
    tally = tally_of(requests)
    counted = {
        name: sum(n.requests for (of, _), n in tally.verdicts.items() if of == name)
        for name in (ALL_OBJECTIVES, "fast", "fair")
    }
    valid = [item.record for item in requests if item.record.status is not Status.INVALID]
    llamas = sum(record.model == "llama" for record in valid)
    assert counted == {ALL_OBJECTIVES: len(requests), "fast": len(valid), "fair": llamas}


@pytest.mark.parametrize("measure", MEASURES)
def test_an_unknown_value_is_in_no_bin(measure: str) -> None:
    assert measure not in tally_of(judged([record(**{measure: None})])).bins
    assert tally_of(judged([record(**{measure: 0.0})])).bins[measure] == {bin_of(0.0): 1}


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        *((None, None), (0, "0-1k"), (1023, "0-1k"), (1024, "1k-4k"), (4095, "1k-4k")),
        *((4096, "4k-16k"), (16383, "4k-16k"), (16384, "16k-64k"), (65535, "16k-64k")),
        *((65536, "64k+"), (10**9, "64k+")),
    ],
)
def test_an_input_length_includes_its_lower_edge_and_excludes_its_upper(
    tokens: int | None, expected: str | None
) -> None:
    assert input_length_of(tokens) == expected
