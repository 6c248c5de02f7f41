"""The table of definitions, row by row as the tools document them."""

import pytest

from agent.catalog.definitions import DEFINITIONS, GOODPUT, Verdict

MET, MISSED, LEFT_OUT = Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED

# name: (a failed request, one token under a TPOT limit, an unknown figure)
EXPECTED = {
    "goodput": (MISSED, MET, LEFT_OUT),
    "vllm": (LEFT_OUT, MET, LEFT_OUT),
    "aiperf": (MISSED, MISSED, MISSED),
    "guidellm": (MISSED, LEFT_OUT, LEFT_OUT),
    "inference-perf": (LEFT_OUT, MISSED, MISSED),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_definition_judges_as_its_tool_does(name: str) -> None:
    definition = DEFINITIONS[name]
    verdicts = (definition.failed, definition.single_token, definition.unseen)
    assert verdicts == EXPECTED[name]
    assert definition.name == name


def test_there_are_no_other_definitions() -> None:
    assert set(DEFINITIONS) == set(EXPECTED)
    assert DEFINITIONS["goodput"] is GOODPUT


def test_a_failure_is_never_met() -> None:
    assert all(definition.failed is not MET for definition in DEFINITIONS.values())


def test_a_verdict_and_its_text_are_the_same_key() -> None:
    assert [{verdict: 1}[verdict.value] for verdict in Verdict] == [1, 1, 1]  # type: ignore[index]
    assert [verdict.value for verdict in Verdict] == ["met", "missed", "undetermined"]
