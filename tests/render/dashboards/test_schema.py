"""The files against Grafana's own models of a dashboard."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from tests.render.dashboards.reading import Json, dashboards, panels
from tests.render.dashboards.schema import complaints

ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}


@pytest.mark.parametrize("uid", ALL)
def test_grafana_s_models_know_every_name_and_value(uid: str) -> None:
    assert list(complaints(ALL[uid])) == []


def graph(dashboard: Json) -> Json:
    return next(panel for panel in panels(dashboard) if panel["type"] == "timeseries")


WRONG: dict[str, Callable[[Json], Any]] = {
    "a field": lambda it: it.update(timezones="browser"),
    "a field of a panel": lambda it: graph(it).update(descriptions=""),
    "an option": lambda it: graph(it)["options"]["legend"].update(displayMood="table"),
    "a value of an option": lambda it: graph(it)["options"]["legend"].update(displayMode="tables"),
    "how a line is drawn": lambda it: graph(it)["fieldConfig"]["defaults"]["custom"].update(w=1),
    "a question": lambda it: graph(it)["targets"][0].update(legendformat=""),
    "a variable": lambda it: it["templating"]["list"][1].update(refresh_on="time"),
    "a mark": lambda it: it["annotations"]["list"][1].update(title=""),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_models_refuse_a_wrong_name(what: str) -> None:
    dashboard = deepcopy(ALL["goodput-operations"])
    WRONG[what](dashboard)
    assert len(list(complaints(dashboard))) == 1
