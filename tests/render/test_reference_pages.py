"""The reference pages agree with the running code: expositions, rule files, settings, databases."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import create_engine, inspect

from agent.errors import SettingsInvalid
from agent.render.alerts import Timings
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

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"

# A cell ends at a bar that is not escaped.
_BAR = re.compile(r"(?<!\\)\|")


def rendered() -> dict[str, str]:
    """The pages as they are made now, by path."""
    declared = Declared(metadata.tables.values(), MEANINGS)
    return dict(render_reference(declared, Settings().all_objectives(), Timings()))


def committed(name: str) -> str:
    """The text of one committed page."""
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
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def test_committed_pages_are_those_made_from_the_code() -> None:
    made = rendered()
    found = {name: (ROOT / name).read_text(encoding="utf-8") for name in made}
    assert found == made, "run goodput-agent render and commit docs/reference/"
    assert {f"docs/reference/{path.name}" for path in FOLDER.iterdir()} == set(made)


def test_links_of_the_pages_resolve() -> None:
    targets = [
        FOLDER / target for path in FOLDER.iterdir() for target in LINK.findall(path.read_text())
    ]
    assert len(targets) > 70
    assert [str(target) for target in targets if not target.exists()] == []


def test_every_row_has_a_meaning_that_is_a_sentence() -> None:
    found = [row for path in FOLDER.iterdir() for row in rows(path.read_text())]
    assert len(found) > 500
    assert [row for row in found if not SENTENCE.fullmatch(row["meaning"])] == []


# Metrics


def test_the_page_has_every_metric_once() -> None:
    named = [row["metric"].removesuffix("_total") for row in rows(committed("metrics.md"))]
    assert sorted(named) == sorted(metric.name for metric in METRICS)


def test_types_and_labels_are_those_of_an_exposition() -> None:
    page = {row["metric"]: row for row in rows(committed("metrics.md"))}
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


def schema_paths(schema: Mapping[str, Any], node: Mapping[str, Any], path: str) -> Iterator[str]:
    """The paths of all keys below a node of pydantic's own JSON schema."""
    for key, inner in node.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        sections = list(_sections(schema, inner))
        if not sections or sections[0][1]:
            yield here
        for section, is_list in sections:
            yield from schema_paths(schema, section, f"{here}[0]" if is_list else here)


def _sections(
    schema: Mapping[str, Any], node: Mapping[str, Any], *, is_list: bool = False
) -> Iterator[tuple[Mapping[str, Any], bool]]:
    if "$ref" in node:
        found = schema["$defs"][node["$ref"].rpartition("/")[2]]
        if found.get("type") == "object":
            yield found, is_list
    for option in node.get("anyOf", ()):
        yield from _sections(schema, option, is_list=is_list)
    yield from _sections(schema, node["items"], is_list=True) if "items" in node else ()


def test_the_page_has_every_key_of_the_schema() -> None:
    schema = Settings.model_json_schema(by_alias=True)
    paths = set(schema_paths(schema, schema, ""))
    assert len(paths) > 80
    assert {row["setting"] for row in rows(committed("settings.md"))} == paths
    assert {setting.path for setting in all_settings()} == paths


# What the first item of a list, or an optional section, needs beside the variable in question.
NEEDED = {
    "engines[0].parallelism": {"GOODPUT_ENGINES__0__PARALLELISM": "{}"},
    "engines[0]": {"GOODPUT_ENGINES__0__NAME": "a", "GOODPUT_ENGINES__0__URL": "http://h:1"},
    "engines_from.kubernetes": {"GOODPUT_ENGINES_FROM__KUBERNETES__SELECTOR": "app=vllm"},
    "prices[0]": {"GOODPUT_PRICES__0__ENGINE": "a", "GOODPUT_PRICES__0__GPU_HOUR_USD": "2"},
    "objectives[0]": {"GOODPUT_OBJECTIVES__0__NAME": "a", "GOODPUT_OBJECTIVES__0__TTFT_MS": "9"},
    "dcgm.fields[0]": {
        "GOODPUT_DCGM__FIELDS__0__SERIES": "A_B",
        "GOODPUT_DCGM__FIELDS__0__FACT": "gpu_power_watts",
    },
    "electricity": {"GOODPUT_ELECTRICITY__USD_PER_KWH": "0.2"},
    "token_budget": {"GOODPUT_TOKEN_BUDGET__USD_PER_MILLION_OUTPUT_TOKENS": "2"},
}
SETTINGS = [setting for setting in all_settings() if setting.path != "name"]


def needed(path: str) -> dict[str, str]:
    found = {
        name: value
        for start, variables in NEEDED.items()
        if path.startswith(start)
        for name, value in variables.items()
    }
    return NEEDED["engines[0]"] | found if path.startswith("prices[0]") else found


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.path)
def test_the_variable_is_of_the_setting_and_has_the_default(setting: Setting) -> None:
    others = needed(setting.path)
    with pytest.raises(SettingsInvalid, match=re.escape(setting.path)):
        load(None, {**others, setting.variable: '[{"no": such}]'})
    assert setting.required is (setting.default is None)
    if setting.variable not in others:
        assert setting.default is not None
        assert load(None, {**others, setting.variable: setting.default}) == load(None, others)


# Alerts


def test_the_page_has_the_rules_of_the_committed_files() -> None:
    text = committed("alerts.md")
    page = list(rows(text))
    rules = [
        rule
        for file in ("goodput-agent.yml", "vllm-alone.yml")
        for group in yaml.safe_load((ROOT / "alerts" / file).read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(page) == len(rules) > 60
    for row, rule in zip(page, rules, strict=True):
        title, runbook = re.fullmatch(r"\[(.+)\]\((.+)\)", row["alert"]).groups()  # type: ignore[union-attr]
        assert title.split()[0] == rule["alert"]
        assert runbook == f"../runbooks/{rule['alert']}.md"
        assert row["severity"] == rule["labels"]["severity"]
        assert row["holds for"] == rule.get("for", "")
        assert f"```promql\n{rule['expr']}\n```" in text
        for threshold in filter(None, row["threshold"].split(", ")):
            beginning = threshold.removesuffix(" ...")
            assert beginning in rule["expr"] or threshold == "no series"


def test_an_alert_without_a_threshold_has_no_comparison() -> None:
    bare = {
        row["alert"].split("]")[0][1:]
        for row in rows(committed("alerts.md"))
        if not row["threshold"]
    }
    assert bare == {"Watchdog"}


def test_a_guard_of_a_division_is_no_threshold() -> None:
    assert thresholds("a\n  / (b > 0)\n  > 0.05\nand\nc >= 5") == ["> 0.05", ">= 5"]
    assert thresholds("(\na\n  > 30 * b\n)\nor\nc == 0") == ["> 30 * ...", "== 0"]
    assert thresholds('up{a="> 7"} == 0') == ["== 0"]


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


UNITS = {"_s": "seconds", "_usd": "US dollars", "_bytes": "bytes", "_tokens": "tokens"}


def test_a_column_has_the_unit_of_its_name() -> None:
    for row in rows(committed("tables.md")):
        for ending, unit in UNITS.items():
            if row["column"].endswith(ending) and not row["column"].endswith("_per_s"):
                assert row["unit"] == unit, row
    units = {row["column"]: row["unit"] for row in rows(committed("tables.md"))}
    assert units["peak_flops_per_s"] == "FLOP/s"
    assert units["peak_bytes_per_s"] == "bytes/s"
    assert units["engine_mfu"] == "ratio"
    assert units["started_at"] == units["preemptions"] == units["error"] == ""


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
