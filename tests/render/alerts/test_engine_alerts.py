"""Engines that are down for days, and pages on engines that explain a missed objective."""

import json
from pathlib import Path

from agent.render.alerts import render_alerts
from agent.render.alerts.alert_files import RULES
from tests.render.alerts.cases import (
    AGENT,
    AROUND,
    ENGINE,
    OBJECTIVES,
    Series,
    alert_rules,
    firing,
    of_groups,
    play,
)
from tests.render.alerts.promtool import complaints

TEXT = render_alerts(OBJECTIVES)[RULES]
ENGINES = of_groups(TEXT, "goodput-engines")
BOTH = of_groups(TEXT, "goodput-recordings", "goodput-objectives", "goodput-engines")

ALL = of_groups(
    TEXT, "goodput-recordings", "goodput-objectives", "goodput-engines", "goodput-requests"
)

# Of days, promtool plays few rules.
DOWN = json.dumps(
    {
        "groups": [
            {
                "name": "goodput-engines",
                "rules": [
                    rule
                    for rule in alert_rules(TEXT)
                    if rule["alert"] in ("LlmEngineDown", "LlmEngineNeverUp")
                ],
            }
        ]
    }
)

BURN, OUTAGE, EXPLAINED = "LlmObjectiveBudgetBurn", "LlmObjectiveOutage", "LlmMissesExplained"


def test_a_down_engine_is_reported_for_longer_than_its_last_sample_is_stored(
    tmp_path: Path,
) -> None:
    # A day is 288 times five minutes.
    series = {f"llm_engine_up{{{ENGINE}}}": "1x5 0x600 1x20"}
    checks = [firing(minute, {"LlmEngineDown": 1}) for minute in (40, 1400, 1500, 3000)]
    test = play("days", series, [firing(25, {}), *checks, firing(3090, {})], step="5m")
    assert complaints(tmp_path, DOWN, [test], every="5m") == ""


def test_a_down_engine_that_is_removed_from_the_settings_is_forgotten(
    tmp_path: Path,
) -> None:
    series = {f"llm_engine_up{{{ENGINE}}}": "1x10 0x10 stale"}
    checks = [firing(20, {"LlmEngineDown": 1}), firing(24, {}), firing(60, {})]
    assert complaints(tmp_path, ENGINES, [play("taken out", series, checks)]) == ""


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
