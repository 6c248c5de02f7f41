"""The reference pages agree with the running code: expositions, rule files, settings, databases."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, inspect

from agent.errors import SettingsInvalid
from agent.render.alerts import Timings, render_alerts
from agent.render.alerts.alert_files import RULES, VLLM_ALONE
from agent.render.reference_pages import (
    Declared,
    Setting,
    all_settings,
    field_meanings,
    render_reference,
    thresholds,
)
from agent.settings import Settings, load
from agent.store.migrating import upgrade
from agent.store.table_meanings import MEANINGS
from agent.store.tables import metadata
from tests.outputs.prometheus.filled import FULL_SAMPLE, exposition_of, filled_meter
from tests.published_metrics import METRICS
from tests.render.alerts.cases import alert_rules

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"

# A cell ends at a bar that is not escaped.
_BAR = re.compile(r"(?<!\\)\|")


def committed(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def rows(text: str) -> Iterator[dict[str, str]]:
    """Every row of a page's tables by column, without back quotes; `section` is the heading."""
    header: list[str] | None = None
    section = ""
    for line in text.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ").replace("`", "")
        if not line.startswith("| "):
            header = None
            continue
        cells = [cell.strip() for cell in _BAR.split(line)[1:-1]]
        if header is None:
            header = cells
        elif set(cells) != {"---"}:
            plain = [cell.replace("`", "").replace("\\|", "|") for cell in cells]
            yield {"section": section, **dict(zip(header, plain, strict=True))}


SENTENCE = re.compile(r"[^\s|]+ .*[.]")


def test_committed_pages_are_those_made_from_the_code_and_each_row_has_a_meaning() -> None:
    declared = Declared(metadata.tables.values(), MEANINGS)
    made = dict(render_reference(declared, Settings().all_objectives(), Timings()))
    found = {name: (ROOT / name).read_text(encoding="utf-8") for name in made}
    assert found == made, "run goodput-agent render and commit docs/reference/"
    assert {f"docs/reference/{path.name}" for path in FOLDER.iterdir()} == set(made)
    meanings = [row["meaning"] for text in made.values() for row in rows(text)]
    assert len(meanings) > 500
    assert [meaning for meaning in meanings if not SENTENCE.fullmatch(meaning)] == []


# Metrics


def test_types_and_labels_are_those_of_an_exposition() -> None:
    page = {row["metric"]: row for row in rows(committed("metrics.md"))}
    named = [name.removesuffix("_total") for name in page]
    assert sorted(named) == sorted(metric.name for metric in METRICS)
    meter = filled_meter()
    meter.sample(FULL_SAMPLE)
    families = list(text_string_to_metric_families(exposition_of(meter)))
    assert len(families) > 90
    for family in families:
        row = page[family.name + ("_total" if family.type == "counter" else "")]
        assert row["type"] == family.type
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        assert set(filter(None, row["labels"].split(", "))) == labels, family.name
        assert row["meaning"] == family.documentation.replace("`", "")


# Settings


Json = Mapping[str, Any]


def schema_paths(schema: Json, node: Json, path: str = "") -> Iterator[str]:
    """The paths of all keys below a node of pydantic's own JSON schema."""
    for key, inner in node.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        options = [inner, *inner.get("anyOf", ())]
        lists = [option["items"] for option in options if "items" in option]
        below = [found for option in options if (found := _section(schema, option))]
        of_items = [found for option in lists if (found := _section(schema, option))]
        if not below:
            yield here
        for section in below:
            yield from schema_paths(schema, section, here)
        for section in of_items:
            yield from schema_paths(schema, section, f"{here}[0]")


def _section(schema: Json, node: Json) -> Json | None:
    found: Json = schema["$defs"].get(node.get("$ref", "").rpartition("/")[2], {})
    return found if found.get("type") == "object" else None


def test_the_page_has_every_key_of_the_schema() -> None:
    schema = Settings.model_json_schema(by_alias=True)
    paths = set(schema_paths(schema, schema))
    assert len(paths) > 80
    assert {row["setting"] for row in rows(committed("settings.md"))} == paths
    assert {setting.path for setting in all_settings()} == paths


# What the first item of a list, or an optional section, needs beside the variable in question.
NEEDED = {
    "engines[0].parallelism": {"GOODPUT_ENGINES__0__PARALLELISM": "{}"},
    "engines[0]": {"GOODPUT_ENGINES__0__NAME": "a", "GOODPUT_ENGINES__0__URL": "http://h:1"},
    "engines_from.kubernetes": {"GOODPUT_ENGINES_FROM__KUBERNETES__SELECTOR": "app=vllm"},
    "routers[0]": {"GOODPUT_ROUTERS__0__NAME": "a", "GOODPUT_ROUTERS__0__URL": "http://h:1"},
    "prices[0]": {
        "GOODPUT_ENGINES__0__NAME": "a",
        "GOODPUT_ENGINES__0__URL": "http://h:1",
        "GOODPUT_PRICES__0__ENGINE": "a",
        "GOODPUT_PRICES__0__GPU_HOUR_USD": "2",
    },
    "objectives[0]": {"GOODPUT_OBJECTIVES__0__NAME": "a", "GOODPUT_OBJECTIVES__0__TTFT_MS": "9"},
    "objectives[0].session": {"GOODPUT_OBJECTIVES__0__SESSION__TURN_TTFT_MS": "9"},
    "dcgm.fields[0]": {
        "GOODPUT_DCGM__FIELDS__0__SERIES": "A_B",
        "GOODPUT_DCGM__FIELDS__0__FACT": "gpu_power_watts",
    },
    "electricity": {"GOODPUT_ELECTRICITY__USD_PER_KWH": "0.2"},
    "token_budget": {"GOODPUT_TOKEN_BUDGET__USD_PER_MILLION_OUTPUT_TOKENS": "2"},
}
SETTINGS = [setting for setting in all_settings() if setting.path != "name"]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_the_variable_is_of_the_setting_and_has_the_default(setting: Setting) -> None:
    others = {
        name: value
        for start, variables in NEEDED.items()
        if setting.path.startswith(start)
        for name, value in variables.items()
    }
    with pytest.raises(SettingsInvalid, match=re.escape(setting.path)):
        load(None, {**others, setting.variable: '[{"no": such}]'})
    assert setting.required is (setting.default is None)
    if setting.variable not in others:
        assert setting.default is not None
        assert load(None, {**others, setting.variable: setting.default}) == load(None, others)


# Alerts


def test_the_page_has_the_rules_of_settings_with_the_objective_of_the_preset() -> None:
    text = committed("alerts.md")
    page = [row for row in rows(text) if row["section"] != "Thresholds"]
    made = render_alerts([replace(each, is_preset=False) for each in Settings().all_objectives()])
    rules = [rule for file in (RULES, VLLM_ALONE) for rule in alert_rules(made[file])]
    assert "LlmTtftOverLimit" in {rule["alert"] for rule in rules}
    assert len(page) == len(rules) > 60
    for row, rule in zip(page, rules, strict=True):
        assert row["alert"].startswith(f"[{rule['alert']}")
        assert row["alert"].endswith(f"(../runbooks/{rule['alert']}.md)")
        assert row["severity"] == rule["labels"]["severity"]
        assert row["holds for"] == rule.get("for", "")
        assert f"```promql\n{rule['expr']}\n```" in text
        assert row["threshold"] or rule["alert"] == "LlmWatchdog"


def test_a_guard_of_a_division_is_no_threshold() -> None:
    assert thresholds("a\n  / (b > 0)\n  > 0.05\nand\nc >= 5") == ["> 0.05", ">= 5"]
    assert thresholds("(\na\n  > 30 * b\n)\nor\nc == 0") == ["> 30 * ...", "== 0"]
    assert thresholds('up{a="> 7"} == 0') == ["== 0"]
    assert thresholds("vector(1)") == []


def test_a_threshold_that_follows_from_the_target_is_written_by_what_is_allowed() -> None:
    allowed = "objective:llm_slo_allowed:ratio"
    burn = f"a\n  > on (objective) group_left () (14.4 * {allowed} < 0.9)\nand\nc >= 5"
    assert thresholds(burn) == ["> 14.4 * allowed", ">= 5"]
    outage = f"a\n  > on (objective) group_left () ((1 + ({allowed} >= 0.01)) / 2)"
    assert thresholds(outage) == ["> (1 + allowed) / 2"]


# Tables


def test_the_page_has_the_columns_of_a_migrated_database() -> None:
    engine = create_engine("sqlite://")
    upgrade(engine)
    found = inspect(engine)
    columns = {
        (table, column["name"]): column["nullable"]
        for table in found.get_table_names()
        if table != "alembic_version"
        for column in found.get_columns(table)
    }
    engine.dispose()
    page = {
        (row["section"], row["column"]): row["type"].endswith("?")
        for row in rows(committed("tables.md"))
    }
    assert len(columns) > 150
    assert page == columns


# Meanings


class _Described:
    """A class whose fields have meanings below them."""

    first: int = 1
    """The first one,
    in two lines."""
    silent: int = 2
    third: str
    """The third one."""


def test_the_string_below_a_field_is_its_meaning() -> None:
    assert field_meanings(_Described) == {
        "first": "The first one, in two lines.",
        "third": "The third one.",
    }
