"""The bench on vLLM's own scheduler: it is vLLM's, and how often the named cause is true there."""

import re
from itertools import chain

import pytest

from agent.catalog import engine_facts as fact
from tests.analysis.causes.scheduler_matrix import (
    BEGIN,
    PAGE,
    TABLES,
    Case,
    cases,
    cell,
    counts_of,
    limits,
    run,
)
from tests.analysis.causes.scheduler_runs import View, again, recording, with_engine
from tests.analysis.causes.scheduler_scenarios import (
    CHAT,
    DOCUMENTS,
    DRAFTING,
    PREFIXES_CHANGED,
    SCENARIOS,
    blocks_taken,
)
from tests.analysis.causes.scheduler_scenarios import FACTOR_FROM_S as FROM_S
from tests.analysis.causes.scheduler_scenarios import FACTOR_UNTIL_S as UNTIL_S

# Where no run is kept yet, they take minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# In percent of the missed requests of a table; of a line of it, all scenarios together; and of the
# lines with a cause that a source can tell, how many are right.
MOST_WRONG = {View.SAMPLES: 1.0, View.PLUGIN: 1.5, View.DETAILS: 1.5}
MOST_WRONG_OF_A_LINE = 10.0
LEAST_RIGHT = {View.SAMPLES: 72.0, View.PLUGIN: 92.5, View.DETAILS: 93.0}
# A line with few missed requests says little: one in eight of 32 is wrong of the worst.
ENOUGH = 40
# Every so many cells of a table are computed again.
EVERY = 18
# What no other test shows: requests that waited long for new prompts, and steps that are all slow.
ALSO = (("a new tenant, +150%", DOCUMENTS), ("slow steps x4.0", DOCUMENTS))


def test_a_kept_run_is_what_the_engine_does_now() -> None:
    assert again(CHAT) == recording(CHAT).written


def test_its_steps_keep_the_engines_arguments() -> None:
    usual = recording(CHAT).sight(View.DETAILS).steps
    assert max(step.prefill_tokens + step.decode_tokens for step in usual) > 512
    fewer = recording(with_engine(CHAT, max_num_batched_tokens=512)).sight(View.DETAILS).steps
    assert max(step.prefill_tokens + step.decode_tokens for step in fewer) <= 512


def test_its_prefix_cache_has_the_prompts_of_tenants_until_they_change() -> None:
    sight = recording(CHAT, (PREFIXES_CHANGED,)).sight(View.PLUGIN)
    began_at = sight.samples[0].at
    shares: dict[bool, list[float]] = {False: [], True: []}
    for record in sight.requests:
        at_s = record.started_at - began_at
        if at_s > 30 and record.cached_tokens is not None and record.input_tokens:
            changed = FROM_S < at_s < UNTIL_S
            shares[changed].append(record.cached_tokens / record.input_tokens)
    assert sum(shares[False]) / len(shares[False]) > 0.5
    assert sum(shares[True]) / len(shares[True]) < 0.1


def test_it_preempts_requests_when_its_kv_cache_is_full() -> None:
    usual, short = (
        recording(CHAT, factors).sight(View.SAMPLES).samples[-1].fact(fact.PREEMPTIONS.name)
        for factors in ((), (blocks_taken(0.9),))
    )
    assert usual == 0
    assert short
    assert short > 0


def test_its_drafts_are_accepted_as_scripted() -> None:
    last = recording(DRAFTING).sight(View.SAMPLES).samples[-1]
    drafts = last.fact(fact.SPEC_DECODE_DRAFTS.name)
    accepted = last.fact(fact.SPEC_DECODE_ACCEPTED_TOKENS.name)
    assert drafts
    assert accepted
    assert accepted / drafts == pytest.approx(0.75 + 0.75**2 + 0.75**3, rel=0.05)


def test_usual_requests_meet_the_limits() -> None:
    objective = limits(CHAT)
    requests = recording(CHAT).sight(View.PROXY).requests
    met = sum((record.ttft_s or 0) <= (objective.ttft_s or 0) for record in requests)
    assert met >= 0.95 * len(requests)


@pytest.fixture(scope="module")
def computed() -> dict[View, list[Case]]:
    """Some cells of each table, whose runs were made together."""
    also = [each for each in cases() if (each.name, each.scenario) in ALSO]
    chosen = {view: cases()[number::EVERY] + also for number, view in enumerate(TABLES)}
    run(chain.from_iterable(chosen.values()))
    return chosen


@pytest.mark.parametrize("view", TABLES)
def test_the_page_has_what_is_computed(view: View, computed: dict[View, list[Case]]) -> None:
    lines = {cells[0]: cells for cells in tables()[view]}
    for case in computed[view]:
        column = 1 + SCENARIOS.index(case.scenario)
        assert lines[case.name][column] == cell(counts_of(case, view)), case.name


@pytest.mark.parametrize("view", TABLES)
def test_few_causes_are_wrong(view: View) -> None:
    *lines, total = tables()[view]
    assert len(lines) == len({case.name for case in cases()})
    assert shares(total[-1])[3] <= MOST_WRONG[view]
    for line in lines:
        missed, *_, wrong = shares(line[-1])
        assert missed < ENOUGH or wrong <= MOST_WRONG_OF_A_LINE, line[0]


@pytest.mark.parametrize("view", TABLES)
def test_most_causes_that_a_source_can_tell_are_found(view: View) -> None:
    visible = {case.name for case in cases() if all(each.causes for each in case.factors)}
    found = [shares(line[-1]) for line in tables()[view] if line[0] in visible]
    missed = sum(line[0] for line in found)
    assert missed > 5000
    assert sum(line[0] * line[1] for line in found) >= LEAST_RIGHT[view] * missed


def tables() -> dict[View, list[list[str]]]:
    """The cells of each table of the page, without its head."""
    _, _, made = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    made, _, _ = made.partition("### Two factors")
    _, *parts = made.split("### With ")
    found = {View(title): text.strip() for title, _, text in (p.partition("\n") for p in parts)}
    return {view: [row(line) for line in text.splitlines()[2:]] for view, text in found.items()}


def row(line: str) -> list[str]:
    """The cells of a line."""
    return [each.strip() for each in line.strip("|").split("|")]


def shares(of: str) -> tuple[float, float, float, float]:
    """A cell's missed requests, and the percentages right, unexplained and wrong."""
    missed, right, unexplained, wrong = map(float, re.findall(r"[\d.]+", of))
    return missed, right, unexplained, wrong
