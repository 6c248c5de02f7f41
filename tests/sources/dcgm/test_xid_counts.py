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


def pages(series: XidSeries, *found: Levels) -> list[XidLevels]:
    return [{series: each} for each in found]


@pytest.mark.parametrize(
    ("expositions", "new"),
    [
        pytest.param([{LAST: {79: 1}, WINDOW: {79: 2}, TOTAL: {79: 5}}], [{}], id="first"),
        pytest.param([last(31)] * 3, [{}] * 3, id="last-that-stays"),
        pytest.param(
            [last(0), last(79), last(79), last(31), last(79)],
            [{}, {79: 1}, {}, {31: 1}, {79: 2}],
            id="last-that-changes",
        ),
        pytest.param([last(79), {}, last(79)], [{}] * 3, id="restart-with-the-same-last"),
        pytest.param([{}, last(79)], [{}, {79: 1}], id="after-none"),
        pytest.param(
            pages(WINDOW, {}, {31: 2}, {31: 5}, {31: 1}, {31: 2}, {}),
            [{}, {31: 2}, {31: 5}, {}, {31: 6}, {}],
            id="window-counts-its-gains",
        ),
        pytest.param(
            pages(WINDOW, {31: 2}, {}, {31: 2}), [{}, {}, {31: 2}], id="window-that-was-empty"
        ),
        pytest.param(
            pages(TOTAL, {31: 4}, {31: 6}, {31: 1}), [{}, {31: 2}, {31: 3}], id="total-that-falls"
        ),
        pytest.param(
            pages(TOTAL, {31: 4, 48: 1}, {48: 1}, {31: 4, 48: 1}), [{}] * 3, id="row-missing-once"
        ),
        pytest.param(
            [
                {LAST: {}, WINDOW: {}, TOTAL: {}},
                {LAST: {79: 1}, WINDOW: {}, TOTAL: {}},
                {LAST: {79: 1}, WINDOW: {79: 1}, TOTAL: {}},
                {LAST: {79: 1}, WINDOW: {79: 1}, TOTAL: {79: 1}},
            ],
            [{}, {79: 1}, {}, {}],
            id="one-error-in-series-of-different-speed",
        ),
        pytest.param(
            [{LAST: {}, TOTAL: {}}, {LAST: {31: 1}, TOTAL: {31: 3}}],
            [{}, {31: 3}],
            id="series-that-saw-most",
        ),
    ],
)
def test_new_errors_of_an_exposition(
    expositions: list[XidLevels], new: list[Mapping[int, int]]
) -> None:
    assert new_in(*expositions) == new


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
