"""Prometheus accepts every expression, and every series and label in it is published."""

import re
import subprocess
from pathlib import Path

import yaml

from tests.real_parts.alertmanager import program
from tests.render.dashboards.answering import EVERYTHING, GRAFANA, every_question
from tests.render.dashboards.reading import SERIES, Json, dashboards, filled, selectors

ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}
QUESTIONS = every_question()


def variable_selectors(dashboard: Json) -> list[str]:
    """The series of a dashboard's variables."""
    return [
        re.sub(r"^label_values\((.+), \w+\)$", r"\1", variable["query"]["query"])
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query" and variable["datasource"]["type"] == "prometheus"
    ]


def marks(dashboard: Json) -> list[str]:
    """The expressions of annotations on graphs."""
    return [mark["expr"] for mark in dashboard["annotations"]["list"] if "expr" in mark]


def everything() -> list[str]:
    found = [question.expression for question in QUESTIONS]
    for dashboard in ALL.values():
        found += [*variable_selectors(dashboard), *marks(dashboard)]
    return found


def promtool(expressions: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """promtool's complaints about the expressions."""
    path = folder / "expressions.yml"
    rules = [
        {"record": f"question:{number}", "expr": filled(expression, {**GRAFANA, **EVERYTHING})}
        for number, expression in enumerate(expressions)
    ]
    path.write_text(yaml.safe_dump({"groups": [{"name": "questions", "rules": rules}]}))
    return subprocess.run(
        [program("promtool"), "check", "rules", "--lint=none", path],
        capture_output=True,
        text=True,
        check=False,
    )


def test_prometheus_accepts_every_expression(tmp_path: Path) -> None:
    checked = promtool(everything(), tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(everything())} rules found" in checked.stdout


def test_promtool_refuses_an_invalid_expression(tmp_path: Path) -> None:
    assert promtool(["rate(llm_requests_total)"], tmp_path).returncode != 0


def test_every_series_and_label_is_published() -> None:
    seen = set()
    for expression in everything():
        for name, matchers in selectors(expression):
            seen.add(name)
            if name != "ALERTS":
                assert name in SERIES, f"{name} in {expression}"
                assert {label for label, _, _ in matchers} <= SERIES[name], expression
    assert len(seen) > 100


def test_variables_use_published_series() -> None:
    for dashboard in ALL.values():
        for selector in variable_selectors(dashboard):
            assert selector.split("{")[0] in SERIES, selector


def test_no_name_escapes_the_reader_of_selectors() -> None:
    """A series without conditions would not be read as one."""
    published = {name for name in SERIES if "_" in name}
    for expression in (question.expression for question in QUESTIONS):
        plain = re.sub(r'"[^"]*"', "", expression)
        assert published & set(re.findall(r"[a-zA-Z_:][\w:]*", plain)) <= {
            name for name, _ in selectors(expression)
        }, expression


def test_aggregations_and_legends_keep_labels_that_the_series_have() -> None:
    for question in QUESTIONS:
        known = {"point"}
        for name, _ in selectors(question.expression):
            known |= SERIES[name]
        kept = {
            label.strip()
            for found in re.findall(r"\b(?:by|on) \(([\w, ]*)\)", question.expression)
            for label in found.split(",")
        }
        shown = set(re.findall(r"\{\{(\w+)\}\}", question.target["legendFormat"]))
        assert kept - {""} <= known, question.expression
        assert shown <= kept, question.name


def test_query_names_are_unique() -> None:
    names = [question.name for question in QUESTIONS]
    assert sorted(names) == sorted(set(names))
