"""The confusion matrix: what the page says is what is computed, and few causes are wrong."""

import re

import pytest

from tests.analysis.causes.confusion import BEGIN, END, PAGE, VIEWS, counts_of, row, title
from tests.analysis.causes.counterfactual import by_arrival, explained
from tests.analysis.causes.fault_runs import PROXY, View, simulated
from tests.analysis.causes.faults import TUNED

pytestmark = pytest.mark.slow

MOST_WRONG = 0.05
# Lines of each table; `python -m tests.analysis.causes.confusion` makes all of them.
RECOMPUTED = ("slow grammar", "engine death", "a new tenant")
# The span of the example of the page.
EXAMPLE = f"{0x1B7:016x}"
_ALL = re.compile(r"\| \*\*all\*\* \| (\d+) \| [\d.]+% \| ([\d.]+)% \| ([\d.]+)% \|")


def tables() -> dict[str, str]:
    """The matrices of the page by their titles."""
    _, _, made = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made, _, _ = made.partition(END)
    _, *parts = made.split("\n### ")
    return {title: table for title, _, table in (part.partition("\n") for part in parts)}


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_the_page_has_what_is_computed(view: View) -> None:
    table = tables()[title(view)]
    for kind in TUNED.kinds:
        if kind.fault.name in RECOMPUTED:
            assert row([kind], counts_of(TUNED, [kind], TUNED.seeds, view)) in table


def test_the_example_is_a_request_of_the_simulation() -> None:
    """Each figure of the table in causes.md is one of that request's explanation."""
    (fault,) = [kind.fault for kind in TUNED.kinds if kind.fault.name == "long prompts"]
    sight = simulated([fault], TUNED.seeds[0], TUNED.scenario).sight(PROXY)
    every = explained(sight, by_arrival(sight.requests), TUNED.objective, plugin=True)
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


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_a_wrong_cause_is_rare(view: View) -> None:
    total = _ALL.search(tables()[title(view)])
    assert total is not None
    missed, _, wrong = (float(figure) for figure in total.groups())
    assert missed > 1000
    assert wrong <= 100 * MOST_WRONG
