"""The rendered rules as a whole: committed files, and the names in them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from agent.catalog.engines.vllm import DURATION_EDGES_S, TPOT_EDGES_S, TTFT_EDGES_S, VLLM
from agent.catalog.metric import Kind
from agent.records.event import EventKind
from agent.render.alerts import PLACEHOLDERS, Timings, render_alerts
from agent.render.alerts.alert_files import (
    CHART_FILES,
    CHART_RULES,
    PROMETHEUS_RULE,
    RULES,
    VLLM_ALONE,
    render_kubernetes,
)
from agent.render.dashboards import render_dashboards
from agent.settings.settings_model import Settings
from tests.render.alerts.agent_cases import BUDGET_USD
from tests.render.alerts.cases import AGGREGATED, OBJECTIVES, rule_groups, selectors
from tests.render.alerts.cases import expressions as expressions_of
from tests.render.dashboards.reading import SERIES

# The kinds of events without an alert of their own, and the alert on the engine's metrics instead.
ALERTS_ON_METRICS = {
    EventKind.KV_PRESSURE: "LlmKvCacheSaturated",
    EventKind.ADMISSION_LIMIT: "LlmAdmissionRejections",
    EventKind.UNREACHABLE: "LlmEngineDown",
    EventKind.PROXY_WORKER_DIED: "LlmAgentProxyFailing",
    EventKind.ENGINE_EJECTED: "LlmProxyEngineEjected",
    EventKind.ENGINE_RETURNED: None,
    # An operator asked for it.
    EventKind.SLEEP: None,
}
ROOT = Path(__file__).parents[3]
RUNBOOKS = ROOT / "docs" / "runbooks"
TEXTS = render_alerts(OBJECTIVES, budget_usd=BUDGET_USD)


def rules(file: str) -> Iterator[dict[str, Any]]:
    for group in rule_groups(TEXTS[file]):
        yield from group["rules"]


def alerts(file: str) -> list[dict[str, Any]]:
    return [rule for rule in rules(file) if "alert" in rule]


ALERTS = [*alerts(RULES), *alerts(VLLM_ALONE)]


def test_committed_files_are_those_rendered_from_the_settings() -> None:
    made = render_alerts(Settings().all_objectives())
    committed = {name: (ROOT / name).read_text(encoding="utf-8") for name in made}
    assert committed == made, "run goodput-agent render and commit alerts/"
    assert {f"alerts/{path.name}" for path in (ROOT / "alerts").iterdir()} == set(made)


def test_no_two_alerts_have_the_same_series_when_both_files_are_loaded() -> None:
    # Prometheus refuses the second sample of such a pair, each time.
    made = [(alert["alert"], tuple(sorted(alert["labels"].items()))) for alert in ALERTS]
    shared = {name for name, _ in made if sum(other == name for other, _ in made) > 1}
    assert "Watchdog" in shared
    assert len(set(made)) == len(made)


def test_a_trial_has_the_same_rules() -> None:
    fast = Timings(speed=60, scrape_interval_s=1, evaluation_interval_s=1)
    shapes = [
        [re.sub(r"\d+(\.\d+)?[smhd]?", "#", f"{rule['expr']} {rule['labels']}") for rule in found]
        for found in (
            [rule for rule in alerts(RULES) if rule["alert"] != "LlmTokenCostOverBudget"],
            [
                rule
                for group in rule_groups(render_alerts(OBJECTIVES, fast)[RULES])
                for rule in group["rules"]
                if "alert" in rule
            ],
        )
    ]
    assert shapes[0] == shapes[1]
    windows = re.findall(r"\[(\w+)\]", render_alerts(OBJECTIVES, fast)[RULES])
    assert max(map(len, windows)) <= 4
    assert {"5s", "1m"} <= set(windows)
    assert not {"1d", "3d", "6h"} & set(windows)


# Names and labels


_VLLM_NAMES = {spelling.series for spellings in VLLM.facts.values() for spelling in spellings}
_VLLM_HISTOGRAMS = {
    f"{spelling.series}{ending}"
    for metric, spellings in VLLM.facts.items()
    if metric.kind is Kind.HISTOGRAM
    for spelling in spellings
    for ending in ("_bucket", "_count")
}
# Prometheus' own, and what the rules record.
_OTHERS = re.compile(r"up|ALERTS|objective_model:llm_slo_missed:(ratio_rate|increase)\w+")


def expressions(file: str) -> Iterator[str]:
    yield from expressions_of({"groups": rule_groups(TEXTS[file])})


def test_every_series_and_label_is_in_the_catalogue() -> None:
    seen = set()
    for expression in expressions(RULES):
        for name, labels in selectors(expression):
            seen.add(name)
            if not _OTHERS.fullmatch(name):
                assert name in SERIES, f"{name} in {expression}"
                assert labels <= SERIES[name], f"{name}{labels} in {expression}"
    assert len(seen) > 40


def test_aggregations_keep_labels_that_the_series_have() -> None:
    for expression in expressions(RULES):
        kept = {
            label.strip() for found in AGGREGATED.findall(expression) for label in found.split(",")
        }
        known: set[str] = {"job", "instance"}
        for name, _ in selectors(expression):
            known |= SERIES.get(name, frozenset({"objective", "model"}))
        assert kept - {""} <= known, expression


def test_rules_for_vllm_use_names_of_its_dialect() -> None:
    seen = set()
    for expression in expressions(VLLM_ALONE):
        seen |= {name for name, _ in selectors(expression)}
    assert seen - {"up", "ALERTS"} <= _VLLM_NAMES | _VLLM_HISTOGRAMS
    assert len(seen) > 10


def test_recorded_names_are_those_that_alerts_use() -> None:
    recorded = {rule["record"] for rule in rules(RULES) if "record" in rule}
    asked = {
        name
        for rule in alerts(RULES)
        for name, _ in selectors(rule["expr"])
        if name.startswith("objective_model:")
    }
    assert asked == recorded


# Texts


def test_an_alert_has_severity_texts_and_links() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in {"page", "ticket", "none"}
        annotations = alert["annotations"]
        assert "$value" not in annotations["summary"]
        assert "$value" not in str(alert["labels"])
        assert annotations["description"].endswith((".", "{{ end }}"))
        assert annotations["runbook_url"].endswith(f"/runbooks/{alert['alert']}.md")
        ours = not alert["alert"].startswith(("Vllm", "Watchdog"))
        assert ("dashboard_url" in annotations) == ours


def test_an_alert_has_a_runbook() -> None:
    for alert in ALERTS:
        page = (RUNBOOKS / f"{alert['alert']}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {alert['alert']}\n")
        headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert headings == ["What it means", "How to confirm", "What to do first"]


def test_every_runbook_is_of_an_alert_and_in_the_index() -> None:
    names = {alert["alert"] for alert in ALERTS}
    pages = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    assert pages == names
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| ([\w ]+) \|$", index, re.MULTILINE))
    assert set(listed) == names
    for alert in ALERTS:
        assert alert["labels"]["severity"] in listed[alert["alert"]].split(" or ")


def test_runbooks_link_to_pages_and_name_series_that_exist() -> None:
    known = SERIES.keys() | _VLLM_NAMES | _VLLM_HISTOGRAMS
    for path in sorted(RUNBOOKS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)]+\.md)\)", text):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"
        named = re.findall(
            r"\b(?:llm_|gpu_|gen_ai_)\w+|\bvllm:\w+", text.replace("llm_slo_missed", "")
        )
        for name in named:
            reason = re.search(rf"`{name}`", text) and name not in known
            assert name in known or reason, f"{path.name}: {name}"


def test_every_kind_of_event_has_an_alert() -> None:
    expressed = " ".join(rule["expr"] for rule in alerts(RULES))
    names = {alert["alert"] for alert in ALERTS}
    for kind in EventKind:
        if kind in ALERTS_ON_METRICS:
            assert ALERTS_ON_METRICS[kind] in names | {None}
        else:
            assert f'kind="{kind}"' in expressed


def test_edges_of_vllm_are_those_of_its_exposition() -> None:
    page = (ROOT / "tests/sources/engines/pages/vllm-0.32.0-dp2.txt").read_text(encoding="utf-8")
    for name, edges in (
        ("vllm:time_to_first_token_seconds", TTFT_EDGES_S),
        ("vllm:request_time_per_output_token_seconds", TPOT_EDGES_S),
        ("vllm:e2e_request_latency_seconds", DURATION_EDGES_S),
    ):
        bounds = re.findall(rf'^{name}_bucket{{[^}}]*le="([\d.]+)"', page, re.MULTILINE)
        assert sorted({float(bound) for bound in bounds}) == list(edges)


IN_KUBERNETES = render_alerts(Settings().all_objectives(), links=PLACEHOLDERS)
DASHBOARDS = render_dashboards(Settings().all_objectives())
KUBERNETES = render_kubernetes(IN_KUBERNETES, DASHBOARDS)


def test_committed_files_of_kubernetes_are_those_rendered_from_the_settings() -> None:
    in_chart = {path for path in (ROOT / CHART_FILES).rglob("*") if path.is_file()}
    assert {ROOT / path for path in KUBERNETES} == {ROOT / PROMETHEUS_RULE, *in_chart}
    changed = [
        path for path, text in KUBERNETES.items() if (ROOT / path).read_text("utf-8") != text
    ]
    assert changed == [], "run goodput-agent render and commit deploy/"


def test_both_files_of_rules_contain_the_agents_once_and_none_for_vllm_alone() -> None:
    rules = yaml.safe_load(IN_KUBERNETES[RULES])
    assert yaml.safe_load(KUBERNETES[PROMETHEUS_RULE])["spec"] == rules
    assert yaml.safe_load(KUBERNETES[CHART_RULES]) == rules
