"""Facts of samples as JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.gpu import Facts
from agent.store.facts import facts_by_text, facts_from, facts_json

names = st.sampled_from(["running", "requests", "clock"])
labels = st.lists(st.text(), min_size=1, max_size=2).map(tuple)


@given(
    st.dictionaries(
        st.tuples(names, st.just(())) | st.tuples(names.map("{}_by".format), labels),
        st.floats(allow_nan=False, allow_infinity=False),
    )
)
def test_facts_with_any_labels_are_read_as_written(facts: Facts) -> None:
    assert facts_from(json.dumps(facts_json(facts))) == facts


def test_an_unknown_value_is_no_fact() -> None:
    odd = {("a", ()): float("nan"), ("b", ("x",)): float("inf"), ("c", ("x",)): 1.0}
    assert facts_from(json.dumps(facts_json(odd))) == {("c", ("x",)): 1.0}


@pytest.mark.parametrize("damaged", ["{cut of", "[1]", '{"x": "y"}', '{"x": [1]}', '{"x": [{}]}'])
def test_damaged_facts_are_an_error(damaged: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        facts_from(damaged)


def test_the_api_names_a_fact_with_its_labels_in_braces() -> None:
    stored = facts_json({("a", ()): 1.0, ("b", ("x", "y")): 2.0, ("b", ("z",)): 3.0})
    assert facts_by_text(stored) == {"a": 1.0, "b{x,y}": 2.0, "b{z}": 3.0}
