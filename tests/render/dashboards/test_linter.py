"""Grafana's own lint rules on every dashboard, and on a broken dashboard for each rule."""

from collections.abc import Callable
from copy import deepcopy

import pytest

from tests.render.dashboards.linter import RULES
from tests.render.dashboards.reading import Json, dashboards, panels

ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}
Break = Callable[[Json], object]


@pytest.mark.parametrize("uid", ALL)
@pytest.mark.parametrize("rule", RULES)
def test_a_dashboard_keeps_the_rule(uid: str, rule: str) -> None:
    assert list(RULES[rule](ALL[uid])) == []


def variable(dashboard: Json, name: str) -> Json:
    return next(item for item in dashboard["templating"]["list"] if item["name"] == name)


def first(dashboard: Json) -> Json:
    return next(panels(dashboard))


def ask(expression: str) -> Break:
    return lambda dashboard: first(dashboard)["targets"][0].update(expr=expression)


CHOSEN = 'job=~"$job",instance=~"$instance"'

BROKEN: dict[str, list[Break]] = {
    "template-datasource-rule": [
        lambda it: variable(it, "prometheus_datasource").update(name="ds"),
        lambda it: variable(it, "prometheus_datasource").update(label="Source"),
        lambda it: it["templating"].update(list=[]),
    ],
    "template-job-rule": [
        lambda it: variable(it, "job").update(name="jobs"),
        lambda it: variable(it, "job").update(allValue=".*"),
        lambda it: variable(it, "job").update(multi=False),
        lambda it: variable(it, "job")["datasource"].update(uid="P1"),
    ],
    "template-instance-rule": [lambda it: variable(it, "instance").update(label="Agent")],
    "template-label-promql-rule": [
        lambda it: variable(it, "engine")["query"].update(query="query_result(up)")
    ],
    "template-on-time-change-reload-rule": [lambda it: variable(it, "model").update(refresh=1)],
    "panel-datasource-rule": [
        lambda it: first(it)["datasource"].update(uid="P1"),
        lambda it: first(it)["targets"][0]["datasource"].update(uid="P1"),
    ],
    "panel-title-description-rule": [
        lambda it: first(it).update(title=""),
        lambda it: first(it).update(description=""),
    ],
    "panel-units-rule": [
        lambda it: first(it)["fieldConfig"]["defaults"].update(unit="seconds"),
        lambda it: first(it)["fieldConfig"]["defaults"].pop("unit"),
    ],
    "panel-no-targets-rule": [lambda it: first(it).update(targets=[])],
    "target-rate-interval-rule": [ask(f"rate(x_total{{{CHOSEN}}}[5m])")],
    "target-counter-agg-rule": [
        ask(f"sum(x_total{{{CHOSEN}}})"),
        ask(f"max_over_time(x_total{{{CHOSEN}}}[$__rate_interval])"),
    ],
    "target-job-rule": [ask('sum(x{instance=~"$instance"})'), ask('sum(x{job="$job"})')],
    "target-instance-rule": [ask('sum(x{job=~"$job"})')],
    "uneditable-dashboard": [lambda it: it.update(editable=True)],
}


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_reports_a_broken_dashboard(rule: str) -> None:
    for broken in BROKEN[rule]:
        dashboard = deepcopy(ALL["goodput-operations"])
        broken(dashboard)
        assert list(RULES[rule](dashboard))
