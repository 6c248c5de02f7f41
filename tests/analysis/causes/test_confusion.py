"""The confusion matrix: what the page says is what is computed, and few causes are wrong."""

import re

import pytest

from tests.analysis.causes.confusion import (
    BEGIN,
    END,
    PAGE,
    UNSEEN,
    VIEWS,
    counts_of,
    row,
)
from tests.analysis.causes.counterfactual import explained
from tests.analysis.causes.fault_runs import simulated
from tests.analysis.causes.faults import HELD_OUT, SLOW_UNSEEN, TUNED

pytestmark = pytest.mark.slow

MOST_WRONG = 0.05
MOST_UNEXPLAINED = 0.05
# A line of each table; `python -m tests.analysis.causes.confusion` makes all of them.
RECOMPUTED = "slow grammar"
# The span of the example of the page.
EXAMPLE = f"{0x1B7:016x}"
_ALL = re.compile(r"\| \*\*all\*\* \| (\d+) \| [\d.]+% \| ([\d.]+)% \| ([\d.]+)% \|")


def tables() -> dict[str, str]:
    """The matrices of the page by their titles."""
    _, _, made = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made, _, _ = made.partition(END)
    _, *parts = made.split("\n### ")
    return {title: table for title, _, table in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("plugin", VIEWS)
def test_the_page_has_what_is_computed(plugin: bool) -> None:
    for title, setting in (("One fault at a time", TUNED), ("Held-out faults", HELD_OUT[-1])):
        kinds = [kind for kind in setting.kinds if kind.fault.name == RECOMPUTED]
        line = row(setting, kinds, counts_of(setting, kinds, setting.seeds, plugin=plugin))
        assert line in tables()[f"{title}, with {VIEWS[plugin]}"]


def test_the_example_is_a_request_of_the_simulation() -> None:
    """Each figure of the table in causes.md is one of that request's explanation."""
    (fault,) = [kind.fault for kind in TUNED.kinds if kind.fault.name == "long prompts"]
    sight = simulated([fault], TUNED.seeds[0], TUNED.scenario).sight(proxy=True)
    every = explained(sight, TUNED.objective, plugin=True)
    found = next(found for _, record, found in every if record.span_id == EXAMPLE)
    shares = {(share.limit, share.cause.value): share for share in found.shares}
    page = PAGE.with_name("causes.md").read_text(encoding="utf-8")
    lines = re.findall(r"\| (\w+) \| `(\w+)` \| (\d+) ms \| (.*) \|", page)
    assert lines
    for limit, cause, excess_ms, evidence in lines:
        share = shares[limit, cause]
        assert share.excess_s == pytest.approx(int(excess_ms) / 1000, abs=0.0005)
        assert figures(evidence) <= figures(" ".join(share.evidence)), cause
    assert f"cause: {found.top}" in page
    for limit in ("ttft", "tpot"):
        excess_s = sum(share.excess_s or 0.0 for share in found.shares if share.limit == limit)
        assert f"{1000 * excess_s:.0f} ms for `{limit}`" in page


def figures(text: str) -> set[str]:
    """The numbers of a sentence."""
    return set(re.findall(r"\d[\d,.]*\d|\d", text))


def test_a_wrong_cause_is_rare_and_nearly_all_are_explained() -> None:
    found = tables()
    assert len(found) == 6
    for title, table in found.items():
        if title in UNSEEN.values():
            continue
        total = _ALL.search(table)
        assert total is not None, title
        missed, unexplained, wrong = (float(figure) for figure in total.groups())
        assert missed > 1000, title
        assert wrong <= 100 * MOST_WRONG, title
        assert unexplained <= 100 * MOST_UNEXPLAINED, title


@pytest.mark.parametrize("plugin", VIEWS)
def test_steps_that_are_slow_for_no_reason_that_is_seen_are_unexplained(plugin: bool) -> None:
    """The slow engine's batch grows, and fills its places: both follow from the slowness."""
    counts = counts_of(TUNED, [SLOW_UNSEEN], TUNED.seeds[:1], plugin=plugin)
    assert counts.missed > 100
    assert counts.wrong <= MOST_WRONG * counts.missed
    table = tables()[UNSEEN[plugin]]
    assert row(TUNED, [SLOW_UNSEEN], counts) in table
    total = _ALL.search(table)
    assert total is not None
    assert float(total[3]) <= 100 * MOST_WRONG
