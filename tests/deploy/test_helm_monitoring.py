"""Alerts and dashboards of the Helm chart, and what Helm prints after an installation."""

import gzip
import re
from decimal import Decimal
from pathlib import Path

import pytest
import yaml

from agent.render.alerts import PLACEHOLDERS, RuleOptions, render_alerts
from agent.render.alerts.alert_files import RULES
from agent.render.alerts.thresholds import RATIO, THRESHOLDS
from agent.settings import Settings
from tests.deploy.kit import CHART, ROOT, check
from tests.real_parts.helm import documents, rendered, run
from tests.real_parts.processes import PartFailed

# Dashboards and alerts

LINKS = ("--set", "alerts.runbooks=https://r.test/x/", "--set", "alerts.grafana=https://g.test")


@pytest.fixture(scope="module")
def shared() -> str:
    """A rendering with all alerts and dashboards."""
    return rendered(CHART, "--set", "alerts.enabled=true", *LINKS)


def test_each_dashboard_is_a_config_map_for_grafanas_sidecar(shared: str) -> None:
    made: dict[str, str] = {}
    for found in documents(shared):
        if found["metadata"]["labels"].get("grafana_dashboard") == "1":
            check(found)
            made |= found["data"]
    files = (ROOT / "dashboards").glob("*.json")
    assert made == {path.name: path.read_text(encoding="utf-8") for path in files}


def test_the_rules_are_the_agents_with_links_that_lead_somewhere(shared: str) -> None:
    (found,) = (each for each in documents(shared) if each["kind"] == "PrometheusRule")
    check(found)
    text = (ROOT / "deploy/kubernetes/prometheusrule.yaml").read_text(encoding="utf-8")
    for placeholder, link in (
        ("https://your-goodput-agent.example/runbooks", "https://r.test/x"),
        ("https://your-grafana.example", "https://g.test"),
    ):
        assert placeholder in text
        text = text.replace(placeholder, link)
    assert found["spec"] == yaml.safe_load(text)["spec"]


def test_rules_of_other_objectives_come_from_a_file(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yml"
    rules.write_text("# Mine.\ngroups:\n- {name: mine, rules: []}\n", encoding="utf-8")
    made = rendered(CHART, "--set", "alerts.enabled=true", "--set-file", f"alerts.rules={rules}")
    (found,) = (each for each in documents(made) if each["kind"] == "PrometheusRule")
    assert found["spec"] == {"groups": [{"name": "mine", "rules": []}]}


def test_alerts_have_the_labels_and_severities_of_the_values() -> None:
    made = rendered(
        CHART,
        *("--set", "alerts.enabled=true", "--set", "alerts.labels.cluster=eu-1"),
        *("--set", "alerts.severities.critical=page"),
    )
    (found,) = (each for each in documents(made) if each["kind"] == "PrometheusRule")
    check(found)
    rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
    alerts = [rule["labels"] for rule in rules if "alert" in rule]
    assert {labels["severity"] for labels in alerts} == {"page", "warning", "info"}
    assert {labels["cluster"] for labels in alerts} == {"eu-1"}
    assert {labels.get("tier") for labels in alerts} == {None, "1", "2", "3", "4"}
    assert all("labels" not in rule for rule in rules if "record" in rule)


def test_matchers_and_thresholds_are_those_of_the_values() -> None:
    """The chart's rules are then those that `render` makes with the same options."""
    made = rendered(
        CHART,
        *("--set", "alerts.enabled=true", "--set", "alerts.matchers.cluster=eu-1"),
        *("--set", "alerts.thresholds.queue_requests=30"),
        *("--set", "alerts.thresholds.error_page_ratio=0.2"),
    )
    (found,) = (each for each in documents(made) if each["kind"] == "PrometheusRule")
    check(found)
    options = RuleOptions(
        matchers={"cluster": "eu-1"},
        thresholds={"queue_requests": Decimal(30), "error_page_ratio": Decimal("0.2")},
    )
    objectives = Settings().all_objectives()
    text = render_alerts(objectives, links=PLACEHOLDERS, options=options)[RULES]
    in_chart = yaml.safe_dump(found["spec"], width=10_000).replace(",}", "}")
    assert yaml.safe_load(in_chart) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("alerts.thresholds.queue=3", "alerts.thresholds: queue is none of agent_late_seconds"),
        ("alerts.thresholds.queue_requests=many", "'many' does not match pattern"),
        ("alerts.thresholds.error_page_ratio=5", "error_page_ratio is a ratio; write 0.05 for 5 %"),
        ("alerts.matchers.engine=x", "invalid propertyName 'engine'"),
        ("alerts.labels.tier=x", "invalid propertyName 'tier'"),
        ("alerts.matchers.cluster=eu alerts.rules=x", "alerts.rules: matchers and thresholds"),
    ],
)
def test_matchers_and_thresholds_that_no_rule_has_are_refused(values: str, complaint: str) -> None:
    arguments = [
        word for value in ("alerts.enabled=true", *values.split()) for word in ("--set", value)
    ]
    with pytest.raises(PartFailed, match=re.escape(complaint)):
        rendered(CHART, *arguments)


def test_a_ratio_has_a_name_by_which_the_chart_knows_it() -> None:
    ratios = {name for name, each in THRESHOLDS.items() if each.unit == RATIO}
    assert ratios == {name for name in THRESHOLDS if name.endswith("_ratio")}


def test_a_release_fits_into_the_secret_in_which_helm_keeps_it(shared: str) -> None:
    texts = [path.read_bytes() for path in sorted(CHART.rglob("*")) if path.is_file()]
    kept_bytes = len(gzip.compress(b"".join([*texts, shared.encode()]))) * 4 / 3
    assert kept_bytes < 2**20 / 2


# What Helm prints after an installation


def notes(*values: str) -> str:
    arguments = [word for value in values for word in ("--set", value)]
    printed = run("helm", "install", "demo", CHART, "--dry-run=client", *arguments)
    return printed.partition("NOTES:")[2]


def test_the_notes_say_what_is_missing_and_where_spans_go() -> None:
    missing = (
        "makes no pod", "create secret", "rows end", "podMonitor", "alerts.enabled", "dcgm.url",
    )  # fmt: skip
    said = notes()
    assert "create secret generic goodput-agent-tokens --from-literal=read=" in said
    assert all(each in said for each in missing)
    on_nodes = notes("mode=node", "node.selector=app=chat")
    assert "--otlp-traces-endpoint=http://demo-goodput-agent.default:4317" in on_nodes
    assert "--from-literal=ingest=" in on_nodes
    assert "makes no pod" not in on_nodes
    whole = notes(
        "vllm.enabled=true", "tokens.read=0123456789abcdef", "data.createClaim=true",
        "podMonitor.enabled=true", "dcgm.url=http://d:9400", "alerts.enabled=true", "alerts.runbooks=https://r.test/x",
    )  # fmt: skip
    assert "port-forward service/demo-goodput-agent 9470" in whole
    assert not any(each in whole for each in missing)
