"""The roofline: ridge, bound and position of work."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.physics.roofline import Bound, Roof, bound, intensity, position
from agent.records.model import Work

H100 = Roof(989.4e12, 3.35e12)
AMOUNTS = st.floats(1e6, 1e18)


def test_the_ridge_is_where_both_roofs_meet() -> None:
    assert H100.ridge == pytest.approx(295.3, abs=0.1)
    assert H100.attainable_flops_per_s(H100.ridge) == pytest.approx(H100.flops_per_s)
    assert H100.attainable_flops_per_s(1) == H100.bytes_per_s


@pytest.mark.parametrize(
    ("flops_per_byte", "cache_full", "verdict"),
    [
        (1, False, Bound.BANDWIDTH),
        (1, True, Bound.CAPACITY),
        (1000, False, Bound.COMPUTE),
        (1000, True, Bound.COMPUTE),
    ],
)
def test_below_the_ridge_the_bound_is_bandwidth_or_capacity_with_a_full_cache(
    flops_per_byte: float, cache_full: bool, verdict: Bound
) -> None:
    assert bound(Work(flops_per_byte * 1e9, 1e9), H100, cache_full=cache_full) is verdict


def test_on_the_ridge_work_is_compute_bound() -> None:
    assert bound(Work(2.0, 1.0), Roof(2.0, 1.0)) is Bound.COMPUTE


def test_work_without_bytes_flops_or_time_has_no_position() -> None:
    assert intensity(Work(1e9, 0)) is None
    assert bound(Work(1e9, 0), H100) is None
    assert position(Work(0, 1e9), 1.0, H100) is None
    assert position(Work(1e9, 1e9), 0.0, H100) is None


def test_a_position_has_the_share_of_the_attainable_flops() -> None:
    found = position(Work(100e12, 1e12), 0.5, H100)
    assert found is not None
    assert found.intensity == 100
    assert found.achieved_flops_per_s == 200e12
    assert found.attainable_flops_per_s == pytest.approx(335e12)
    assert found.share == pytest.approx(200 / 335)


@given(AMOUNTS, AMOUNTS)
def test_work_done_in_its_least_time_reaches_the_roof(flops: float, moved: float) -> None:
    work = Work(flops, moved)
    found = position(work, H100.seconds(work), H100)
    assert found is not None
    assert found.share == pytest.approx(1)
