from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.analysis.quantiles import HIGHEST_BIN, LOWEST_BIN, BinRun
from agent.analysis.tally import MEASURES, Tally, tally_of
from agent.records.request import Status
from agent.store.encoding import decoded_run, encoded_run
from agent.store.rollups import decoded, encoded
from agent.store.summing import BinSum
from tests.store.making import request
from tests.store.test_rollups import FACTS, JUDGEMENTS

PLACES = st.integers(LOWEST_BIN, HIGHEST_BIN)
COUNTS = st.one_of(
    st.integers(1, 3), st.integers(1, 300), st.integers(1, 70_000), st.integers(1, 2**40)
)


def near(start: int) -> st.SearchStrategy[dict[int, int]]:
    """Bins that lie close together, of counts of one kind."""
    last = min(start + 40, HIGHEST_BIN)
    return st.dictionaries(st.integers(start, last), COUNTS, min_size=1, max_size=40)


BINS = st.dictionaries(PLACES, COUNTS, min_size=1, max_size=20) | PLACES.flatmap(near)


@given(BINS)
@example({LOWEST_BIN: 1, HIGHEST_BIN: 1})
@example({LOWEST_BIN: 2**64 - 1})
def test_bins_come_back_from_their_bytes(bins: dict[int, int]) -> None:
    # The way of values writes a byte a value, and is never taken where another is shorter.
    assert decoded_run(encoded_run(BinRun.of(bins))) == BinRun.of(bins)


@pytest.mark.parametrize(
    ("bins", "size"),
    [
        # A head of three bytes, then the way that is shortest.
        ({0: 1}, 3),
        ({0: 1, 9: 2, 200: 1}, 3 + 3),
        ({0: 1, 300: 1}, 3 + 301),
        ({0: 9, 200: 9}, 3 + 2 * 2),
        ({index: 200 for index in range(50)}, 3 + 50),
        ({index: 300 for index in range(50)}, 3 + 2 * 50),
        ({index: 70_000 for index in range(50)}, 3 + 4 * 50),
    ],
)
def test_bins_take_few_bytes(bins: dict[int, int], size: int) -> None:
    assert len(encoded_run(BinRun.of(bins))) == size


@given(st.lists(BINS, max_size=8), st.randoms())
def test_a_sum_of_bytes_is_the_sum_of_the_bins_in_any_order(
    parts: list[dict[int, int]], random: Any
) -> None:
    runs = [BinRun.of(bins) for bins in parts]
    whole: dict[int, int] = {}
    for bins in parts:
        for index, count in bins.items():
            whole[index] = whole.get(index, 0) + count
    random.shuffle(runs)
    summed = BinSum()
    for run in runs:
        summed.add(encoded_run(run))
    assert summed.bins() == whole


@pytest.mark.parametrize("count", [1, 254, 255])
def test_a_sum_does_not_run_over_however_many_are_added(count: int) -> None:
    """The counts of one byte each, as many as fill two bytes, and more."""
    bins = {index: count for index in range(-300, -200)}
    summed = BinSum()
    for _ in range(1000):
        summed.add(encoded_run(BinRun.of(bins)))
    assert summed.bins() == {index: 1000 * count for index in bins}


def test_a_sum_can_be_read_before_more_is_added() -> None:
    summed = BinSum()
    part = encoded_run(BinRun.of({index: 7 for index in range(20)}))
    summed.add(part)
    assert summed.bins() == {index: 7 for index in range(20)}
    summed.add(part)
    assert summed.bins() == {index: 14 for index in range(20)}


@given(st.sampled_from(JUDGEMENTS), st.lists(FACTS, max_size=10))
def test_a_tally_comes_back_from_its_bytes(judged: Any, seen: Sequence[Any]) -> None:
    tally = tally_of([request(n, judged, **facts) for n, facts in enumerate(seen)])
    objectives = ",".join(name for name, _ in judged.by_objective)
    assert decoded(encoded(tally, objectives), objectives) == tally


def test_every_status_is_kept() -> None:
    tally = tally_of([request(n, status=status) for n, status in enumerate(Status)])
    assert decoded(encoded(tally, "chat"), "chat").statuses == {str(s): 1 for s in Status}


def test_nothing_known_takes_no_bytes_for_bins() -> None:
    row = encoded(Tally(requests=1), "")
    assert [row[measure] for measure in MEASURES] == [None] * len(MEASURES)
