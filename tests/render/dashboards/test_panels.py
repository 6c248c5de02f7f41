"""Style, thresholds and annotations of single panels."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agent.records.objective import Objective
from agent.render.dashboards import render_dashboards
from agent.settings.settings_model import ObjectiveSettings
from tests.render.dashboards.reading import Json, dashboards, panels

ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}
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
    """What is set for a series or a column by its name."""
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


@pytest.mark.parametrize("uid", [uid for uid in ALL if uid != "goodput-requests"])
def test_events_alerts_and_xids_are_marked(uid: str) -> None:
    marks = {mark["name"]: mark for mark in ALL[uid]["annotations"]["list"] if mark["enable"]}
    assert marks.keys() >= {"Events", "Alerts", "Xids"}
    # Milliseconds, as Grafana takes a value for a time.
    assert marks["Xids"]["useValueForTime"] is True
    assert "1000 * " in marks["Xids"]["expr"]
