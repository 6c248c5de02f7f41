"""Records: what is added up, known, covered and compared."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from agent.records.engine import EngineProcess, ProcessRole
from agent.records.minute import Cost, EngineWork, total
from agent.records.model import Work
from agent.records.objective import Match
from agent.records.queries import Window

COST = Cost(
    idle=1, unknown=2, unseen=4, aborted=8, aborted_prefill=16, computed=32, cached=64, decode=128
)
WORK = EngineWork(**{field.name: 2.0**place for place, field in enumerate(fields(EngineWork))})


def test_every_part_of_a_cost_adds_up() -> None:
    assert asdict(COST + COST) == {name: 2 * part for name, part in asdict(COST).items()}
    assert COST.times(2) == COST + COST
    assert (COST.prefill, COST.requests) == (96, 224)


def test_every_figure_of_work_adds_up() -> None:
    assert asdict(WORK + WORK) == {name: 2 * part for name, part in asdict(WORK).items()}


@pytest.mark.parametrize(
    "name", [field.name for field in fields(EngineWork) if field.default is None]
)
def test_a_sum_with_an_unknown_figure_is_unknown_and_not_less(name: str) -> None:
    nothing: Any = {name: None}
    unknown = replace(WORK, **nothing)
    for both in (WORK + unknown, unknown + WORK):
        assert getattr(both, name) is None
        others = {each: figure for each, figure in asdict(both).items() if each != name}
        assert others == {each: 2 * asdict(WORK)[each] for each in others}


def test_a_total_of_nothing_is_unknown() -> None:
    assert total([COST, COST, COST]) == COST.times(3)
    parts: list[Cost] = []
    assert total(parts) is None


def test_work_that_both_phases_share_is_needed_once() -> None:
    phases = {"prefill_flops": 5.0, "decode_flops": 7.0, "prefill_bytes": 3.0, "decode_bytes": 4.0}
    assert replace(WORK, **phases, shared_bytes=2.0).needed == Work(12.0, 5.0)
    assert replace(WORK, decode_flops=None).needed is None


@pytest.mark.parametrize(("state", "stopped"), [("T", True), ("t", True), ("S", False)])
def test_a_process_that_a_signal_or_a_debugger_holds_is_stopped(state: str, stopped: bool) -> None:
    process = EngineProcess(
        pid=1, started_after_boot_s=2.0, role=ProcessRole.CORE, name="x", state=state, cpu_s=1.0
    )
    assert process.stopped is stopped


@pytest.mark.parametrize(("until", "length_s"), [(1010.25, 10.25), (1000.0, 0.001), (990.0, 0.001)])
def test_the_length_of_a_window_is_never_zero(until: float, length_s: float) -> None:
    assert Window(from_s=1000, until=until).length_s == length_s


# Which requests an objective covers

KNOWN: dict[str, Any] = {"model": "llama-8b", "tenant": "acme", "route": "/v1/chat"}


EVERY_CONDITION: dict[str, Any] = {
    "model": "llama*",
    "tenant": "acme",
    "route": "/v1/*",
    "max_input_tokens": 1000,
}


def match_on(field: str, pattern: str) -> Match:
    """A match with one condition."""
    condition: dict[str, Any] = {field: pattern}
    return Match(**condition)


def covers(match: Match, **given: Any) -> bool:
    facts = {**KNOWN, "input_tokens": 500, **given}
    return match.covers(facts["model"], facts["tenant"], facts["route"], facts["input_tokens"])


@pytest.mark.parametrize("field", KNOWN)
def test_a_pattern_is_a_shell_glob_over_the_whole_name(field: str) -> None:
    name = KNOWN[field]
    fitting = (name, f"{name[:3]}*", f"?{name[1:]}", f"[{name[0]}]*", "*")
    assert all(covers(match_on(field, pattern)) for pattern in fitting)
    failing = (name[:-1], name[1:], f"{name}?", name.upper(), "")
    assert not any(covers(match_on(field, pattern)) for pattern in failing)


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


@pytest.mark.parametrize(
    ("match", "given", "covered"),
    [
        ({}, dict.fromkeys((*KNOWN, "input_tokens")), True),
        *(({field: name}, {field: None}, False) for field, name in KNOWN.items()),
        ({"tenant": "*"}, {"tenant": None}, False),
        ({"route": "*"}, {"route": None}, False),
        ({"model": "*", "tenant": "acme"}, {"model": None}, True),
        (EVERY_CONDITION, {}, True),
        (EVERY_CONDITION, {"model": "qwen"}, False),
        (EVERY_CONDITION, {"tenant": "b"}, False),
        (EVERY_CONDITION, {"route": "/v2"}, False),
        (EVERY_CONDITION, {"input_tokens": 1001}, False),
    ],
)
def test_all_conditions_must_hold_and_an_unknown_value_fits_none_but_any_model(
    match: dict[str, Any], given: dict[str, Any], covered: bool
) -> None:
    assert covers(Match(**match), **given) is covered
    assert Match(**match).everything is (match == {})
