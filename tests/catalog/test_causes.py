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


def test_the_page_of_causes_has_every_knob() -> None:
    page = (Path(__file__).parents[2] / "docs" / "causes.md").read_text(encoding="utf-8")
    for cause, facts in CAUSES.items():
        assert f"| `{cause}` | {facts.remedy} | {facts.costs or ''} |" in page
