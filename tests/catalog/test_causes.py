"""What the catalogue says of each cause; the flags are those that vLLM itself lists."""

import re
from pathlib import Path

import pytest

from agent.catalog.causes import CAUSES, Cause
from agent.catalog.engine_flags import LIMIT_FLAGS

# Of `python -m vllm.entrypoints.openai.api_server --help=all`.
RECORDED = Path(__file__).parent / "recorded" / "vllm-0.32.0-flags.txt"
FLAGS = frozenset(RECORDED.read_text(encoding="utf-8").split())

_FLAG = re.compile(r"--[a-z][a-z-]+")


@pytest.mark.parametrize("cause", Cause)
def test_a_knob_names_one_flag_and_vllm_has_it(cause: Cause) -> None:
    facts = CAUSES[cause]
    named = _FLAG.findall(facts.remedy)
    assert named == ([] if facts.flag is None else [facts.flag])
    assert FLAGS.issuperset(named)


def test_the_flags_of_limits_are_flags_of_vllm() -> None:
    assert FLAGS.issuperset(flag for flags in LIMIT_FLAGS.values() for flag in flags)


def test_the_page_of_causes_has_every_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "causes.md").read_text(encoding="utf-8")
    for cause, facts in CAUSES.items():
        change = " ".join(filter(None, (facts.remedy, facts.when)))
        assert f"| `{cause}` | {change} | {facts.measured or ''} | {facts.costs or ''} |" in page


@pytest.mark.parametrize("cause", Cause)
def test_the_text_of_an_advice_has_the_change_its_condition_and_its_effect(cause: Cause) -> None:
    facts = CAUSES[cause]
    assert facts.text.startswith(facts.remedy)
    assert (facts.when or "") in facts.text
    for effect in (facts.effect, facts.also and facts.also.effect):
        if effect is not None:
            assert f"helped in {effect.helped} of {effect.tried} modelled cases" in facts.text
