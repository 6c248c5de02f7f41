"""Which requests an objective covers."""

from typing import Any

import pytest

from agent.records.objective import Match

KNOWN: dict[str, Any] = {"model": "llama-8b", "tenant": "acme", "route": "/v1/chat"}


def match_on(field: str, pattern: str) -> Match:
    """A match with one condition."""
    condition: dict[str, Any] = {field: pattern}
    return Match(**condition)


def covers(match: Match, **given: Any) -> bool:
    facts = {**KNOWN, "input_tokens": 500, **given}
    return match.covers(facts["model"], facts["tenant"], facts["route"], facts["input_tokens"])


def test_a_match_without_conditions_covers_unknown_values() -> None:
    unknown = dict.fromkeys((*KNOWN, "input_tokens"))
    assert Match().everything
    assert covers(Match(), **unknown)


@pytest.mark.parametrize("field", KNOWN)
def test_a_pattern_is_a_shell_glob_over_the_whole_name(field: str) -> None:
    name = KNOWN[field]
    fitting = (name, f"{name[:3]}*", f"?{name[1:]}", f"[{name[0]}]*", "*")
    assert all(covers(match_on(field, pattern)) for pattern in fitting)
    failing = (name[:-1], name[1:], f"{name}?", name.upper(), "")
    assert not any(covers(match_on(field, pattern)) for pattern in failing)


@pytest.mark.parametrize("field", KNOWN)
def test_an_unknown_value_fits_no_condition(field: str) -> None:
    assert not covers(match_on(field, KNOWN[field]), **{field: None})


@pytest.mark.parametrize("field", ["tenant", "route"])
def test_a_star_does_not_cover_an_unknown_tenant_or_route(field: str) -> None:
    match = match_on(field, "*")
    assert not match.everything
    assert not covers(match, **{field: None})


def test_a_star_for_the_model_covers_an_unknown_model() -> None:
    assert covers(Match(model="*", tenant="acme"), model=None)


@pytest.mark.parametrize(
    ("match", "lengths"),
    [
        (Match(min_input_tokens=100), {99: False, 100: True, 10**9: True, None: False}),
        (Match(max_input_tokens=100), {0: True, 100: True, 101: False, None: False}),
        (
            Match(min_input_tokens=10, max_input_tokens=20),
            {9: False, 10: True, 20: True, 21: False, None: False},
        ),
        (Match(min_input_tokens=0), {0: True, None: False}),
        (Match(max_input_tokens=0), {0: True, 1: False}),
    ],
    ids=["at least", "at most", "between", "any known length", "none"],
)
def test_both_ends_of_an_input_length_are_included(
    match: Match, lengths: dict[int | None, bool]
) -> None:
    assert {length: covers(match, input_tokens=length) for length in lengths} == lengths
    assert not match.everything


def test_all_conditions_must_hold_at_once() -> None:
    match = Match(model="llama*", tenant="acme", route="/v1/*", max_input_tokens=1000)
    assert covers(match)
    for other in ({"model": "qwen"}, {"tenant": "b"}, {"route": "/v2"}, {"input_tokens": 1001}):
        assert not covers(match, **other)
