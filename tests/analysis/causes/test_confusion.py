"""The confusion matrix: what the page says is what is computed, and few causes are wrong."""

import re

import pytest

from tests.analysis.causes.confusion import counts_of
from tests.analysis.causes.faults import KINDS
from tests.analysis.causes.matrix_page import PAGE, PAIR_SEEDS, SEEDS, VIEWS, row

pytestmark = pytest.mark.slow

MOST_WRONG = 0.05
MOST_UNEXPLAINED = 0.05
# A line of each table; `python -m tests.analysis.causes.matrix_page` makes all of them.
RECOMPUTED = {True: ("slow grammar", "long prompts"), False: ("few places", "engine death")}
_ALL = re.compile(r"\| \*\*all\*\* \| (\d+) \| [\d.]+% \| ([\d.]+)% \| ([\d.]+)% \|")


def tables() -> dict[str, str]:
    """The matrices of the page by their titles."""
    _, *parts = PAGE.read_text(encoding="utf-8").split("\n### ")
    return {title: table for title, _, table in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("plugin", VIEWS)
def test_the_page_has_what_is_computed(plugin: bool) -> None:
    kinds = [kind for kind in KINDS if kind.fault.name in RECOMPUTED[plugin]]
    singles = tables()[f"One fault at a time, with {VIEWS[plugin]}"]
    assert row(kinds[:1], counts_of(kinds[:1], SEEDS, plugin=plugin)) in singles
    pairs = tables()[f"Two faults at a time, with {VIEWS[plugin]}"]
    assert row(kinds, counts_of(kinds, PAIR_SEEDS, plugin=plugin)) in pairs


def test_a_wrong_cause_is_rare_and_nearly_all_are_explained() -> None:
    found = tables()
    assert len(found) == 4
    for title, table in found.items():
        total = _ALL.search(table)
        assert total is not None, title
        missed, unexplained, wrong = (float(figure) for figure in total.groups())
        assert missed > 1000, title
        assert wrong <= 100 * MOST_WRONG, title
        assert unexplained <= 100 * MOST_UNEXPLAINED, title
