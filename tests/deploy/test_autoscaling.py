"""The files for autoscalers, without a cluster: their schemas, and their queries in Prometheus."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.catalog import metrics as m
from tests.deploy.kit import ROOT, check
from tests.render.alerts.promtool import complaints

FOLDER = ROOT / "deploy" / "kubernetes"


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / "autoscaling" / name).read_text(encoding="utf-8"))


KEDA, HPA, ADAPTER = map(read, ("keda.yaml", "hpa.yaml", "prometheus-adapter.yaml"))
(TRIGGER,) = KEDA["spec"]["triggers"]
(RULE,) = ADAPTER["rules"]["external"]
METRIC = HPA["spec"]["metrics"][0]["external"]


@pytest.mark.parametrize("found", [KEDA, HPA], ids=["keda", "hpa"])
def test_the_autoscaler_is_accepted_and_scales_the_deployment_of_the_folder(
    found: dict[str, Any],
) -> None:
    check(found)
    deployment = yaml.safe_load((FOLDER / "deployment.yaml").read_text(encoding="utf-8"))
    assert found["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_an_unknown_key_of_a_scaled_object_is_refused() -> None:
    with pytest.raises(Exception, match="minReplicas"):
        check({**KEDA, "spec": {**KEDA["spec"], "minReplicas": 1}})


def test_both_autoscalers_keep_the_same_reserve_and_behave_alike() -> None:
    advanced = KEDA["spec"]["advanced"]["horizontalPodAutoscalerConfig"]
    assert advanced["behavior"] == HPA["spec"]["behavior"]
    # 800 thousandths.
    assert METRIC["target"] == {"type": "AverageValue", "averageValue": "800m"}
    assert (TRIGGER["metricType"], float(TRIGGER["metadata"]["threshold"])) == ("AverageValue", 0.8)


def query_of_the_adapter() -> str:
    """The rule's query, filled in as the adapter does for the HorizontalPodAutoscaler."""
    name = m.SLO_REPLICAS_NEEDED.name
    assert RULE["seriesQuery"].partition("{")[0] == RULE["name"]["as"] == name
    assert METRIC["metric"]["name"] == name
    labels = {**METRIC["metric"]["selector"]["matchLabels"], "namespace": "default"}
    matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
    query: str = RULE["metricsQuery"]
    return query.replace("<<.Series>>", name).replace("<<.LabelMatchers>>", matchers)


@pytest.mark.parametrize("query", [TRIGGER["metadata"]["query"], query_of_the_adapter()])
def test_the_sum_over_the_replicas_is_what_prometheus_returns(query: str, tmp_path: Path) -> None:
    series = [
        ("chat", "chat-0", "a", "agent-0", 0.9),
        # A second agent that watches the same engine adds nothing.
        ("chat", "chat-0", "a", "agent-1", 0.7),
        ("chat", "chat-0", "b", "agent-0", 1.2),
        # Another objective is another question.
        ("batch", "chat-0", "a", "agent-0", 5.0),
    ]
    given = [
        {
            "series": f"llm_slo_replicas_needed"
            f'{{objective="{objective}",engine="{engine}",model="m",namespace="default",'
            f'pod="{pod}",agent="{agent}"}}',
            "values": f"{value}x2",
        }
        for objective, engine, pod, agent, value in series
    ]
    expected = [{"labels": "{}", "value": 2.1}]
    test = {
        "interval": "1m",
        "input_series": given,
        "promql_expr_test": [{"expr": query, "eval_time": "1m", "exp_samples": expected}],
    }
    assert complaints(tmp_path, "groups: []", [test]) == ""


def test_the_labels_of_the_queries_are_labels_of_the_metric_or_of_kubernetes() -> None:
    assert {"objective", "engine", "model"} <= {*m.SLO_REPLICAS_NEEDED.labels}
    for query in (TRIGGER["metadata"]["query"], RULE["metricsQuery"]):
        assert "by (engine, model, pod)" in query
