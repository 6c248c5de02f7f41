"""What the requests in a box have more of than the rest."""

from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.contrast import BoxCounts, Contrast, GroupCount, contrasts


def group(name: str, inside: int, outside: int, dimension: str = "tenant") -> GroupCount:
    return GroupCount(dimension=dimension, name=name, inside=inside, outside=outside)


def told(inside: int, outside: int, *groups: GroupCount) -> list[Contrast]:
    return contrasts(BoxCounts(inside=inside, outside=outside, groups=groups))


def test_what_most_of_the_box_and_little_of_the_rest_has_comes_first() -> None:
    found = told(
        50,
        1000,
        group("acme", 20, 300),
        group("burst", 45, 20, "cause"),
        group("batch", 25, 100),
        group("others", 5, 600),
    )
    assert [(one.dimension, one.name) for one in found] == [("cause", "burst"), ("tenant", "batch")]
    assert (found[0].inside, found[0].outside) == (45, 20)
    assert (found[0].inside_share, found[0].outside_share) == (0.9, 0.02)


def test_a_difference_that_chance_makes_is_not_told() -> None:
    assert told(10, 1000, group("acme", 4, 300)) == []
    assert [one.name for one in told(1000, 100_000, group("acme", 400, 30_000))] == ["acme"]


def test_what_everything_has_tells_nothing() -> None:
    assert told(10, 90, group("only-engine", 10, 90, "engine")) == []


def test_without_a_rest_or_a_part_there_is_nothing_to_compare() -> None:
    assert told(10, 0, group("acme", 10, 0)) == []
    assert told(0, 10, group("acme", 0, 10)) == []


@given(st.integers(1, 500), st.integers(1, 500), st.data())
def test_a_name_that_is_told_is_always_more_frequent_in_the_box(
    inside: int, outside: int, data: st.DataObject
) -> None:
    of = group("acme", data.draw(st.integers(0, inside)), data.draw(st.integers(0, outside)))
    for one in told(inside, outside, of):
        assert one.inside_share > one.outside_share
        assert one.inside > 0
