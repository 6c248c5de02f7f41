"""The rules of Grafana's dashboard-linter (v0.1.0) for Prometheus, as functions over JSON.

Each answers its complaints about a dashboard. Stricter than the original in one way: rules on
panels hold for every kind of panel, not only for those that the linter knows. Left out are
target-logql-rule and target-logql-auto-rule, which speak of Loki; target-promql-rule is promtool's
own verdict, in test_panel_expressions.py. As in the original, rules on `job` and `instance` speak
of dashboards whose first data source is Prometheus.
"""

import re
from collections.abc import Callable, Iterator, Mapping

import pytest
from grafana_foundation_sdk.models import units

from tests.render.dashboards.reading import Json, dashboards, on_prometheus, panels, selectors

Rule = Callable[[Json], Iterator[str]]

_UNITS = {value for value in vars(units).values() if isinstance(value, str)}
_ON_TIME_CHANGE = 2
_LABEL_VALUES = re.compile(r"label_values\((?:.+, )?\w+\)")


def _variables(dashboard: Json, kind: str) -> list[Json]:
    return [item for item in dashboard["templating"]["list"] if item["type"] == kind]


def _about_prometheus(dashboard: Json) -> bool:
    sources = _variables(dashboard, "datasource")
    return bool(sources) and sources[0]["query"] == "prometheus"


def template_datasource(dashboard: Json) -> Iterator[str]:
    """Data sources are variables, named and labelled after their kind."""
    sources = _variables(dashboard, "datasource")
    if not sources:
        yield "no data source is a variable"
    for source in sources:
        kind = source["query"]
        names, labels = {f"{kind}_datasource"}, {f"{kind.title()} data source"}
        if len(sources) == 1:
            names, labels = names | {"datasource"}, labels | {"Data source"}
        if source["name"] not in names or source["label"] not in labels:
            yield f"data source {source['name']!r}, {source['label']!r}: not {names}, {labels}"


def _choice(dashboard: Json, name: str) -> Iterator[str]:
    if not _about_prometheus(dashboard):
        return
    found = [item for item in dashboard["templating"]["list"] if item["name"] == name]
    if not found:
        yield f"there is no variable {name}"
        return
    sources = {f"${{{source['name']}}}" for source in _variables(dashboard, "datasource")}
    wanted = {
        "type": found[0]["type"] == "query",
        "label": found[0]["label"] == name.title(),
        "data source": found[0].get("datasource", {}).get("uid") in sources,
        "multi": found[0]["multi"],
        "allValue": found[0].get("allValue") == ".+",
    }
    yield from (f"{what} of the variable {name}" for what, right in wanted.items() if not right)


def template_job(dashboard: Json) -> Iterator[str]:
    """There is a choice of jobs."""
    yield from _choice(dashboard, "job")


def template_instance(dashboard: Json) -> Iterator[str]:
    """There is a choice of instances."""
    yield from _choice(dashboard, "instance")


def template_label_promql(dashboard: Json) -> Iterator[str]:
    """Variables query Prometheus for the values of labels."""
    for variable in _variables(dashboard, "query"):
        if variable["datasource"]["type"] == "prometheus":
            query = variable["query"]["query"]
            if not _LABEL_VALUES.fullmatch(query):
                yield f"variable {variable['name']} asks {query!r}"


def template_on_time_change_reload(dashboard: Json) -> Iterator[str]:
    """Variables are refreshed when the selected time changes."""
    for variable in _variables(dashboard, "query"):
        if variable["refresh"] != _ON_TIME_CHANGE:
            yield f"variable {variable['name']} has refresh {variable['refresh']}"


def panel_datasource(dashboard: Json) -> Iterator[str]:
    """Panels and their questions use the data source that was chosen."""
    sources = {f"${{{source['name']}}}" for source in _variables(dashboard, "datasource")}
    for panel in panels(dashboard):
        for place in (panel, *panel["targets"]):
            if place.get("datasource", {}).get("uid") not in sources:
                yield f"panel {panel['title']!r} uses {place.get('datasource')}"


def panel_title_description(dashboard: Json) -> Iterator[str]:
    """Panels have a title and a description."""
    for panel in panels(dashboard):
        if not panel.get("title") or not panel.get("description"):
            yield f"panel {panel['id']} has no title or no description"


def panel_units(dashboard: Json) -> Iterator[str]:
    """Panels have a unit that Grafana knows, and so have the columns that differ."""
    for panel in panels(dashboard):
        units = [panel["fieldConfig"]["defaults"].get("unit")]
        for override in panel["fieldConfig"]["overrides"]:
            units += [item["value"] for item in override["properties"] if item["id"] == "unit"]
        yield from (
            f"panel {panel['title']!r}: unit {unit!r}" for unit in units if unit not in _UNITS
        )


def panel_no_targets(dashboard: Json) -> Iterator[str]:
    """Every panel has a query."""
    yield from (f"panel {item['title']!r}" for item in panels(dashboard) if not item.get("targets"))


def target_rate_interval(dashboard: Json) -> Iterator[str]:
    """Rates are taken over Grafana's own interval, which always holds enough scrapes."""
    for question in on_prometheus(dashboard):
        for function, window in re.findall(r"(\w+)\([^()\[\]]*\[([^\]]+)\]", question.expression):
            if function in ("rate", "irate") and window != "$__rate_interval":
                yield f"{question.name}: {function} over {window}"


def target_counter_agg(dashboard: Json) -> Iterator[str]:
    """Counters are looked at by their growth."""
    for question in on_prometheus(dashboard):
        grown = re.sub(r"\b(rate|irate|increase)\([^()\[\]]*\[[^\]]+\]\)", "", question.expression)
        for name, _ in selectors(grown):
            if name.endswith("_total"):
                yield f"{question.name}: {name} as it stands"


def _narrowed(dashboard: Json, label: str) -> Iterator[str]:
    if not _about_prometheus(dashboard):
        return
    for question in on_prometheus(dashboard):
        for name, matchers in selectors(question.expression):
            if (label, "=~", f"${label}") not in matchers:
                yield f"{question.name}: {name} without {label}"


def target_job(dashboard: Json) -> Iterator[str]:
    """Every series is of the jobs that were chosen."""
    yield from _narrowed(dashboard, "job")


def target_instance(dashboard: Json) -> Iterator[str]:
    """Every series is of the instances that were chosen."""
    yield from _narrowed(dashboard, "instance")


def uneditable_dashboard(dashboard: Json) -> Iterator[str]:
    """Rendered dashboards are not editable, because rendering overwrites changes."""
    if dashboard.get("editable") is not False:
        yield "it can be edited"


RULES: Mapping[str, Rule] = {
    "template-datasource-rule": template_datasource,
    "template-job-rule": template_job,
    "template-instance-rule": template_instance,
    "template-label-promql-rule": template_label_promql,
    "template-on-time-change-reload-rule": template_on_time_change_reload,
    "panel-datasource-rule": panel_datasource,
    "panel-title-description-rule": panel_title_description,
    "panel-units-rule": panel_units,
    "panel-no-targets-rule": panel_no_targets,
    "target-rate-interval-rule": target_rate_interval,
    "target-counter-agg-rule": target_counter_agg,
    "target-job-rule": target_job,
    "target-instance-rule": target_instance,
    "uneditable-dashboard": uneditable_dashboard,
}

ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}


@pytest.mark.parametrize("uid", ALL)
@pytest.mark.parametrize("rule", RULES)
def test_a_dashboard_keeps_the_rule(uid: str, rule: str) -> None:
    assert list(RULES[rule](ALL[uid])) == []
