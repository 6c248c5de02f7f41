"""The rendered dashboards: committed files, layout, links, thresholds and marks."""

import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from agent.records.objective import Objective
from agent.render.dashboards import render_dashboards
from agent.settings.settings_model import ObjectiveSettings, Settings
from tests.published_metrics import METRICS
from tests.render.dashboards.reading import (
    Json,
    dashboards,
    on_postgres,
    on_prometheus,
    panels,
    selectors,
)

ROOT = Path(__file__).parents[3]
ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}
ON_PROMETHEUS = [uid for uid in ALL if not uid.startswith("goodput-requests")]
each = pytest.mark.parametrize("dashboard", ALL.values(), ids=ALL)


def test_committed_files_are_those_rendered_from_the_settings() -> None:
    made = render_dashboards(Settings().all_objectives())
    committed = {name: (ROOT / name).read_text(encoding="utf-8") for name in made}
    assert committed == made, "run goodput-agent render and commit dashboards/"
    assert {f"dashboards/{path.name}" for path in (ROOT / "dashboards").iterdir()} == set(made)


@each
def test_panel_ids_are_unique(dashboard: Json) -> None:
    rows = [row["id"] for row in dashboard["panels"] if row["type"] == "row"]
    numbers = rows + [panel["id"] for panel in panels(dashboard)]
    assert len(numbers) == len(set(numbers))


@each
def test_panels_do_not_overlap(dashboard: Json) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in chain(dashboard["panels"]):
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]


@each
def test_every_variable_in_use_is_declared(dashboard: Json) -> None:
    named = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard)))
    builtin = {name for name in used if name.startswith("__")}
    assert used - builtin <= named
    assert named <= used


# Rows


@each
def test_the_rows_after_the_second_are_collapsed_and_hold_their_panels(dashboard: Json) -> None:
    rows = [row for row in dashboard["panels"] if row["type"] == "row"]
    opened, collapsed = rows[:2], rows[2:]
    assert [(row["collapsed"], row["panels"]) for row in opened] == [(False, [])] * 2
    assert all(row["collapsed"] and row["panels"] for row in collapsed)
    # As Grafana saves them: a row follows the heading before it, and panels begin below theirs.
    for before, row in pairwise(collapsed):
        assert row["gridPos"]["y"] == before["gridPos"]["y"] + 1
    for row in collapsed:
        first = row["panels"][0]["gridPos"]
        assert (first["x"], first["y"]) == (0, row["gridPos"]["y"] + 1)


def test_the_first_screen_of_engines_has_their_health_and_what_is_slow_or_full() -> None:
    engines = ALL["goodput-operations"]
    first = [
        panel["title"]
        for panel in panels(engines)
        if panel["gridPos"]["y"] + panel["gridPos"]["h"] <= SCREEN
    ]
    assert first[:3] == ["State of engines", "Engines up", "Events"]
    assert {
        "p95 of time to first token by engine",
        "Requests running and waiting",
        "KV cache in use",
        "Requests that failed in the engine",
    } <= set(first)


def test_panels_of_the_agents_have_a_dashboard_of_their_own() -> None:
    agents = {panel["title"] for panel in panels(ALL["goodput-agents"])}
    engines = {panel["title"] for panel in panels(ALL["goodput-operations"])}
    assert agents & engines == set()
    about_agents = {
        uid
        for uid, dashboard in ALL.items()
        for question in on_prometheus(dashboard)
        for name, _ in selectors(question.expression)
        if name.startswith("llm_agent_")
    }
    assert about_agents == {"goodput-agents"}


# The fleet


# A unit of the grid is 38 pixels, and about 900 of a screen of 1080 are the dashboard's.
SCREEN = 24


def test_the_fleet_fits_on_the_first_screen() -> None:
    fleet = ALL["goodput-fleet"]
    found = list(panels(fleet))
    assert len(found) <= 12
    assert [row["collapsed"] for row in fleet["panels"] if row["type"] == "row"] == [False, False]
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in found) <= SCREEN


def test_the_columns_of_the_fleet_s_table_have_units_and_colours() -> None:
    (table,) = (panel for panel in panels(ALL["goodput-fleet"]) if panel["type"] == "table")
    shown = {name: properties(table, name) for name in ("up", "KV", "attainment", "$/h", "req/s")}
    assert {name: look["unit"] for name, look in shown.items()} == {
        "up": "short",
        "KV": "percentunit",
        "attainment": "percentunit",
        "$/h": "currencyUSD",
        "req/s": "reqps",
    }
    assert [colour(up, shown["up"]["thresholds"]) for up in (0, 1)] == ["red", "green"]
    assert shown["up"]["mappings"][0]["options"]["0"]["text"] == "down"
    assert "thresholds" not in shown["$/h"]


# Coverage


def test_every_metric_is_on_some_panel() -> None:
    shown = {
        name
        for dashboard in ALL.values()
        for question in on_prometheus(dashboard)
        for name, _ in selectors(question.expression)
    }
    bare = {re.sub(r"_(total|bucket|count|sum)$", "", name) for name in shown} | shown
    assert {metric.name for metric in METRICS} - bare == set()


# Links


def test_links_lead_to_dashboards_and_variables_that_exist() -> None:
    seen = set()
    texts = " ".join(json.dumps(dashboard) for dashboard in ALL.values())
    for url in re.findall(r'"url": "(/[^"]+)"', texts):
        parts = urlsplit(url)
        if not parts.path.startswith("/d/"):
            continue
        uid = parts.path.removeprefix("/d/")
        seen.add(uid)
        variables = {variable["name"] for variable in ALL[uid]["templating"]["list"]}
        for name in parse_qs(parts.query):
            if name.startswith("var-"):
                assert name.removeprefix("var-") in variables, url
    assert seen == {
        "goodput-requests",
        "goodput-requests-api",
        "goodput-operations",
        "goodput-objectives",
        "goodput-capacity",
    }


@each
def test_a_dashboard_links_to_all_others_with_the_time_and_variables(
    dashboard: Json,
) -> None:
    (link,) = dashboard["links"]
    assert (link["type"], link["keepTime"], link["includeVars"]) == ("dashboards", True, True)
    # Grafana lists what has all tags of the link.
    assert [uid for uid, other in ALL.items() if set(link["tags"]) <= set(other["tags"])] == [*ALL]


def test_alerts_link_to_dashboards_and_variables_that_exist() -> None:
    rules = yaml.safe_load((ROOT / "alerts" / "goodput-agent.yml").read_text(encoding="utf-8"))
    urls = [
        rule["annotations"]["dashboard_url"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "dashboard_url" in rule.get("annotations", {})
    ]
    for url in urls:
        uid = re.findall(r"/d/([\w-]+)", url)[0]
        variables = {variable["name"] for variable in ALL[uid]["templating"]["list"]}
        assert set(re.findall(r"var-(\w+)=", url)) <= variables, url
    assert len(urls) > 20
    on_agents = {
        rule["alert"]
        for group in rules["groups"]
        for rule in group["rules"]
        if "/d/goodput-agents" in rule.get("annotations", {}).get("dashboard_url", "")
    }
    assert on_agents >= {"LlmAgentDown", "LlmAgentStoreBehind", "LlmAgentJobLate"}


def test_thresholds_are_where_alerts_fire() -> None:
    rules = (ROOT / "alerts" / "goodput-agent.yml").read_text(encoding="utf-8")
    drawn = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"]
        for panel in panels(ALL["goodput-capacity"])
    }
    assert f"(llm_engine_requests_waiting) > {drawn['Queue depth']}" in rules
    assert f"(llm_engine_kv_cache_usage_ratio) > {drawn['KV cache held']}" in rules


# What the objectives make of them


def objectives_dashboard(*settings: dict[str, Any]) -> dict[str, Json]:
    objectives = [ObjectiveSettings.model_validate(each).objective() for each in settings]
    made = render_dashboards(objectives)["dashboards/goodput-objectives.json"]
    return {panel["title"]: panel for panel in panels(json.loads(made))}


def test_each_limit_with_a_histogram_has_a_line_at_its_edge() -> None:
    chat = {"name": "chat", "ttft_ms": 200, "tpot_ms": 120}
    of_chat = objectives_dashboard(chat)
    ttft, tpot, _ = of_chat["Requests within each limit"]["targets"]
    assert 'le="0.2"' in ttft["expr"]
    assert 'le="0.12"' in tpot["expr"]
    acme = {"name": "acme", "match": {"tenant": "acme"}, "ttft_ms": 200}
    assert "Requests within each limit" not in objectives_dashboard(acme)
    # The id of a panel does not depend on its neighbours.
    for panel in panels(ALL["goodput-objectives"]):
        assert of_chat[panel["title"]]["id"] == panel["id"]


def test_a_budget_is_that_of_the_objective_s_own_window() -> None:
    month = [{"name": name, "ttft_ms": 200} for name in ("a", "b")]
    week = {"name": "v1.x", "ttft_ms": 200, "window": "7d"}
    weekly, monthly = objectives_dashboard(*month, week)["Error budget left"]["targets"]
    assert "[7d]" in weekly["expr"]
    assert 'objective=~"v1[.]x"' in weekly["expr"]
    assert "[30d]" in monthly["expr"]
    assert 'objective!~"v1[.]x"' in monthly["expr"]


def test_variables_in_sql_are_quoted_strings() -> None:
    for question in on_postgres(ALL["goodput-requests"]):
        used = re.findall(r"\$\{?\w+(?::\w+)?\}?", question.expression)
        for variable in used:
            assert variable.startswith("$__") or variable.endswith(":sqlstring}"), variable


with warnings.catch_warnings():
    # They would rather have the newest schema, which no Grafana before 13 reads from a file.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.models.dashboard import Dashboard

plugins.register_default_plugins()


def complaints(dashboard: Json) -> Iterator[str]:
    """Complaints of Grafana's models about a dashboard; a wrong shape raises."""
    # Only an import reads it.
    dashboard = {name: value for name, value in dashboard.items() if name != "__requires"}
    model = Dashboard.from_json(dashboard)
    yield from _lost(dashboard, json.loads(JSONEncoder().encode(model)), "dashboard")
    yield from _not_allowed(model, "dashboard")


def _lost(written: Any, parsed: Any, place: str) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(parsed, dict):
        for name, value in written.items():
            # Models leave out what is null.
            if name in parsed:
                yield from _lost(value, parsed[name], f"{place}.{name}")
            elif value is not None:
                yield f"{place}.{name} is unknown"
    elif isinstance(written, list) and isinstance(parsed, list) and len(written) == len(parsed):
        for number, pair in enumerate(zip(written, parsed, strict=True)):
            yield from _lost(*pair, f"{place}[{number}]")
    elif written != parsed:
        yield f"{place} is {written!r} and becomes {parsed!r}"


def _not_allowed(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _not_allowed(item, f"{place}[{number}]")
    elif type(value).__module__.startswith("grafana_foundation_sdk.models"):
        for name, hint in get_type_hints(type(value)).items():
            inside = getattr(value, name)
            allowed = set(_allowed(hint))
            if allowed and isinstance(inside, str | int) and inside not in allowed:
                yield f"{place}.{name} is {inside!r}, not of {allowed}"
            yield from _not_allowed(inside, f"{place}.{name}")


def _allowed(hint: Any) -> Iterator[Any]:
    """The values of an enumeration; nothing for any other type, or for one among others."""
    choices = [item for item in get_args(hint) if item is not type(None)]
    if get_origin(hint) is Union and len(choices) == 1:
        yield from _allowed(choices[0])
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (member.value for member in hint)


@each
def test_grafana_s_models_know_every_name_and_value(dashboard: Json) -> None:
    assert list(complaints(dashboard)) == []


@each
def test_an_import_names_the_plugins_that_are_missing(dashboard: Json) -> None:
    required = {(item["type"], item["id"]) for item in dashboard["__requires"]}
    used = {("panel", panel["type"]) for panel in panels(dashboard)}
    sources = {
        ("datasource", target["datasource"]["type"])
        for panel in panels(dashboard)
        for target in panel["targets"]
    }
    assert required == {("grafana", "grafana")} | used | sources
    # A provisioned dashboard with inputs finds no data source.
    assert "__inputs" not in dashboard


@each
def test_a_dashboard_can_be_changed_in_grafana(dashboard: Json) -> None:
    assert dashboard["editable"]


@pytest.mark.parametrize("uid", ON_PROMETHEUS)
def test_all_clusters_and_namespaces_are_also_agents_without_these_labels(uid: str) -> None:
    variables = {item["name"]: item for item in ALL[uid]["templating"]["list"]}
    everything = {name: item.get("allValue") for name, item in variables.items()}
    assert everything["cluster"] == everything["namespace"] == ".*"
    assert everything["job"] == everything["instance"] == ".+"
    for name, before in (("namespace", "cluster"), ("job", "namespace"), ("instance", "job")):
        assert f'{before}=~"${before}"' in variables[name]["definition"]


def test_an_unknown_model_is_no_choice_and_part_of_all() -> None:
    (model,) = (
        item for item in ALL["goodput-operations"]["templating"]["list"] if item["name"] == "model"
    )
    assert 'model!="unknown"' in model["definition"]
    assert model["allValue"] == ".+"


BY_TITLE = {panel["title"]: panel for dashboard in ALL.values() for panel in panels(dashboard)}


# Limits and targets


@pytest.mark.parametrize(
    ("title", "drawn", "selected"),
    [
        ("Time to first token", "limit", 'measure="ttft"'),
        ("Time per output token", "limit", 'measure="tpot"'),
        ("End-to-end time", "limit", 'measure="e2e"'),
        ("Attainment over time", "target", "objective=~"),
        ("Requests within each limit", "target", "objective=~"),
    ],
)
def test_limits_and_targets_of_objectives_are_drawn_as_dashed_lines(
    title: str, drawn: str, selected: str
) -> None:
    panel = BY_TITLE[title]
    (line,) = (t for t in panel["targets"] if t["legendFormat"] == f"{{{{objective}}}} {drawn}")
    assert f"llm_slo_{drawn}_" in line["expr"]
    assert selected in line["expr"]
    assert properties(panel, f"chat {drawn}")["custom.lineStyle"]["fill"] == "dash"
    assert properties(panel, "proxy p99") == {}


def properties(panel: Json, series: str) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for override in panel["fieldConfig"]["overrides"]:
        how, wanted = override["matcher"]["id"], override["matcher"]["options"]
        named = {"byName": re.escape(wanted), "byRegexp": wanted.strip("/")}[how]
        anchored = how == "byName"
        if (re.fullmatch if anchored else re.search)(named, series):
            found |= {item["id"]: item["value"] for item in override["properties"]}
    return found


def colour(value: float, thresholds: Json) -> str:
    """As Grafana's `getActiveThreshold` has it."""
    reached = [s for s in thresholds["steps"] if s["value"] is None or value >= s["value"]]
    return str((reached or thresholds["steps"])[-1 if reached else 0]["color"])


def attainment(*objectives: Objective) -> Json:
    made = render_dashboards(objectives)["dashboards/goodput-objectives.json"]
    return next(panel for panel in panels(json.loads(made)) if panel["title"] == "Attainment")


def objective(name: str, target: float) -> Objective:
    return ObjectiveSettings(name=name, ttft_ms=200, target=target).objective()


def test_attainment_is_green_from_the_objective_s_own_target_on() -> None:
    panel = attainment(objective("lax", 0.9), objective("strict", 0.999))
    thresholds = {name: properties(panel, name)["thresholds"] for name in ("lax", "strict")}
    assert colour(0.96, thresholds["lax"]) == "green"
    assert colour(0.96, thresholds["strict"]) == "red"
    assert colour(0.999, thresholds["strict"]) == "green"
    # One that came later is not green too early.
    assert properties(panel, "later") == {}
    assert colour(0.96, panel["fieldConfig"]["defaults"]["thresholds"]) == "red"


# Colours that a question tells


def coloured(panel: Json, row: Mapping[str, float | None]) -> Json:
    """The thresholds that Grafana makes of the row of a question about colours.

    As its fieldToConfigMapping.ts has it: a step for each value that is known, in their order.
    """
    (step,) = panel["transformations"]
    assert step["id"] == "configFromData"
    mappings = {item["fieldName"]: item for item in step["options"]["mappings"]}
    assert {item["handlerKey"] for item in mappings.values()} == {"threshold1"}
    steps = [
        {"value": value, "color": mappings[name]["handlerArguments"]["threshold"]["color"]}
        for name, value in row.items()
        if value is not None
    ]
    return {"mode": "absolute", "steps": steps}


@pytest.mark.parametrize(
    ("title", "columns"),
    [
        ("Attainment by input and output length", ["out 0-64", "out 4k+"]),
        ("Attainment by tenant", ["attainment"]),
    ],
)
def test_a_cell_has_its_colour_by_the_target_of_the_chosen_objective(
    title: str, columns: Sequence[str]
) -> None:
    panel = BY_TITLE[title]
    thresholds = coloured(panel, {"unknown": -1, "below": 0, "target": 0.999})
    assert [colour(share, thresholds) for share in (0.0, 0.96, 0.999)] == ["red", "red", "green"]
    # Grafana colours a cell with nothing in it by what comes before every number.
    assert colour(float("-inf"), thresholds) == "transparent"
    options = panel["transformations"][0]["options"]
    assert options["configRefId"] in {target["refId"] for target in panel["targets"]}
    for column in columns:
        assert properties(panel, column)["color"] == {"mode": "thresholds"}
        assert re.search(options["applyTo"]["options"].strip("/"), column)
    assert not re.search(options["applyTo"]["options"].strip("/"), "judged")


@pytest.mark.parametrize("uid", ON_PROMETHEUS)
def test_events_alerts_and_xids_are_marked(uid: str) -> None:
    marks = {mark["name"]: mark for mark in ALL[uid]["annotations"]["list"] if mark["enable"]}
    assert marks.keys() >= {"Events", "Alerts", "Xids"}
    # Milliseconds, as Grafana takes a value for a time.
    assert marks["Xids"]["useValueForTime"] is True
    assert "1000 * " in marks["Xids"]["expr"]
