"""`goodput-agent serve` in the Helm chart, rendered by the real Helm."""

import json
from pathlib import Path
from typing import Any

import yaml

import agent
from agent.settings import load
from tests.deploy.kit import CHART, VALUES, agent_container, objects, pod
from tests.real_parts.helm import documents, rendered

READER_URL = "postgresql://reader:secret@db/goodput"


def named_serve(kind: str) -> dict[str, Any]:
    """The object of a kind that `serve` has."""
    (found,) = (
        o
        for o in objects("serve")
        if o["kind"] == kind and o["metadata"]["name"].endswith("-serve")
    )
    return found


def serve_container() -> dict[str, Any]:
    """The container of `serve`."""
    (found,) = pod("serve")["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def test_serve_reads_the_database_of_a_role_that_only_reads(tmp_path: Path) -> None:
    assert serve_container()["args"] == ["serve", "--config", "/etc/goodput-agent/settings.yml"]
    variable, _ = serve_container()["env"]
    source = variable["valueFrom"]["secretKeyRef"]
    assert source == {"name": "readers-database", "key": "uri"}
    path = tmp_path / "settings.yml"
    path.write_text(named_serve("ConfigMap")["data"]["settings.yml"], encoding="utf-8")
    settings = load(path, {variable["name"]: READER_URL})
    assert settings.storage.publish_to == READER_URL
    # Of the agents, and of its own values.
    storage = settings.storage
    assert (storage.keep_requests, storage.keep_rollups) == (3 * 86400, 90 * 86400)
    assert storage.query_timeout == 20
    (port,) = serve_container()["ports"]
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", port["containerPort"])
    mounts = {each["name"]: each["mountPath"] for each in serve_container()["volumeMounts"]}
    assert settings.security.read_tokens == Path(mounts["tokens"]) / "read"
    assert path.name in serve_container()["args"][-1]
    assert mounts["settings"] == str(Path(serve_container()["args"][-1]).parent)


def test_serve_has_no_more_rights_than_an_agent_and_no_tokens_for_spans() -> None:
    assert serve_container()["securityContext"] == agent_container("vllm")["securityContext"]
    assert serve_container()["image"] == f"goodput-agent:{agent.__version__}"
    assert serve_container()["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "page"}
    spec = pod("serve")["spec"]
    assert spec["automountServiceAccountToken"] is False
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes.keys() == {each["name"] for each in serve_container()["volumeMounts"]}
    assert not {"serviceAccountName", "priorityClassName"} & spec.keys()
    assert volumes["tokens"]["secret"]["items"] == [{"key": "read", "path": "read"}]
    assert "ingest" not in json.dumps(spec)
    assert "postgresql://" not in json.dumps(list(objects("serve")))


def test_the_service_and_policy_of_serve_select_its_pods_and_nobody_elses_do() -> None:
    labels = pod("serve")["metadata"]["labels"]
    assert named_serve("Deployment")["spec"]["selector"]["matchLabels"] == labels
    service = named_serve("Service")["spec"]
    assert service["selector"] == labels
    assert [port["targetPort"] for port in service["ports"]] == ["page"]
    policy = named_serve("NetworkPolicy")["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    (reading,) = policy["ingress"]
    monitors = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))["networkPolicy"]
    (clients,) = yaml.safe_load(VALUES["serve"].read_text("utf-8"))["serve"]["clients"]
    assert reading == {"ports": [{"port": "page"}], "from": [*monitors["monitors"], clients]}
    for name in ("serve", "vllm", "node"):
        for found in objects(name):
            if not found["metadata"]["name"].endswith("-serve"):
                assert not selects(found, labels), found["metadata"]["name"]
    both = documents(rendered(CHART, "--values", VALUES["serve"], "--set", "mode=node"))
    assert {found["kind"] for found in both} >= {"DaemonSet", "Deployment"}


def test_an_ingress_and_a_route_lead_to_the_page() -> None:
    values = yaml.safe_load(VALUES["serve"].read_text("utf-8"))["serve"]
    service = named_serve("Service")
    (port,) = service["spec"]["ports"]
    ingress = named_serve("Ingress")["spec"]
    assert (ingress["ingressClassName"], ingress["tls"]) == ("nginx", values["ingress"]["tls"])
    (rule,) = ingress["rules"]
    assert rule["host"] == "goodput.example.org"
    (path,) = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/", "Prefix")
    name = service["metadata"]["name"]
    assert path["backend"]["service"] == {"name": name, "port": {"name": port["name"]}}
    route = named_serve("HTTPRoute")["spec"]
    for key in ("parentRefs", "hostnames"):
        assert route[key] == values["httpRoute"][key]
    assert route["rules"] == [{"backendRefs": [{"name": name, "port": port["port"]}]}]


def selects(found: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether an object's selector matches pods with these labels."""
    spec = found.get("spec", {})
    chosen = spec.get("podSelector", spec.get("selector", {}))
    chosen = chosen.get("matchLabels", chosen)
    return bool(chosen) and chosen.items() <= labels.items()
