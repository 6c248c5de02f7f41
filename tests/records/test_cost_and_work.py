"""Costs and the work of an engine add up, and what is unknown stays unknown."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from agent.records.minute import Cost, EngineWork, total
from agent.records.model import Work

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
