"""The rules of Grafana's dashboard-linter (v0.1.0) for Prometheus, as functions over JSON.

Each yields its complaints about a dashboard. Rules on panels hold for every kind of panel, not only
for those that the linter knows; promtool's own verdict is in test_prometheus.py. As in the
original, rules on `job` and `instance` are for dashboards whose first data source is Prometheus.
"""

import re
from collections.abc import Callable, Iterator

import pytest
from grafana_foundation_sdk.models import units

from tests.render.dashboards.reading import Json, dashboards, on_prometheus, panels, selectors

_UNITS = {value for value in vars(units).values() if isinstance(value, str)}


def _variables(dashboard: Json, kind: str) -> list[Json]:
    return [item for item in dashboard["templating"]["list"] if item["type"] == kind]


def _sources(dashboard: Json) -> set[str]:
    return {f"${{{source['name']}}}" for source in _variables(dashboard, "datasource")}


def _about_prometheus(dashboard: Json) -> bool:
    return bool(_variables(dashboard, "datasource")[0]["query"] == "prometheus")


def data_sources_are_variables_named_after_their_kind(dashboard: Json) -> Iterator[str]:
    sources = _variables(dashboard, "datasource")
    for source in sources:
        kind = source["query"]
        names, labels = {f"{kind}_datasource"}, {f"{kind.title()} data source"}
        if len(sources) == 1:
            names, labels = names | {"datasource"}, labels | {"Data source"}
        if source["name"] not in names or source["label"] not in labels:
            yield f"{source['name']!r}, {source['label']!r}"


def jobs_and_instances_can_be_chosen(dashboard: Json) -> Iterator[str]:
    chosen = {item["name"]: item for item in _variables(dashboard, "query")}
    for name in ("job", "instance") if _about_prometheus(dashboard) else ():
        found = chosen[name]
        right = (found["label"], found["multi"], found["allValue"]) == (name.title(), True, ".+")
        if not right or found["datasource"]["uid"] not in _sources(dashboard):
            yield name


def every_series_is_of_the_chosen_agents(dashboard: Json) -> Iterator[str]:
    for question in on_prometheus(dashboard) if _about_prometheus(dashboard) else ():
        for name, matchers in selectors(question.expression):
            # Prometheus makes it of rules, which drop these labels.
            if name == "ALERTS":
                continue
            for label in ("cluster", "namespace", "job", "instance"):
                if (label, "=~", f"${label}") not in matchers:
                    yield f"{question.name}: {name} without {label}"


def panels_query_the_chosen_data_source(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        for place in (panel, *panel["targets"]):
            if place.get("datasource", {}).get("uid") not in _sources(dashboard):
                yield f"{panel['title']} uses {place.get('datasource')}"
        if not panel["targets"]:
            yield f"{panel['title']} has no query"


def panels_have_a_title_a_description_and_units_of_grafana(dashboard: Json) -> Iterator[str]:
    for panel in panels(dashboard):
        if not panel.get("title") or not panel.get("description"):
            yield f"panel {panel['id']} has no title or no description"
        found = [panel["fieldConfig"]["defaults"].get("unit")]
        for override in panel["fieldConfig"]["overrides"]:
            found += [item["value"] for item in override["properties"] if item["id"] == "unit"]
        yield from (f"{panel['title']}: unit {unit!r}" for unit in found if unit not in _UNITS)


def rates_are_over_an_interval_that_always_holds_enough_scrapes(dashboard: Json) -> Iterator[str]:
    for question in on_prometheus(dashboard):
        for function, window in re.findall(r"(\w+)\([^()\[\]]*\[([^\]]+)\]", question.expression):
            if function in ("rate", "irate") and window != "$__rate_interval":
                yield f"{question.name}: {function} over {window}"


def counters_are_shown_by_their_increase(dashboard: Json) -> Iterator[str]:
    for question in on_prometheus(dashboard):
        left = re.sub(r"\b(rate|irate|increase)\([^()\[\]]*\[[^\]]+\]\)", "", question.expression)
        for name, _ in selectors(left):
            if name.endswith("_total"):
                yield f"{question.name}: {name} as it stands"


RULES: tuple[Callable[[Json], Iterator[str]], ...] = (
    data_sources_are_variables_named_after_their_kind,
    jobs_and_instances_can_be_chosen,
    every_series_is_of_the_chosen_agents,
    panels_query_the_chosen_data_source,
    panels_have_a_title_a_description_and_units_of_grafana,
    rates_are_over_an_interval_that_always_holds_enough_scrapes,
    counters_are_shown_by_their_increase,
)


@pytest.mark.parametrize("rule", RULES)
def test_a_dashboard_keeps_the_rule(rule: Callable[[Json], Iterator[str]]) -> None:
    found = {dashboard["uid"]: list(rule(dashboard)) for dashboard in dashboards()}
    assert {uid: complaints for uid, complaints in found.items() if complaints} == {}
