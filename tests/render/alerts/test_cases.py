"""Every alert tells its incident and goes when it is over, and nothing is told of what only looks
like it: played by promtool."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from agent.render.alerts import render_alerts
from agent.render.alerts.files import RULES, VLLM_ALONE
from tests.render.alerts import (
    agent_cases,
    cost_cases,
    engine_cases,
    gpu_cases,
    objective_cases,
    vllm_cases,
)
from tests.render.alerts.around import AROUND
from tests.render.alerts.burn_plays import burn_plays, leaks
from tests.render.alerts.cases import (
    OBJECTIVES,
    Case,
    Series,
    complaints,
    firing,
    incident,
    lookalike,
    of_groups,
    play,
)
from tests.render.alerts.healthy import fleet

TEXTS = render_alerts(OBJECTIVES, budget_usd=cost_cases.BUDGET_USD)


@dataclass(frozen=True, slots=True)
class Pack:
    """Cases, the groups of rules that they are played against, and the world around them."""

    file: str
    groups: tuple[str, ...]
    around: Series
    cases: tuple[Case, ...]


_BUDGETS = ("goodput-recordings", "goodput-objectives")

PACKS = {
    "objectives": Pack(RULES, _BUDGETS, AROUND, objective_cases.BUDGETS),
    "latency": Pack(RULES, ("goodput-latency",), AROUND, objective_cases.LATENCIES),
    "requests": Pack(RULES, ("goodput-requests",), AROUND, engine_cases.REQUESTS),
    "engines": Pack(RULES, ("goodput-engines",), AROUND, engine_cases.ENGINES),
    "gpus": Pack(RULES, ("goodput-gpus",), AROUND, gpu_cases.CASES),
    "costs": Pack(RULES, ("goodput-costs",), AROUND, cost_cases.CASES),
    "agents": Pack(RULES, (*_BUDGETS, "goodput-agents"), AROUND, agent_cases.CASES),
    "vllm alone": Pack(VLLM_ALONE, ("vllm-alone",), vllm_cases.AROUND, vllm_cases.CASES),
}


@pytest.mark.parametrize("pack", PACKS)
def test_each_alert_tells_its_incident_and_nothing_else(pack: str, tmp_path: Path) -> None:
    played = PACKS[pack]
    tests = [incident(case, played.around) for case in played.cases]
    tests += [lookalike(case, played.around) for case in played.cases]
    assert complaints(tmp_path, of_groups(TEXTS[played.file], *played.groups), tests) == ""


@pytest.mark.parametrize("rules", [RULES, VLLM_ALONE])
def test_every_alert_has_a_case(rules: str) -> None:
    groups = yaml.safe_load(TEXTS[rules])["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    packs = [pack for pack in PACKS.values() if pack.file == rules]
    played = {case.alert for pack in packs for case in pack.cases}
    if rules == RULES:
        played |= {"LlmObjectiveBudgetBurn"}
    assert alerts - {"Watchdog"} == played


def test_budgets_are_told_as_fast_as_they_are_spent(tmp_path: Path) -> None:
    rules = of_groups(TEXTS[RULES], *_BUDGETS)
    assert complaints(tmp_path, rules, burn_plays(), every="5m") == ""


def test_slow_losses_are_told_by_tickets(tmp_path: Path) -> None:
    rules = of_groups(TEXTS[RULES], *_BUDGETS)
    assert complaints(tmp_path, rules, leaks(), every="10m") == ""


FLEETS = {
    "on a good day": fleet("0+STEPx120"),
    "when the agent and the engine start anew": fleet("0+STEPx60 0+STEPx60"),
    "when nobody asks for anything": fleet("0x120", load="0x120"),
    "when all traffic ends": fleet("0+STEPx60 HOURx60", load="0x120"),
    "when nothing was ever seen": {},
}


@pytest.mark.parametrize("when", FLEETS)
def test_a_fleet_that_works_is_silent(when: str, tmp_path: Path) -> None:
    series = {**AROUND, **FLEETS[when]}
    checks = [firing(minute, {}) for minute in (5, 61, 66, 90, 115)]
    assert complaints(tmp_path, TEXTS[RULES], [play(when, series, checks)]) == ""


def test_the_tool_would_tell(tmp_path: Path) -> None:
    case = engine_cases.ENGINES[0]
    wrong = incident(case, AROUND)
    wrong["alert_rule_test"][0]["exp_alerts"] = []
    rules = of_groups(TEXTS[RULES], "goodput-engines")
    assert "FAILED" in complaints(tmp_path, rules, [wrong])
