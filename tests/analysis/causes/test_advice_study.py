"""The study of changes: its figures are computed, and the page and the catalogue have them."""

import pytest

from agent.catalog.causes import CAUSES, Cause
from tests.analysis.causes.advice_study import (
    ADVISED,
    ALSO_TRIED,
    FEWER_STEP_TOKENS,
    MORE_SEQS,
    PAGE,
    cell,
    effect,
    kept,
    prepare,
    scenes,
    tables,
)
from tests.analysis.causes.scheduler_scenarios import CHAT

# A scene and a change of it, of each of two situations; `python -m` the study computes all.
RECOMPUTED = {"more requests": FEWER_STEP_TOKENS, "few places": MORE_SEQS}


@pytest.mark.slow
@pytest.mark.parametrize(("situation", "change"), RECOMPUTED.items())
def test_the_figures_are_what_is_computed(situation: str, change: str) -> None:
    scene = next(each for each in scenes() if each[:2] == (situation, each.scenario)
                 and each.scenario.name == CHAT.name)  # fmt: skip
    prepare([scene], [change])
    found = kept()[scene.name]
    assert found["as it is"] == cell(scene, None)
    assert found["changed"][change] == cell(scene, change)


def test_the_page_has_the_tables_of_the_figures() -> None:
    assert tables(kept()) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("cause", Cause)
def test_the_catalogue_says_what_the_changes_did(cause: Cause) -> None:
    figures = kept()
    facts = CAUSES[cause]
    measured = [facts.effect, facts.also and facts.also.effect]
    for said, tried in zip(measured, (ADVISED.get(cause), ALSO_TRIED.get(cause)), strict=True):
        assert said == (None if tried is None else effect(figures, cause, tried))


def test_a_change_is_advised_only_where_it_helped_most_cases_and_harmed_none() -> None:
    effects = {cause: facts.effect for cause, facts in CAUSES.items() if facts.effect is not None}
    assert effects
    for cause, found in effects.items():
        assert found.helped > found.tried / 2, cause
        assert not found.harmed, cause
