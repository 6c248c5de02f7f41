"""Every alert fires at its incident and ends with it, and fires at no similar case; by promtool."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.render.alerts import RuleOptions, Timings, render_alerts
from agent.render.alerts.alert_files import RULES, VLLM_ALONE
from agent.settings import Settings
from tests.render.alerts import (
    agent_cases,
    engine_cases,
    gpu_cases,
    objective_cases,
    vllm_cases,
)
from tests.render.alerts.cases import (
    AGENT,
    AROUND,
    ENGINE,
    OBJECTIVES,
    TEXTS,
    Case,
    Scene,
    Series,
    alert_rules,
    alerts_of,
    configured,
    elsewhere,
    expected,
    firing,
    incident,
    lookalike,
    of_groups,
    play,
    renamed,
)
from tests.render.alerts.objective_cases import burn_plays
from tests.render.alerts.promtool import complaints, complaints_about_rules, restarted


@dataclass(frozen=True, slots=True)
class Pack:
    """Cases, the groups of rules that they are played against, and the world around them.

    Cases with this value of the label are played at once, each with a value of its own: promtool's
    time goes by minutes and rules much more than by series.
    """

    groups: tuple[str, ...]
    cases: tuple[Case, ...]
    file: str = RULES
    around: Series = field(default_factory=lambda: AROUND)
    label: str = "instance"
    value: str = "a:9470"
    every: str = "1m"

    def complaints(self, folder: Path, tests: Iterable[Mapping[str, Any]]) -> str:
        """Promtool's complaints about tests of the rules."""
        rules = of_groups(TEXTS[self.file], *self.groups)
        return complaints(folder, rules, tests, every=self.every)

    def incidents(self) -> Iterator[dict[str, Any]]:
        """Tests that play the incidents."""
        left, apart = self._sorted()
        while left:
            now: list[Case] = []
            for case in left:
                # The texts of an alert can be checked at one incident at a time.
                taken = {name for other in now for name in alerts_of(other)}
                if not alerts_of(case) & taken:
                    now.append(case)
            yield self._played([(incident, case) for case in now])
            left = [case for case in left if case not in now]
        for case in apart:
            yield self._played([(incident, case)])

    def others(self) -> Iterator[dict[str, Any]]:
        """Tests that play the similar cases, and the incidents amid which counters are reset."""
        together, apart = self._sorted()
        if together:
            yield self._played(
                [(scene, case) for case in together for scene in (lookalike, restarted)]
            )
        for case in apart:
            yield self._played([(lookalike, case)])
            if restarted(case) is not None:
                yield self._played([(restarted, case)])

    def silent(self) -> Iterator[dict[str, Any]]:
        together, apart = self._sorted()
        yield self._played([(silent, case) for case in together])
        for case in apart:
            yield self._played([(silent, case)])

    def _sorted(self) -> tuple[list[Case], list[Case]]:
        """The cases that can be played together, and those that are played alone."""
        together = [
            case
            for case in self.cases
            if case.labels.get(self.label) == self.value and case.minutes[-1] < LONG
        ]
        return together, [case for case in self.cases if case not in together]

    def _played(self, scenes: Sequence[tuple[Callable[..., Scene | None], Case]]) -> dict[str, Any]:
        series, checks = dict(self.around), []
        for number, (scene, case) in enumerate(scenes):
            if len(scenes) > 1:
                there = f"{self.value}-{number}"
                series |= renamed(self.around, self.value, there)
                moved = elsewhere(case, self.value, there)
                found = scene(moved, f',{self.label}="{there}"')
            else:
                found = scene(case)
            if found is not None:
                series |= found[0]
                checks += found[1]
        return play(" ".join(case.alert for _, case in scenes), series, checks)


def silent(case: Case, where: str = "") -> Scene:
    return case.incident, [firing(minute, {}, where) for minute in case.minutes]


LONG = 100
_BUDGETS = ("goodput-recordings", "goodput-objectives")

PACKS = {
    "objectives": Pack(_BUDGETS, objective_cases.BUDGETS, label="model", value="llama"),
    "explained": Pack((*_BUDGETS, "goodput-engines"), objective_cases.EXPLAINED),
    "latency": Pack(("goodput-latency",), objective_cases.LATENCIES),
    "requests": Pack(("goodput-requests",), engine_cases.REQUESTS),
    "engines": Pack(("goodput-engines",), engine_cases.ENGINES),
    "gpus": Pack(("goodput-gpus",), gpu_cases.CASES),
    "costs": Pack(("goodput-costs",), agent_cases.COST_CASES, every="5m"),
    "agents": Pack(("goodput-agents",), agent_cases.CASES),
    "agreement": Pack(_BUDGETS, agent_cases.AGREEMENT),
    "vllm alone": Pack(
        ("vllm-alone",), vllm_cases.CASES, VLLM_ALONE, vllm_cases.AROUND, value=vllm_cases.INSTANCE
    ),
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
    assert PACKS[pack].complaints(tmp_path, PACKS[pack].incidents()) == ""


@pytest.mark.parametrize("rules", [RULES, VLLM_ALONE])
def test_every_alert_has_a_case(rules: str) -> None:
    alerts = {rule["alert"] for rule in alert_rules(TEXTS[rules])}
    packs = [pack for pack in PACKS.values() if pack.file == rules]
    played = {case.alert for pack in packs for case in pack.cases}
    if rules == RULES:
        played |= {"LlmObjectiveBudgetBurn"}
    assert alerts - {"LlmWatchdog"} == played


def test_alerts_on_budgets_fire_as_fast_as_the_budget_burns(tmp_path: Path) -> None:
    rules = of_groups(TEXTS[RULES], *_BUDGETS)
    assert complaints(tmp_path, rules, burn_plays(), every="5m") == ""


def test_an_objective_of_another_period_has_windows_of_its_own(tmp_path: Path) -> None:
    """The hour of the first tier is a quarter of one for a week; a dot in a name is only a dot."""
    weekly = replace(OBJECTIVES[0], name="per.week", window_s=7 * 86400.0)
    rules = of_groups(render_alerts([*OBJECTIVES, weekly])[RULES], *_BUDGETS)
    fails = ("0+100x120 12000x60", "0x120 0+100x60")
    series = {
        key: values
        for name in ("per.week", "per-week")
        for part in (
            objective_cases.verdicts(name, *fails),
            objective_cases.target(name, "0.95x200"),
        )
        for key, values in part.items()
    }
    fire = [("per-week", ""), ("per-week", "4"), ("per.week", "1")]
    check = objective_cases.tiers("2h15m", *fire, ("per.week", "4"))
    assert complaints(tmp_path, rules, [play("week", {**AROUND, **series}, [check])]) == ""


def test_misses_that_a_page_explains_mute_an_objective_as_long_as_its_period_says(
    tmp_path: Path,
) -> None:
    """Seven minutes for a week, not the half hour of 30 days."""
    weekly = replace(OBJECTIVES[0], name="weekly", window_s=7 * 86400.0)
    rules = of_groups(render_alerts([*OBJECTIVES, weekly])[RULES], *_BUDGETS)
    explained = {
        **objective_cases.verdicts("weekly", "0x90", "0+10x20 200x70"),
        **objective_cases.target("weekly", "0.95x90"),
        f'ALERTS{{alertname="LlmEngineDied",alertstate="firing",{ENGINE}}}': "1x20 _x70",
    }
    checks = [
        {
            "expr": 'count by (objective) (ALERTS{alertname="LlmObjectivePagedLately",'
            'alertstate="firing"})',
            "eval_time": at,
            "exp_samples": [{"labels": '{objective="weekly"}', "value": 1}] * lasts,
        }
        for at, lasts in (("20m", 1), ("45m", 0))
    ]
    assert complaints(tmp_path, rules, [play("week", {**AROUND, **explained}, checks)]) == ""


def test_a_memory_error_with_an_xid_is_one_page_though_its_counter_rises_later(
    tmp_path: Path,
) -> None:
    """At the end of the hour, too: the counter's old value was scraped after the Xid."""
    series = {
        'gpu_xid_last_seen_timestamp_seconds{instance="a",gpu="0",xid="48"}': "_x41 599x300",
        'gpu_ecc_errors_total{instance="a",gpu="0",severity="uncorrected"}': "0x41 1x300",
    }
    checks = [
        {"expr": 'ALERTS{alertname="GpuEccUncorrected"}', "eval_time": f"{at_s}s"}
        for at_s in range(3600, 4500, 30)
    ]
    rules = of_groups(TEXTS[RULES], "goodput-gpus")
    assert complaints(tmp_path, rules, [play("ecc", series, checks, step="15s")]) == ""


def test_rules_with_a_matcher_are_on_the_series_of_one_cluster(tmp_path: Path) -> None:
    """The same outage in two clusters that one Prometheus scrapes."""
    options = RuleOptions(matchers={"cluster": "eu"})
    rules = of_groups(render_alerts(OBJECTIVES, options=options)[RULES], *_BUDGETS)
    (outage, *_) = objective_cases.BUDGETS
    both: dict[str, str] = {}
    for cluster in ("eu", "us"):
        for key, values in {**AROUND, **outage.incident}.items():
            both[key.replace("{", f'{{cluster="{cluster}",')] = values
    fire = 'count by (alertname, cluster, model) (ALERTS{alertname="LlmObjectiveOutage"})'
    found = '{alertname="LlmObjectiveOutage",cluster="eu",model="llama"}'
    check = {
        "expr": fire,
        "eval_time": "30m",
        "exp_samples": [{"labels": found, "value": 1}],
    }
    assert complaints(tmp_path, rules, [play("clusters", both, [check])]) == ""


@pytest.mark.parametrize("pack", ["objectives", "latency"])
def test_no_alert_is_on_the_preset_of_settings_without_objectives(
    pack: str, tmp_path: Path
) -> None:
    preset = replace(PACKS[pack], around={**AROUND, **configured(AGENT, 0)})
    assert preset.complaints(tmp_path, preset.silent()) == ""


def test_an_agent_that_is_down_promises_no_more_than_before(tmp_path: Path) -> None:
    """Its misses are in the windows of alerts for longer than its last samples are found."""
    was_up = {name: "0x39 stale" for name in configured(AGENT, 0)}
    misses = objective_cases.verdicts("chat", "0x60", "0+0x30 0+60x10 _x20")
    checks = [firing(minute, {}, ',objective="chat"') for minute in range(30, 60)]
    tests = [play("down", {**AROUND, **misses, **was_up}, checks)]
    assert complaints(tmp_path, of_groups(TEXTS[RULES], *_BUDGETS), tests) == ""


def test_rules_without_an_agent_have_no_limits_of_the_preset() -> None:
    preset = render_alerts(Settings().all_objectives())
    rules = alert_rules(preset[VLLM_ALONE])
    assert rules
    assert not [rule for rule in rules if "objective" in rule["labels"]]


@pytest.mark.parametrize("pack", PACKS)
def test_similar_cases_fire_nothing_and_counter_resets_end_and_prolong_no_incident(
    pack: str, tmp_path: Path
) -> None:
    assert PACKS[pack].complaints(tmp_path, PACKS[pack].others()) == ""


def test_every_alert_on_a_counter_has_a_case_with_a_counter_reset() -> None:
    rules = [rule for file in (RULES, VLLM_ALONE) for rule in alert_rules(TEXTS[file])]
    counting = {rule["alert"] for rule in rules if re.search(r"\b(increase|rate)\(", rule["expr"])}
    played = {
        case.alert for pack in PACKS.values() for case in pack.cases if restarted(case) is not None
    }
    assert counting - {"LlmObjectiveBudgetBurn"} <= played


@pytest.mark.parametrize(("file", "group"), [(RULES, "goodput-agents"), (VLLM_ALONE, "vllm-alone")])
def test_the_watchdog_always_fires(file: str, group: str, tmp_path: Path) -> None:
    told = expected("LlmWatchdog", 0, {"severity": "info", "rules": Path(file).stem})
    checks = [
        {"alertname": "LlmWatchdog", "eval_time": at, "exp_alerts": [told]} for at in ("0m", "2h")
    ]
    assert complaints(tmp_path, of_groups(TEXTS[file], group), [play("always", {}, checks)]) == ""


# Engines that are down for days, and pages on engines that explain a missed objective.

ENGINES = of_groups(TEXTS[RULES], "goodput-engines")
BOTH = of_groups(TEXTS[RULES], *_BUDGETS, "goodput-engines")
ALL = of_groups(TEXTS[RULES], *_BUDGETS, "goodput-engines", "goodput-requests")
BURN, OUTAGE, EXPLAINED = "LlmObjectiveBudgetBurn", "LlmObjectiveOutage", "LlmMissesExplained"
PAGED = objective_cases.PAGED


def test_a_down_engine_is_reported_for_days_and_forgotten_when_it_leaves_the_settings(
    tmp_path: Path,
) -> None:
    # Of days, promtool plays few rules.
    names = ("LlmEngineDown", "LlmEngineNeverUp")
    few = [rule for rule in alert_rules(ENGINES) if rule["alert"] in names]
    rules = json.dumps({"groups": [{"name": "goodput-engines", "rules": few}]})
    # A day is 288 times five minutes.
    down = {f"llm_engine_up{{{ENGINE}}}": "1x5 0x600 1x20"}
    checks = [firing(minute, {"LlmEngineDown": 1}) for minute in (40, 1400, 1500, 3000)]
    days = play("days", down, [firing(25, {}), *checks, firing(3090, {})], step="5m")
    assert complaints(tmp_path, rules, [days], every="5m") == ""
    gone = {f"llm_engine_up{{{ENGINE}}}": "1x10 0x10 stale"}
    checks = [firing(20, {"LlmEngineDown": 1}), firing(24, {}), firing(60, {})]
    assert complaints(tmp_path, rules, [play("taken out", gone, checks)]) == ""


def _on(engine: str, met: str, missed: str) -> Series:
    named = f'{AGENT},engine="{engine}",model="llama"'
    return {
        f'llm_slo_requests_total{{{named},objective="chat",verdict="{verdict}"}}': values
        for verdict, values in (("met", met), ("missed", missed))
    }


_DEAD = {
    f'llm_engine_events_total{{{ENGINE},kind="ENGINE_DEAD"}}': "0x20 1x80",
    f"llm_engine_up{{{ENGINE}}}": "1x20 0x80",
}
# Prometheus knows no more than these minutes, so that all windows are short.
_MISSED = {"LlmEngineDied": 1, "LlmEngineDown": 1, OUTAGE: 1, BURN: 2, PAGED: 1}


def test_an_engine_explains_its_own_misses_and_not_those_of_others(tmp_path: Path) -> None:
    dead = {**_DEAD, **_on("chat-0", "0+60x20 1200x80", "0x20 0+60x80")}
    # A tenth of all misses is what may be left.
    few = {**dead, **_on("chat-1", "0+60x20 1200+54x80", "0x20 0+6x80")}
    many = {**dead, **_on("chat-1", "0+60x20 1200+40x80", "0x20 0+20x80")}
    tests = [
        play("few", {**AROUND, **few}, [firing(30, {**_MISSED, EXPLAINED: 1, BURN: 1})]),
        play("many", {**AROUND, **many}, [firing(30, _MISSED)]),
    ]
    assert complaints(tmp_path, BOTH, tests) == ""


def _ended(model: str, **by_status: str) -> Series:
    labels = f'{AGENT},engine="chat-0",model="{model}"'
    return {
        f'llm_requests_total{{{labels},status="{status}"}}': values
        for status, values in by_status.items()
    }


def test_what_happens_on_one_model_explains_no_miss_of_another(tmp_path: Path) -> None:
    """Every request to llama misses, once a wrong name is asked for every 20 s beside it."""
    missing = {**_on("chat-0", "0+60x20 1200x80", "0x20 0+60x80"), **_ended("llama", ok="0+60x100")}
    missed = {OUTAGE: 1, BURN: 2, PAGED: 1}
    typo = {**missing, **_ended("unknown", invalid="0+3x100", error="0x100", ok="0x100")}
    other = {**missing, **_ended("qwen", error="0+3x100", ok="0x100")}
    own = {**missing, **_ended("llama", error="0x20 0+60x80", ok="0+60x20 1200x80")}
    failing = {"LlmRequestsFailing": 1}
    tests = [
        play("typo", {**AROUND, **typo}, [firing(30, missed)]),
        play("other", {**AROUND, **other}, [firing(30, {**missed, **failing})]),
        play("own", {**AROUND, **own}, [firing(30, {**missed, **failing, EXPLAINED: 1})]),
    ]
    assert complaints(tmp_path, ALL, tests) == ""


def test_a_page_of_ten_minutes_ago_explains_nothing(tmp_path: Path) -> None:
    # A quick restart: down for three minutes, and slow a while after.
    series = {
        f"llm_engine_up{{{ENGINE}}}": "1x20 0x4 1x80",
        **_on("chat-0", "0+60x35 2100x60", "0x35 0+60x60"),
    }
    checks = [firing(24, {"LlmEngineDown": 1}), firing(45, {OUTAGE: 1, BURN: 2, PAGED: 1})]
    assert complaints(tmp_path, BOTH, [play("later", {**AROUND, **series}, checks)]) == ""


def test_misses_that_an_engine_explained_cause_no_page_when_it_is_back(tmp_path: Path) -> None:
    """Half of the requests are missed for five hours, which the second tier pages for elsewhere."""
    engine = {
        f"llm_engine_up{{{ENGINE}}}": "1x144 0x60 1x60",
        **_on("chat-0", "0+500x144 72000x120", "0x144 0+250x60 15000x60"),
        **_on("chat-1", "0+500x144 72000+250x60 87000+500x60", "0x264"),
    }
    down = {"LlmEngineDown": 1, EXPLAINED: 1}
    series = {**AROUND, **engine}
    checks = [
        firing(960, {**down, BURN: 1, PAGED: 1}),
        # The second tier, which Alertmanager mutes, and the ticket on what is left of the budget.
        firing(1015, {**down, BURN: 2, PAGED: 1}),
        # The half hour is still full of misses.
        firing(1040, {BURN: 2, PAGED: 1}),
        firing(1050, {BURN: 1, PAGED: 1}),
        firing(1060, {BURN: 1}),
    ]
    test = play("back", series, checks, step="5m")
    assert complaints(tmp_path, BOTH, [test], every="5m") == ""
