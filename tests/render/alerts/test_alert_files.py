"""The rendered rules as a whole: committed files, and the names in them."""

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from math import inf
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.catalog.engines.vllm import DURATION_EDGES_S, TPOT_EDGES_S, TTFT_EDGES_S
from agent.outputs.web.documents import known_labels
from agent.records.event import EventKind
from agent.render.alerts import PLACEHOLDERS, ChartOptions, Timings, render_alerts
from agent.render.alerts.alert_files import (
    CHART_FILES,
    CHART_RULES,
    CHART_THRESHOLDS,
    PROMETHEUS_RULE,
    RULES,
    VLLM_ALONE,
    render_kubernetes,
)
from agent.render.alerts.thresholds import THRESHOLDS
from agent.render.dashboards import render_dashboards
from agent.render.reference_pages import all_settings
from agent.settings.settings_model import ObjectiveSettings, Settings
from tests.render.alerts.cases import OBJECTIVES, TEXTS, rule_groups, selectors, selects, series_of
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
    # A restart that nobody asked for has RESTART, too.
    EventKind.STARTED: None,
    # An operator asked for it.
    EventKind.SLEEP: None,
}
ROOT = Path(__file__).parents[3]
PAGES = ROOT / "tests" / "sources" / "engines" / "pages"
RUNBOOKS = ROOT / "docs" / "runbooks"


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
    assert "LlmWatchdog" in shared
    assert len(set(made)) == len(made)


# Names and labels


# Prometheus' own, and what the rules record.
_OTHERS = re.compile(
    r"up|ALERTS|objective:llm_slo_allowed:ratio|objective_model:llm_slo_missed:(ratio_rate|increase)\w+"
)


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


# What an inhibition cannot do, by alert.
READ_ALERTS = {
    **dict.fromkeys(
        ("LlmMissesExplained", "LlmObjectivePagedLately"),
        "the share of an objective's misses on engines with pages",
    ),
    **dict.fromkeys(
        (
            *("LlmEngineDied", "LlmEngineHanging", "LlmCudaOutOfMemory", "LlmHostOutOfMemory"),
            *("LlmEngineGpuFault", "LlmEngineSizingError", "GpuXidCritical"),
            *("LlmEngineDown", "LlmEngineNeverUp"),
        ),
        "it goes on until the engine or the GPU is back",
    ),
    **dict.fromkeys(
        ("LlmEngineRestarted", "VllmRestarted"), "the page has ended when its restart is counted"
    ),
}


def test_only_what_an_inhibition_cannot_do_reads_alerts() -> None:
    reading = {alert["alert"] for alert in ALERTS if "ALERTS{" in alert["expr"]}
    assert reading == READ_ALERTS.keys()


@cache
def exposed(page: str) -> list[Sample]:
    text = (PAGES / page).read_text(encoding="utf-8")
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def relabelled_as_the_runbook_says(samples: list[Sample]) -> list[Sample]:
    text = (RUNBOOKS / "VllmMissing.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^ +```yaml\n(.*?)```", text, re.MULTILINE | re.DOTALL)
    (relabel,) = yaml.safe_load(textwrap.dedent(block))["metric_relabel_configs"]
    assert (relabel["source_labels"], relabel["target_label"]) == (["__name__"], "__name__")
    name = relabel["replacement"].replace("$1", r"\1")
    return [
        sample._replace(name=re.sub(rf"^(?:{relabel['regex']})$", name, sample.name))
        for sample in samples
    ]


def test_each_selector_finds_its_series_in_an_exposition_of_the_real_vllm() -> None:
    promised = ObjectiveSettings(name="chat", ttft_ms=200, tpot_ms=120, e2e_ms=10_000).objective()
    rules = yaml.safe_load(render_alerts([promised])[VLLM_ALONE])
    asked = {series for expression in expressions_of(rules) for series in series_of(expression)}
    page = exposed("vllm-0.32.0.txt")
    found = {
        series for series in asked if any(selects(series, each.name, each.labels) for each in page)
    }
    missing = {series for series in asked - found if not series.startswith(("ALERTS{", "up"))}
    # What releases before 0.11 call it.
    assert missing == {'vllm:gpu_cache_usage_perc{engine!=""}'}
    assert len(found) > 10


@pytest.mark.parametrize("series", ["num_requests_running", "iteration_tokens_total_count"])
def test_an_exposition_of_ray_is_read_with_the_relabelling_of_the_runbook(series: str) -> None:
    """Its series get vLLM's own names; without that the rules see no engine at all."""
    page = exposed("vllm-0.32.0-ray.txt")
    selector = f'vllm:{series}{{engine!=""}}'
    assert not any(selects(selector, each.name, each.labels) for each in page)
    renamed = relabelled_as_the_runbook_says(page)
    assert any(selects(selector, each.name, each.labels) for each in renamed)


def test_a_trial_has_no_windows_of_days() -> None:
    fast = Timings(speed=60, scrape_interval_s=1, evaluation_interval_s=1)
    windows = set(re.findall(r"\[(\w+)\]", render_alerts(OBJECTIVES, fast)[RULES]))
    assert {"5s", "1m"} <= windows
    assert not {window for window in windows if window.endswith(("d", "h")) and window != "1h"}


# Texts


def test_an_alert_has_a_severity_and_links_and_its_summary_has_no_value() -> None:
    for alert in ALERTS:
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}
        annotations = alert["annotations"]
        assert "$value" not in annotations["summary"]
        runbook, _, labels = annotations["runbook_url"].partition("?")
        assert runbook.endswith(f"/runbooks/{alert['alert']}.md")
        assert known_labels(dict(parse_qsl(labels))).keys() == dict(parse_qsl(labels)).keys()
        ours = not alert["alert"].startswith(("Vllm", "LlmWatchdog"))
        assert ("dashboard_url" in annotations) == ours


def test_each_alert_has_a_runbook_that_is_in_the_index() -> None:
    severities: dict[str, set[str]] = {}
    for alert in ALERTS:
        severities.setdefault(alert["alert"], set()).add(alert["labels"]["severity"])
    assert {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"} == severities.keys()
    index = (RUNBOOKS / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+)\]\(\1\.md\) \| ([\w ]+) \|$", index, re.MULTILINE)
    assert {name: set(text.split(" or ")) for name, text in listed} == severities
    for name in severities:
        page = (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
        assert headings == [name, "What it means", "How to confirm", "What to do first"]


# Nothing can be set: the hardware is at fault, or what must change is a file of Prometheus.
WITHOUT_SETTING = {
    *("GpuEccUncorrected", "GpuLost", "GpuNvlinkErrors", "GpuRecoveryWanted", "GpuRowRemapFailed"),
    *("GpuRowRemapPending", "GpuXidCritical", "GpuXidWarning", "LlmEngineGpuFault"),
    *("LlmObjectivePagedLately", "LlmObjectiveTargetMissing", "VllmRestarted"),
}
_SET = re.compile(r"`(?:[^`]* )?(--[a-z][\w-]*)[^`]*`|`([a-z_]+(?:(?:\[\])?\.[a-z_.]+)?)`")


def test_every_runbook_names_what_to_set() -> None:
    settings = {setting.path.replace("[0]", "[]") for setting in all_settings()}
    nothing = set()
    for path in RUNBOOKS.glob("*.md"):
        _, _, steps = path.read_text(encoding="utf-8").partition("## What to do first")
        found = _SET.findall(steps)
        named = {name for _, name in found if name in settings or name in THRESHOLDS}
        if not named and not any(flag for flag, _ in found):
            nothing.add(path.stem)
    assert nothing - {"README"} == WITHOUT_SETTING


def test_alerts_on_objectives_open_the_dashboard_of_objectives_on_theirs() -> None:
    on_objectives = {
        rule["alert"]: rule["annotations"]["dashboard_url"]
        for rule in alerts(RULES)
        if "objective=" in rule["annotations"]["runbook_url"]
    }
    assert len(on_objectives) > 10
    for name, url in on_objectives.items():
        uid = "goodput-capacity" if name == "LlmTooFewReplicas" else "goodput-objectives"
        assert f"/d/{uid}?" in url, name
        assert "&var-objective=" in url, name


def test_runbooks_name_series_that_exist() -> None:
    of_vllm = {each.name for each in exposed("vllm-0.32.0.txt")}
    known = SERIES.keys() | of_vllm | {"vllm:gpu_cache_usage_perc"}
    for path in sorted(RUNBOOKS.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        text = re.sub("llm_slo_(missed|allowed):", "", text)
        for name in re.findall(r"\bvllm:\w+|\b(?:llm_|gpu_|gen_ai_)\w+", text):
            # In back quotes it may also be a reason.
            assert name in known or f"`{name}`" in text, f"{path.name}: {name}"


def test_every_kind_of_event_has_an_alert() -> None:
    expressed = " ".join(rule["expr"] for rule in alerts(RULES))
    left = {kind for kind in EventKind if f'kind="{kind}"' not in expressed}
    assert left == ALERTS_ON_METRICS.keys()
    names = {alert["alert"] for alert in ALERTS}
    assert set(ALERTS_ON_METRICS.values()) <= names | {None}


def test_edges_of_vllm_are_those_of_its_exposition() -> None:
    for name, edges in (
        ("vllm:time_to_first_token_seconds", TTFT_EDGES_S),
        ("vllm:request_time_per_output_token_seconds", TPOT_EDGES_S),
        ("vllm:e2e_request_latency_seconds", DURATION_EDGES_S),
    ):
        bounds = {
            float(each.labels["le"])
            for each in exposed("vllm-0.32.0-dp2.txt")
            if each.name == f"{name}_bucket"
        }
        assert sorted(bounds - {inf}) == list(edges)


IN_KUBERNETES = render_alerts(Settings().all_objectives(), links=PLACEHOLDERS)
DASHBOARDS = render_dashboards(Settings().all_objectives())
IN_CHART = render_alerts(Settings().all_objectives(), links=PLACEHOLDERS, options=ChartOptions())
KUBERNETES = render_kubernetes(IN_KUBERNETES, IN_CHART, DASHBOARDS)


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
    text = KUBERNETES[CHART_RULES].replace("{${matchers}}", "").replace("${matchers}", "")
    text = text.replace("${filters}", "")
    for name, default in yaml.safe_load(KUBERNETES[CHART_THRESHOLDS]).items():
        text = text.replace(f"${{{name}}}", str(default))
    assert yaml.safe_load(text) == rules
