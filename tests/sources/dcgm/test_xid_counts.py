from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog import gpu_facts as f
from agent.catalog.gpu_problems import COUNTED_XIDS
from agent.sources.dcgm.xid_counts import Levels, XidCounts, XidLevels, XidSeries, levels

GPU = "GPU-0"
LAST, WINDOW, TOTAL = XidSeries.LAST, XidSeries.WINDOW, XidSeries.TOTAL


def new_in(*pages: XidLevels) -> list[Mapping[int, int]]:
    """The new Xids of each exposition, one after the other."""
    counts = XidCounts()
    return [counts.read(GPU, page, 1000.0 + step) for step, page in enumerate(pages)]


def last(xid: int) -> XidLevels:
    return {LAST: {xid: 1} if xid else {}}


def test_the_first_exposition_has_nothing_new() -> None:
    assert new_in({LAST: {79: 1}, WINDOW: {79: 2}, TOTAL: {79: 5}}) == [{}]


def test_a_last_xid_that_stays_is_no_new_one() -> None:
    assert new_in(last(31), last(31), last(31)) == [{}, {}, {}]


def test_a_change_of_the_last_xid_is_one_error() -> None:
    assert new_in(last(0), last(79), last(79), last(31), last(79)) == [
        {},
        {79: 1},
        {},
        {31: 1},
        {79: 2},
    ]


def test_an_exporter_that_restarts_with_the_last_xid_has_nothing_new() -> None:
    assert new_in(last(79), {}, last(79)) == [{}, {}, {}]


def test_an_xid_after_expositions_without_any_is_new() -> None:
    assert new_in({}, last(79)) == [{}, {79: 1}]


def test_a_window_counts_what_it_gains() -> None:
    pages: list[XidLevels] = [
        {WINDOW: found} for found in ({}, {31: 2}, {31: 5}, {31: 1}, {31: 2}, {})
    ]
    assert new_in(*pages) == [{}, {31: 2}, {31: 5}, {}, {31: 6}, {}]


def test_a_window_that_was_empty_counts_from_zero() -> None:
    pages: list[XidLevels] = [{WINDOW: found} for found in ({31: 2}, {}, {31: 2})]
    assert new_in(*pages) == [{}, {}, {31: 2}]


def test_a_total_that_falls_started_at_zero() -> None:
    pages: list[XidLevels] = [{TOTAL: found} for found in ({31: 4}, {31: 6}, {31: 1})]
    assert new_in(*pages) == [{}, {31: 2}, {31: 3}]


def test_a_row_of_a_total_that_was_missing_once_is_no_growth() -> None:
    pages: list[XidLevels] = [{TOTAL: found} for found in ({31: 4, 48: 1}, {48: 1}, {31: 4, 48: 1})]
    assert new_in(*pages) == [{}, {}, {}]


def test_series_that_report_one_error_at_different_times_count_it_once() -> None:
    assert new_in(
        {LAST: {}, WINDOW: {}, TOTAL: {}},
        {LAST: {79: 1}, WINDOW: {}, TOTAL: {}},
        {LAST: {79: 1}, WINDOW: {79: 1}, TOTAL: {}},
        {LAST: {79: 1}, WINDOW: {79: 1}, TOTAL: {79: 1}},
    ) == [{}, {79: 1}, {}, {}]


def test_the_series_that_saw_most_gives_the_count() -> None:
    assert new_in({LAST: {}, TOTAL: {}}, {LAST: {31: 1}, TOTAL: {31: 3}}) == [{}, {31: 3}]


@given(st.lists(st.integers(min_value=0, max_value=20), min_size=1))
def test_a_total_counts_as_much_as_it_grew(grown: list[int]) -> None:
    totals = [sum(grown[: end + 1]) for end in range(len(grown))]
    found = new_in(*({TOTAL: {31: total}} for total in totals))
    assert max([page.get(31, 0) for page in found]) == sum(grown[1:])


def test_gpus_are_counted_apart() -> None:
    counts = XidCounts()
    for gpu in ("a", "b"):
        counts.read(gpu, last(0), 1.0)
    assert counts.read("a", last(79), 2.0) == {79: 1}
    assert counts.read("b", last(0), 2.0) == {}
    assert counts.facts("b")[f.XID_ERRORS.name, ("79",)] == 0


def test_counts_start_at_zero_where_there_are_series_about_xids() -> None:
    counts = XidCounts()
    counts.read(GPU, last(0), 1.0)
    assert counts.facts(GPU) == {(f.XID_ERRORS.name, (str(xid),)): 0 for xid in COUNTED_XIDS}


def test_without_series_about_xids_there_are_no_zeros() -> None:
    counts = XidCounts()
    counts.read(GPU, {}, 1.0)
    assert counts.facts(GPU) == {}
    assert counts.facts("never seen") == {}


def test_the_facts_are_the_counts_and_the_last_times() -> None:
    counts = XidCounts()
    for at, found in ((1.0, last(0)), (2.0, last(31)), (3.0, last(31)), (4.0, {})):
        counts.read(GPU, found, at)
    assert counts.facts(GPU)[f.XID_ERRORS.name, ("31",)] == 1
    assert counts.facts(GPU)[f.XID_LAST_SEEN.name, ("31",)] == 2.0


@pytest.mark.parametrize(
    ("source", "rows", "found"),
    [
        (LAST, [({}, 0.0)], {}),
        (LAST, [({}, 79.0), ({"pod": "a"}, 79.0)], {79: 1}),
        (LAST, [({}, 2.0**63)], {}),
        (WINDOW, [({"window_size_in_ms": "300000"}, 0.0)], {}),
        (WINDOW, [({"xid": "0"}, 3.0)], {}),
        (WINDOW, [({"xid": "31"}, 2.0), ({"xid": "31", "GPU_I_ID": "1"}, 2.0)], {31: 2}),
        (TOTAL, [({"xid": "31"}, 4.0), ({"xid": "48"}, 1.0)], {31: 4, 48: 1}),
    ],
)
def test_rows_become_counts_by_xid(
    source: XidSeries, rows: list[tuple[Mapping[str, str], float]], found: Levels
) -> None:
    dropped: Counter[str] = Counter()
    assert levels(source, rows, dropped) == found
    assert not dropped


@pytest.mark.parametrize(
    ("source", "labels", "value"),
    [
        (LAST, {}, 79.5),
        (LAST, {}, -1.0),
        (LAST, {}, 1e9),
        (TOTAL, {"xid": "many"}, 1.0),
        (TOTAL, {"xid": "nan"}, 1.0),
        (TOTAL, {"xid": "-3"}, 1.0),
        (TOTAL, {"xid": "9" * 5000}, 1.0),
        (WINDOW, {"xid": "31"}, -2.0),
    ],
)
def test_a_row_without_a_usable_number_is_counted_and_the_others_are_used(
    source: XidSeries, labels: Mapping[str, str], value: float
) -> None:
    good = ({"xid": "48"}, 48.0)
    dropped: Counter[str] = Counter()
    assert set(levels(source, [(labels, value), good], dropped)) == {48}
    assert dropped == {"xid_malformed": 1}
