"""Objectives as documents of OpenSLO, Sloth and Pyrra, and back."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from agent.cli import main
from agent.errors import SettingsInvalid
from agent.settings import load

SETTINGS = """
objectives:
  - {name: chat, preset: chat, match: {model: "llama*", tenant: "123"}, window: 28d}
  - name: Docs_v1.0
    match: {min_input_tokens: 100, route: /v1/chat, model: llama-2.0}
    ttft_ms: 512.5
    e2e_ms: 10000
    max_error_ratio: 0.01
    target: 0.999
    window: 36h
    compat: vllm
    count_invalid: true
    session: {turn_ttft_ms: 300}
"""
CALENDAR = {"duration": "1M", "calendar": {"timeZone": "UTC"}}


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(main, ["objectives", *map(str, arguments)])
    if isinstance(result.exception, SettingsInvalid):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "agent.yml"
    path.write_text(SETTINGS, encoding="utf-8")
    return path


def exported(settings: Path, kind: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(run("export", "--config", settings, "--format", kind)))


def test_objectives_come_back_from_openslo_as_they_were(settings: Path, tmp_path: Path) -> None:
    slos = tmp_path / "slos.yml"
    slos.write_text(run("export", "--config", settings), encoding="utf-8")
    back = tmp_path / "back.yml"
    back.write_text(run("import", slos), encoding="utf-8")
    assert load(back, {}).all_objectives() == load(settings, {}).all_objectives()
    # Also through a tool that sorts keys and drops what is inline.
    document = list(yaml.safe_load_all(slos.read_text(encoding="utf-8")))
    slos.write_text(yaml.safe_dump_all(document[::-1]), encoding="utf-8")
    back.write_text(run("import", slos), encoding="utf-8")
    assert load(back, {}).all_objectives()[::-1] == load(settings, {}).all_objectives()


def test_json_holds_the_same(settings: Path, tmp_path: Path) -> None:
    documents = json.loads(run("export", "--config", settings, "--json"))["documents"]
    assert documents == exported(settings, "openslo")
    slos = tmp_path / "slos.yml"
    slos.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    found = json.loads(run("import", slos, "--json"))
    assert found["objectives"] == yaml.safe_load(run("import", slos))["objectives"]


def test_an_slo_has_what_the_specification_asks_for(settings: Path) -> None:
    service, chat, docs = exported(settings, "openslo")
    assert (service["kind"], chat["kind"]) == ("Service", "SLO")
    for document in (service, chat, docs):
        assert document["apiVersion"] == "openslo/v1"
        assert re.fullmatch("[a-z0-9][a-z0-9-]{0,61}[a-z0-9]", document["metadata"]["name"])
        assert len(document["spec"]["description"]) <= 1050
    assert docs["metadata"]["name"] == "docs-v1-0"
    annotations = docs["metadata"]["annotations"]
    assert all(isinstance(value, str) for value in annotations.values())
    assert all(re.fullmatch(r"objective\.goodput-agent/[a-z][\w.]*\w", key) for key in annotations)
    assert docs["spec"]["service"] == service["metadata"]["name"]
    assert docs["spec"]["timeWindow"] == [{"duration": "36h", "isRolling": True}]
    assert docs["spec"]["budgetingMethod"] == "Occurrences"
    assert docs["spec"]["objectives"] == [{"displayName": "Docs_v1.0", "target": 0.999}]
    ratio = docs["spec"]["indicator"]["spec"]["ratioMetric"]
    assert ratio["counter"] is True
    assert ratio["good"]["metricSource"]["spec"]["query"] == (
        'sum(llm_slo_requests_total{objective="Docs_v1.0",verdict="met"})'
    )


def test_sloth_and_pyrra_get_the_judged_requests_and_the_target_in_percent(tmp_path: Path) -> None:
    settings = tmp_path / "agent.yml"
    settings.write_text("objectives: [{name: chat, ttft_ms: 200, target: 0.999}]", encoding="utf-8")
    (file,) = exported(settings, "sloth")
    (slo,) = file["slos"]
    assert (file["version"], file["service"], slo["objective"]) == ("prometheus/v1", "llm", 99.9)
    assert slo["sli"]["events"] == {
        "error_query": 'sum(rate(llm_slo_requests_total{objective="chat",verdict="missed"}'
        "[{{.window}}]))",
        "total_query": 'sum(rate(llm_slo_requests_total{objective="chat",verdict=~"met|missed"}'
        "[{{.window}}]))",
    }
    (found,) = exported(settings, "pyrra")
    assert (found["apiVersion"], found["kind"]) == ("pyrra.dev/v1alpha1", "ServiceLevelObjective")
    assert (found["spec"]["target"], found["spec"]["window"]) == ("99.9", "30d")
    errors = found["spec"]["indicator"]["ratio"]["errors"]["metric"]
    assert errors == 'llm_slo_requests_total{objective="chat",verdict="missed"}'


def test_no_digit_of_a_target_or_a_limit_is_lost(tmp_path: Path) -> None:
    settings = tmp_path / "agent.yml"
    objective = "{name: batch, e2e_ms: 1234567, target: 0.9999995}"
    settings.write_text(f"objectives: [{objective}]", encoding="utf-8")
    (found,) = exported(settings, "pyrra")
    assert found["spec"]["target"] == "99.99995"
    assert "end-to-end time within 1234567 ms" in found["spec"]["description"]


@pytest.mark.parametrize(
    ("objectives", "kind", "sentence"),
    [
        ("[]", "openslo", "the settings have no objectives; nobody promised the preset's"),
        ("[{name: a, ttft_ms: 1, window: 90s}]", "openslo", "OpenSLO has no unit below a minute"),
        (
            "[{name: A.b, ttft_ms: 1}, {name: a_b, ttft_ms: 1}]",
            "pyrra",
            "objectives 'A.b' and 'a_b' would both be called 'a-b'",
        ),
        (
            "[{name: a, ttft_ms: 1}, {name: b, ttft_ms: 1, window: 7d}]",
            "sloth",
            "objectives have the windows 30d, 7d; Sloth has one for all",
        ),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    objectives: str, kind: str, sentence: str, tmp_path: Path
) -> None:
    settings = tmp_path / "agent.yml"
    settings.write_text(f"objectives: {objectives}", encoding="utf-8")
    with pytest.raises(SettingsInvalid, match=re.escape(sentence)):
        exported(settings, kind)


def slo(**changes: Any) -> dict[str, Any]:
    """An SLO of another author: 99.5 % of the first tokens within half a second."""
    source = {"type": "Prometheus", "spec": {"query": "vllm:time_to_first_token_seconds_bucket"}}
    spec = {
        "service": "llm",
        "indicator": {"spec": {"thresholdMetric": {"metricSource": source}}},
        "timeWindow": [{"duration": "4w", "isRolling": True}],
        "budgetingMethod": "Occurrences",
        "objectives": [{"op": "lte", "value": 0.5, "targetPercent": 99.5}],
    }
    return {
        "apiVersion": "openslo/v1",
        "kind": "SLO",
        "metadata": {"name": "first-token"},
        "spec": {**spec, **changes},
    }


def imported(folder: Path, *documents: Any) -> str:
    path = folder / "slos.yml"
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return run("import", path)


def test_a_limit_is_read_from_a_threshold_on_a_latency(tmp_path: Path) -> None:
    expected = {"name": "first-token", "ttft_ms": 500.0, "target": 0.995, "window": "28d"}
    assert yaml.safe_load(imported(tmp_path, slo())) == {"objectives": [expected]}
    sli = {
        "apiVersion": "openslo/v1",
        "kind": "SLI",
        "metadata": {"name": "ttft"},
        "spec": slo()["spec"]["indicator"]["spec"],
    }
    policy = {**sli, "kind": "AlertPolicy", "metadata": {"name": "page"}, "spec": {}}
    by_name = slo(indicator=None, indicatorRef="ttft")
    text = imported(tmp_path, policy, by_name, sli)
    assert yaml.safe_load(text) == {"objectives": [expected]}
    assert text.startswith("# AlertPolicy 'page' is left out: `goodput-agent render` makes alerts")


_RATIO = {"spec": {"ratioMetric": {"counter": True}}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budgetingMethod": "Timeslices"}, "budgetingMethod is 'Timeslices', and the agent"),
        ({"timeWindow": [CALENDAR]}, "timeWindow is not one rolling window"),
        ({"timeWindow": [{"duration": "1Q", "isRolling": True}]}, "none of the units m, h, d"),
        ({"objectives": [{"target": 0.9}, {"target": 0.99}]}, "several objectives or a composite"),
        ({"objectives": [{"op": "lte", "value": 1}]}, "needs either target or targetPercent"),
        ({"objectives": [{"op": "lte", "value": 1, "target": 0}]}, "target: Input should be"),
        ({"objectives": [{"op": "gte", "value": 1, "target": 0.9}]}, "no limit on a request can"),
        ({"indicator": _RATIO}, "add an annotation such as objective.goodput-agent/ttft_ms"),
        ({"objectives": ["99 %"]}, "it is not built as an SLO of openslo/v1"),
        ({"timeWindow": "30d"}, "timeWindow is not one rolling window"),
    ],
)
def test_what_the_agent_cannot_say_is_refused_by_a_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsInvalid, match=re.escape(sentence)) as refused:
        imported(tmp_path, slo(), slo(**changes))
    assert "SLO 'first-token': " in str(refused.value)


def test_other_documents_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="apiVersion is 'openslo/v1alpha', not openslo/v1"):
        imported(tmp_path, {**slo(), "apiVersion": "openslo/v1alpha"})
    with pytest.raises(SettingsInvalid, match="Pod 'first-token': it is no kind of OpenSLO"):
        imported(tmp_path, {**slo(), "kind": "Pod"})
    with pytest.raises(SettingsInvalid, match="there is no SLO of openslo/v1"):
        imported(tmp_path)
    with pytest.raises(SettingsInvalid, match="a document is not a mapping"):
        imported(tmp_path, ["x"])
    (tmp_path / "broken.yml").write_text("a: [", encoding="utf-8")
    with pytest.raises(SettingsInvalid, match="the file is no YAML"):
        run("import", tmp_path / "broken.yml")
    with pytest.raises(SettingsInvalid, match="cannot be read"):
        run("import", tmp_path / "missing.yml")


def test_an_annotation_that_no_objective_has_is_refused(tmp_path: Path) -> None:
    document = slo()
    document["metadata"]["annotations"] = {"objective.goodput-agent/ttft": "200"}
    with pytest.raises(SettingsInvalid, match=r"SLO 'first-token': .*ttft"):
        imported(tmp_path, document)
