"""Every alert fires at its incident and ends with it, and fires at no similar case; by promtool."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent.render.alerts import Timings, render_alerts
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
    GPU,
    MODEL,
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
from tests.render.alerts.objective_cases import burn_plays, histogram
from tests.render.alerts.promtool import complaints, complaints_about_rules, restarted
from tests.render.alerts.vllm_cases import ON_VLLM, VLLM

# Steps are sums of powers of two: a sum that is off by a bit would be a counter that went down.
_COUNTERS = {
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="met"}}': 98.0,
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="missed"}}': 1.0,
    f'llm_slo_requests_total{{{MODEL},objective="chat",verdict="undetermined"}}': 1.0,
    f'llm_requests_total{{{MODEL},status="ok"}}': 1000.0,
    f'llm_requests_total{{{MODEL},status="cancelled"}}': 90.0,
    f'llm_requests_total{{{MODEL},status="invalid"}}': 50.0,
    f'llm_requests_total{{{ENGINE},model="unknown",status="invalid"}}': 3.0,
    # Together less than the thousandth that objective chat allows.
    f'llm_requests_total{{{MODEL},status="error"}}': 0.25,
    f'llm_requests_total{{{MODEL},status="timeout"}}': 0.25,
    f'llm_requests_total{{{MODEL},status="throttled"}}': 0.25,
    f"llm_output_tokens_total{{{MODEL}}}": 1_000_000.0,
    f'llm_cost_usd_total{{{MODEL},share="decode"}}': 1.5,
    f'llm_cost_usd_total{{{MODEL},share="idle"}}': 0.5,
    f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': 100.0,
    f'llm_engine_requests_failed_total{{{MODEL},reason="5xx"}}': 4.0,
    f'llm_engine_admission_rejections_total{{{MODEL},reason="queue"}}': 0.75,
    f"llm_engine_steps_total{{{MODEL}}}": 900.0,
    f"llm_engine_preemptions_total{{{MODEL}}}": 1.0,
    f"llm_engine_prefix_cache_query_tokens_total{{{MODEL}}}": 9000.0,
    f"llm_engine_prefix_cache_hit_tokens_total{{{MODEL}}}": 4000.0,
    f'llm_agent_spans_total{{{AGENT},outcome="stored"}}': 1000.0,
    f'llm_agent_spans_total{{{AGENT},outcome="rejected"}}': 9.0,
    f'llm_agent_scrapes_total{{{ENGINE},outcome="ok"}}': 12.0,
    f'llm_agent_exports_refused_total{{{AGENT},reason="busy"}}': 0.25,
    f'llm_agent_forward_dropped_total{{{AGENT},reason="queue_full"}}': 0.25,
    f'llm_agent_proxy_failures_total{{{AGENT},reason="slo_header"}}': 0.25,
    f'llm_agent_store_failures_total{{{AGENT},what="requests"}}': 0.25,
    f'gpu_throttled_seconds_total{{{GPU},reason="sw_power_cap"}}': 50.0,
    f'gpu_throttled_seconds_total{{{GPU},reason="hw_thermal"}}': 5.0,
    f'gpu_ecc_errors_total{{{GPU},severity="corrected",since="driver_load"}}': 1.0,
    f'gpu_nvlink_errors_total{{{GPU},error="crc_flit"}}': 5.0,
    f'gpu_xid_errors_total{{{GPU},xid="31"}}': 0.03125,
}
# What happened long ago, and does not any more.
_PAST = (
    f'gpu_ecc_errors_total{{{GPU},severity="uncorrected",since="driver_load"}}',
    f'gpu_nvlink_errors_total{{{GPU},error="replay"}}',
    f'gpu_xid_errors_total{{{GPU},xid="13"}}',
    *(
        f'llm_engine_events_total{{{ENGINE},kind="{kind}"}}'
        for kind in ("ENGINE_DEAD", "HANG", "CUDA_OOM", "HOST_OOM", "GPU_FAULT", "RESTART")
    ),
)
_LEVELS = {
    f"llm_engine_up{{{ENGINE}}}": "1",
    f"llm_engine_awake{{{MODEL}}}": "1",
    f"llm_engine_requests_running{{{MODEL}}}": "40",
    f"llm_engine_requests_waiting{{{MODEL}}}": "3",
    f"llm_engine_kv_cache_usage_ratio{{{MODEL}}}": "0.9",
    f"llm_agent_store_waiting_rows{{{AGENT}}}": "0",
    f"llm_agent_proxy_waiting_records{{{AGENT}}}": "0",
    f"gpu_up{{{GPU}}}": "1",
    f"gpu_recovery_action{{{GPU}}}": "0",
    f"gpu_row_remap_pending{{{GPU}}}": "0",
    f"gpu_row_remap_failed{{{GPU}}}": "0",
    f"gpu_utilization_ratio{{{GPU}}}": "0.97",
    f"gpu_memory_total_bytes{{{GPU}}}": "100",
    f"gpu_memory_used_bytes{{{GPU}}}": "92",
    f"gpu_memory_free_bytes{{{GPU}}}": "6",
}
_HISTOGRAMS = {
    "gen_ai_server_time_to_first_token_seconds": (f'{MODEL},vantage="engine"', "0.2"),
    "gen_ai_server_time_per_output_token_seconds": (f'{MODEL},vantage="engine"', "0.12"),
    "gen_ai_server_request_duration_seconds": (f'{MODEL},vantage="engine"', "10.0"),
    "llm_request_queue_seconds": (MODEL, "0.1"),
}

_VLLM_COUNTERS = {
    f"vllm:generation_tokens_total{{{VLLM}}}": 5000.0,
    f"vllm:iteration_tokens_total_count{{{VLLM}}}": 900.0,
    f"vllm:num_preemptions_total{{{VLLM}}}": 1.0,
    f'http_requests_total{{{ON_VLLM},status="2xx"}}': 100.0,
    f'http_requests_total{{{ON_VLLM},status="5xx"}}': 4.0,
}
_VLLM_LEVELS = {
    f"vllm:num_requests_running{{{VLLM}}}": "40",
    f"vllm:num_requests_waiting{{{VLLM}}}": "3",
    f"vllm:kv_cache_usage_perc{{{VLLM}}}": "0.9",
    f'vllm:engine_sleep_state{{{VLLM},sleep_state="awake"}}': "1",
}
_VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": (VLLM, "0.25"),
    "vllm:request_time_per_output_token_seconds": (VLLM, "0.15"),
    "vllm:e2e_request_latency_seconds": (VLLM, "10.0"),
}

HEALTHY_MINUTES = 120


def fleet(growth: str, *, load: str | None = None, past: str = "7x120") -> Series:
    """The fleet; each counter grows by `growth`: STEP is its own step, HOUR sixty of them.

    `load` takes the place of what runs and waits; `past` are counters of what is long over.
    """
    series = {name: _grown(growth, step) for name, step in _COUNTERS.items()}
    series |= dict.fromkeys(_PAST, past)
    series |= {name: f"{level}x{HEALTHY_MINUTES}" for name, level in _LEVELS.items()}
    series |= _latencies(_HISTOGRAMS, growth)
    if load is not None:
        for name in ("running", "waiting"):
            series[f"llm_engine_requests_{name}{{{MODEL}}}"] = load
    return series


def vllm_fleet(growth: str, *, load: str | None = None) -> Series:
    """The same of a vLLM that is scraped alone."""
    series = {name: _grown(growth, step) for name, step in _VLLM_COUNTERS.items()}
    series |= {name: f"{level}x{HEALTHY_MINUTES}" for name, level in _VLLM_LEVELS.items()}
    series |= _latencies(_VLLM_HISTOGRAMS, growth)
    if load is not None:
        for name in ("running", "waiting"):
            series[f"vllm:num_requests_{name}{{{VLLM}}}"] = load
    return series


def _latencies(histograms: Mapping[str, tuple[str, str]], growth: str) -> Series:
    series: dict[str, str] = {}
    for name, (labels, bound) in histograms.items():
        series |= histogram(name, labels, {bound: _grown(growth, 98)}, _grown(growth, 100))
    return series


def _grown(growth: str, step: float) -> str:
    return growth.replace("STEP", str(step)).replace("HOUR", str(60 * step))


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
    assert alerts - {"Watchdog"} == played


def test_alerts_on_budgets_fire_as_fast_as_the_budget_burns(tmp_path: Path) -> None:
    rules = of_groups(TEXTS[RULES], *_BUDGETS)
    assert complaints(tmp_path, rules, burn_plays(), every="5m") == ""


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


FLEETS = {
    "on a good day": fleet("0+STEPx120"),
    "when the agent and the engine start anew": fleet("0+STEPx60 0+STEPx60", past="7x60 0x60"),
    "when nobody asks for anything": fleet("0x120", load="0x120"),
    "when all traffic ends": fleet("0+STEPx60 HOURx60", load="0x120"),
}
VLLM_FLEETS = {
    "on a good day": vllm_fleet("0+STEPx120"),
    "when nobody asks for anything": vllm_fleet("0x120", load="0x120"),
    "when all traffic ends": vllm_fleet("0+STEPx60 HOURx60", load="0x120"),
}
MINUTES = (5, 61, 66, 90, 115)


def side_by_side(fleets: Mapping[str, Series], instance: str) -> Series:
    """The series of fleets, each on an instance and with a model of its own."""
    found: dict[str, str] = {}
    for number, series in enumerate(fleets.values()):
        there = renamed(series, f'"{instance}"', f'"{number}-{instance}"')
        found |= renamed(there, '"llama"', f'"llama-{number}"')
    return found


@pytest.mark.parametrize(
    ("file", "around", "fleets", "instance"),
    [
        (RULES, AROUND, FLEETS, "a:9470"),
        (VLLM_ALONE, vllm_cases.AROUND, VLLM_FLEETS, vllm_cases.INSTANCE),
    ],
    ids=["agents", "vllm alone"],
)
def test_fleets_that_work_are_silent(
    file: str, around: Series, fleets: Mapping[str, Series], instance: str, tmp_path: Path
) -> None:
    """As do an agent and a vLLM that were never asked for anything."""
    series = {**around, **side_by_side(fleets, instance)}
    checks = [firing(minute, {}) for minute in MINUTES]
    assert complaints(tmp_path, TEXTS[file], [play("silent", series, checks)]) == ""


def test_a_restart_of_vllm_fires_the_alert_on_restarts_alone(tmp_path: Path) -> None:
    series = {**vllm_cases.AROUND, **vllm_fleet("0+STEPx60 0+STEPx60")}
    checks = [firing(minute, {}) for minute in (5, 60, 90)]
    checks += [firing(minute, {"VllmRestarted": 1}) for minute in (61, 66, 75)]
    assert complaints(tmp_path, TEXTS[VLLM_ALONE], [play("anew", series, checks)]) == ""


@pytest.mark.parametrize(("file", "group"), [(RULES, "goodput-agents"), (VLLM_ALONE, "vllm-alone")])
def test_the_watchdog_always_fires(file: str, group: str, tmp_path: Path) -> None:
    told = expected("Watchdog", 0, {"severity": "none", "rules": Path(file).stem})
    checks = [
        {"alertname": "Watchdog", "eval_time": at, "exp_alerts": [told]} for at in ("0m", "2h")
    ]
    assert complaints(tmp_path, of_groups(TEXTS[file], group), [play("always", {}, checks)]) == ""


# Engines that are down for days, and pages on engines that explain a missed objective.

ENGINES = of_groups(TEXTS[RULES], "goodput-engines")
BOTH = of_groups(TEXTS[RULES], *_BUDGETS, "goodput-engines")
ALL = of_groups(TEXTS[RULES], *_BUDGETS, "goodput-engines", "goodput-requests")
BURN, OUTAGE, EXPLAINED = "LlmObjectiveBudgetBurn", "LlmObjectiveOutage", "LlmMissesExplained"


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
_MISSED = {"LlmEngineDied": 1, "LlmEngineDown": 1, OUTAGE: 1, BURN: 2}


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
    missed = {OUTAGE: 1, BURN: 2}
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
    checks = [firing(24, {"LlmEngineDown": 1}), firing(45, {OUTAGE: 1, BURN: 2})]
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
        firing(960, {**down, BURN: 1}),
        firing(1015, {**down, BURN: 1}),
        # The ticket on what is left of the budget; the half hour is still full of misses.
        firing(1040, {BURN: 1}),
        firing(1050, {BURN: 1}),
    ]
    test = play("back", series, checks, step="5m")
    assert complaints(tmp_path, BOTH, [test], every="5m") == ""
