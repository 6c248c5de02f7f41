"""Every alert fires at its incident and ends with it, and fires at no similar case; by promtool."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.render.alerts import Timings, render_alerts
from agent.render.alerts.alert_files import RULES, VLLM_ALONE
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
    firing,
    incident,
    lookalike,
    of_groups,
    play,
)
from tests.render.alerts.healthy import fleet, vllm_fleet
from tests.render.alerts.promtool import complaints, complaints_about_rules
from tests.render.alerts.restarts import restarted
from tests.render.alerts.selecting import alert_rules

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
    "explained": Pack(RULES, (*_BUDGETS, "goodput-engines"), AROUND, objective_cases.EXPLAINED),
    "latency": Pack(RULES, ("goodput-latency",), AROUND, objective_cases.LATENCIES),
    "requests": Pack(RULES, ("goodput-requests",), AROUND, engine_cases.REQUESTS),
    "engines": Pack(RULES, ("goodput-engines",), AROUND, engine_cases.ENGINES),
    "gpus": Pack(RULES, ("goodput-gpus",), AROUND, gpu_cases.CASES),
    "costs": Pack(RULES, ("goodput-costs",), AROUND, cost_cases.CASES),
    "agents": Pack(RULES, ("goodput-agents",), AROUND, agent_cases.CASES),
    "agreement": Pack(RULES, _BUDGETS, AROUND, agent_cases.AGREEMENT),
    "vllm alone": Pack(VLLM_ALONE, ("vllm-alone",), vllm_cases.AROUND, vllm_cases.CASES),
}


@pytest.mark.parametrize("speed", [1.0, 60.0, 720.0])
def test_prometheus_accepts_the_rules_at_any_speed(tmp_path: Path, speed: float) -> None:
    timings = Timings(speed=speed, scrape_interval_s=15 / speed, evaluation_interval_s=30 / speed)
    texts = render_alerts(OBJECTIVES, timings)
    for file in (RULES, VLLM_ALONE):
        path = tmp_path / Path(file).name
        path.write_text(texts[file], encoding="utf-8")
        assert complaints_about_rules(path) == ""


@pytest.mark.parametrize("pack", PACKS)
def test_each_alert_fires_at_its_incident_alone(pack: str, tmp_path: Path) -> None:
    played = PACKS[pack]
    tests = [incident(case, played.around) for case in played.cases]
    tests += [lookalike(case, played.around) for case in played.cases]
    assert complaints(tmp_path, of_groups(TEXTS[played.file], *played.groups), tests) == ""


@pytest.mark.parametrize("rules", [RULES, VLLM_ALONE])
def test_every_alert_has_a_case(rules: str) -> None:
    alerts = {rule["alert"] for rule in alert_rules(TEXTS[rules])}
    packs = [pack for pack in PACKS.values() if pack.file == rules]
    played = {case.alert for pack in packs for case in pack.cases}
    if rules == RULES:
        played |= {"LlmObjectiveBudgetBurn"}
    assert alerts - {"Watchdog"} == played


def test_alerts_on_budgets_fire_as_fast_as_the_budget_burns(tmp_path: Path) -> None:
    rules = of_groups(TEXTS[RULES], *_BUDGETS)
    assert complaints(tmp_path, rules, burn_plays(), every="5m") == ""


def test_slow_losses_are_tickets(tmp_path: Path) -> None:
    rules = of_groups(TEXTS[RULES], *_BUDGETS)
    assert complaints(tmp_path, rules, leaks(), every="10m") == ""


@pytest.mark.parametrize("pack", PACKS)
def test_counter_resets_neither_end_an_incident_nor_prolong_it(pack: str, tmp_path: Path) -> None:
    played = PACKS[pack]
    tests = [test for case in played.cases if (test := restarted(case, played.around))]
    assert complaints(tmp_path, of_groups(TEXTS[played.file], *played.groups), tests) == ""


def test_every_alert_on_a_counter_has_a_case_with_a_counter_reset() -> None:
    rules = [rule for file in (RULES, VLLM_ALONE) for rule in alert_rules(TEXTS[file])]
    counting = {rule["alert"] for rule in rules if re.search(r"\b(increase|rate)\(", rule["expr"])}
    played = {
        case.alert
        for pack in PACKS.values()
        for case in pack.cases
        if restarted(case, pack.around) is not None
    }
    assert counting - {"LlmObjectiveBudgetBurn"} <= played


FLEETS = {
    "on a good day": fleet("0+STEPx120"),
    "when the agent and the engine start anew": fleet("0+STEPx60 0+STEPx60", past="7x60 0x60"),
    "when nobody asks for anything": fleet("0x120", load="0x120"),
    "when all traffic ends": fleet("0+STEPx60 HOURx60", load="0x120"),
    "when nothing was ever seen": {},
}
MINUTES = (5, 61, 66, 90, 115)


@pytest.mark.parametrize("when", FLEETS)
def test_a_fleet_that_works_is_silent(when: str, tmp_path: Path) -> None:
    series = {**AROUND, **FLEETS[when]}
    checks = [firing(minute, {}) for minute in MINUTES]
    assert complaints(tmp_path, TEXTS[RULES], [play(when, series, checks)]) == ""


VLLM_FLEETS = {
    "on a good day": vllm_fleet("0+STEPx120"),
    "when nobody asks for anything": vllm_fleet("0x120", load="0x120"),
    "when all traffic ends": vllm_fleet("0+STEPx60 HOURx60", load="0x120"),
    "when nothing was ever asked": {},
}


@pytest.mark.parametrize("when", VLLM_FLEETS)
def test_a_vllm_that_works_is_silent(when: str, tmp_path: Path) -> None:
    series = {**vllm_cases.AROUND, **VLLM_FLEETS[when]}
    checks = [firing(minute, {}) for minute in MINUTES]
    assert complaints(tmp_path, TEXTS[VLLM_ALONE], [play(when, series, checks)]) == ""


def test_a_restart_of_vllm_fires_the_alert_on_restarts_alone(tmp_path: Path) -> None:
    series = {**vllm_cases.AROUND, **vllm_fleet("0+STEPx60 0+STEPx60")}
    checks = [firing(minute, {}) for minute in (5, 60, 90)]
    checks += [firing(minute, {"VllmRestarted": 1}) for minute in (61, 66, 75)]
    assert complaints(tmp_path, TEXTS[VLLM_ALONE], [play("anew", series, checks)]) == ""


@pytest.mark.parametrize(("file", "group"), [(RULES, "goodput-agents"), (VLLM_ALONE, "vllm-alone")])
def test_the_watchdog_always_fires(file: str, group: str, tmp_path: Path) -> None:
    host = "your-goodput-agent.example" if file == VLLM_ALONE else "localhost:9470"
    scheme = "https" if file == VLLM_ALONE else "http"
    expected = {
        "exp_labels": {"severity": "none", "rules": Path(file).stem},
        "exp_annotations": {
            "summary": "Alerts can be delivered",
            "description": "This alert always fires. Its receiver must raise the alarm when it "
            "stops arriving: then Prometheus, Alertmanager or a connection between them is broken.",
            "runbook_url": f"{scheme}://{host}/runbooks/Watchdog.md",
        },
    }
    checks = [
        {"alertname": "Watchdog", "eval_time": at, "exp_alerts": [expected]} for at in ("0m", "2h")
    ]
    test = {**play("always", {}, []), "alert_rule_test": checks}
    assert complaints(tmp_path, of_groups(TEXTS[file], group), [test]) == ""


def test_the_tool_reports_a_failing_test(tmp_path: Path) -> None:
    case = engine_cases.ENGINES[0]
    wrong = incident(case, AROUND)
    wrong["alert_rule_test"][0]["exp_alerts"] = []
    rules = of_groups(TEXTS[RULES], "goodput-engines")
    assert "FAILED" in complaints(tmp_path, rules, [wrong])
