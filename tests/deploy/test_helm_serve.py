"""The chart's Deployment of `goodput-agent serve`, rendered by the real Helm."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent
from agent.settings import load
from tests.deploy.charts import CHART, VALUES, agent_container, objects, only, pod
from tests.real_parts.helm import documents, rendered
from tests.real_parts.processes import PartFailed

URL = "postgresql://reader:secret@db/goodput"


def named_serve(kind: str) -> dict[str, Any]:
    """The object of a kind that `serve` has."""
    (found,) = (
        o
        for o in objects("serve")
        if o["kind"] == kind and o["metadata"]["name"].endswith("-serve")
    )
    return found


def container() -> dict[str, Any]:
    """The container of `serve`."""
    (found,) = pod("serve")["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_by_default_there_is_none() -> None:
    assert "-serve" not in rendered(CHART)


def test_it_serves_the_database_of_a_role_that_only_reads(tmp_path: Path) -> None:
    assert container()["args"] == ["serve", "--config", "/etc/goodput-agent/settings.yml"]
    (variable,) = container()["env"]
    source = variable["valueFrom"]["secretKeyRef"]
    assert source == {"name": "readers-database", "key": "uri"}
    path = tmp_path / "settings.yml"
    path.write_text(named_serve("ConfigMap")["data"]["settings.yml"], encoding="utf-8")
    settings = load(path, {variable["name"]: URL})
    assert settings.storage.url == URL
    # Of the agents, and of its own values.
    storage = settings.storage
    assert (storage.keep_requests, storage.keep_rollups) == (3 * 86400, 90 * 86400)
    assert storage.query_timeout == 20
    (port,) = container()["ports"]
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", port["containerPort"])
    mounts = {each["name"]: each["mountPath"] for each in container()["volumeMounts"]}
    assert settings.security.read_tokens == Path(mounts["tokens"]) / "read"
    assert path.name in container()["args"][-1]
    assert mounts["settings"] == str(Path(container()["args"][-1]).parent)


def test_without_a_secret_for_its_database_it_is_refused() -> None:
    with pytest.raises(PartFailed, match=r"serve\.database\.existingSecret: set the name"):
        rendered(CHART, "--set", "serve.enabled=true")


def test_its_address_cannot_be_set() -> None:
    with pytest.raises(PartFailed, match=r"serve\.settings: listen follows"):
        rendered(CHART, "--values", VALUES["serve"], "--set", "serve.settings.listen.port=1")


def test_it_has_no_more_rights_than_an_agent_and_no_tokens_for_spans() -> None:
    assert container()["securityContext"] == agent_container("vllm")["securityContext"]
    assert container()["image"] == f"goodput-agent:{agent.__version__}"
    spec = pod("serve")["spec"]
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes.keys() == {each["name"] for each in container()["volumeMounts"]}
    assert volumes["tokens"]["secret"]["items"] == [{"key": "read", "path": "read"}]
    assert "ingest" not in json.dumps(spec)


def test_it_is_ready_by_what_it_says_of_the_database() -> None:
    assert container()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "page"}
    assert container()["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "page"}


def test_its_service_and_its_policy_select_its_pods_and_nobody_elses_do() -> None:
    labels = pod("serve")["metadata"]["labels"]
    assert named_serve("Deployment")["spec"]["selector"]["matchLabels"] == labels
    service = named_serve("Service")["spec"]
    assert service["selector"] == labels
    assert [port["targetPort"] for port in service["ports"]] == ["page"]
    policy = named_serve("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    (reading,) = policy["ingress"]
    monitors = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["networkPolicy"]
    assert reading == {"ports": [{"port": "page"}], "from": monitors["monitors"]}
    for name in ("serve", "vllm", "node"):
        for found in objects(name):
            if not found["metadata"]["name"].endswith("-serve"):
                assert not selects(found, labels), found["metadata"]["name"]
    both = documents(rendered(CHART, "--values", VALUES["serve"], "--set", "mode=node"))
    assert {found["kind"] for found in both} >= {"DaemonSet", "Deployment"}


def selects(found: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether an object's selector matches pods with these labels."""
    spec = found.get("spec", {})
    chosen = spec.get("podSelector", spec.get("selector", {}))
    chosen = chosen.get("matchLabels", chosen)
    return bool(chosen) and chosen.items() <= labels.items()


def test_changed_settings_make_new_pods() -> None:
    changed = rendered(
        CHART, "--values", VALUES["serve"], "--set", "serve.settings.storage.query_timeout=5s"
    )
    (deployment,) = (found for found in documents(changed) if found["kind"] == "Deployment")
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations != pod("serve")["metadata"]["annotations"]


def test_only_one_object_of_serve_holds_a_url() -> None:
    assert "postgresql://" not in json.dumps(list(objects("serve")))
    assert only("serve", "Deployment")["metadata"]["name"].endswith("-serve")
