"""The files for Kubernetes, without a cluster."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent
from agent.settings import load
from tests.deploy.composed import PINNED, complaints
from tests.deploy.dockerfile import ROOT, only, stages

FOLDER = ROOT / "deploy" / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))
# Kinds that the Prometheus Operator defines.
CUSTOM = {"podmonitor.yaml": "podmonitor.json", "prometheusrule.yaml": "prometheusrule.json"}
OWN = sorted(set(KUSTOMIZATION["resources"]) - CUSTOM.keys())


def documents() -> list[dict[str, Any]]:
    return [
        document
        for name in KUSTOMIZATION["resources"]
        for document in yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8"))
    ]


def document(kind: str) -> dict[str, Any]:
    (found,) = (found for found in documents() if found["kind"] == kind)
    return found


POD = document("Deployment")["spec"]["template"]
CONTAINERS = {container["name"]: container for container in POD["spec"]["containers"]}
each_container = pytest.mark.parametrize("name", CONTAINERS)


# Schemas


@pytest.mark.parametrize("name", OWN)
def test_kubernetes_accepts_a_file(name: str) -> None:
    assert complaints("kubernetes-validate", "--strict", FOLDER / name) == ""


@pytest.mark.parametrize("name", CUSTOM)
def test_the_prometheus_operator_accepts_a_file(name: str) -> None:
    schema = SCHEMAS / CUSTOM[name]
    assert complaints("check-jsonschema", "--schemafile", schema, FOLDER / name) == ""


def test_the_checkers_report_a_wrong_key(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    text = (FOLDER / "deployment.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("shareProcessNamespace", "shareProcesses"), encoding="utf-8")
    assert "shareProcesses" in complaints("kubernetes-validate", "--strict", wrong)
    text = (FOLDER / "podmonitor.yaml").read_text(encoding="utf-8")
    wrong.write_text(text.replace("port: agent", "ports: agent"), encoding="utf-8")
    schema = SCHEMAS / "podmonitor.json"
    assert "'ports' was unexpected" in complaints("check-jsonschema", "--schemafile", schema, wrong)


# The kustomization


def kustomization_complaints(path: Path) -> str:
    schema = SCHEMAS / "kustomization.json"
    return complaints("check-jsonschema", "--schemafile", schema, path)


def test_kustomize_accepts_the_kustomization() -> None:
    assert kustomization_complaints(FOLDER / "kustomization.yaml") == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("resources:", "resource:"),
        ("newTag: 0.1.0", "tag: 0.1.0"),
        ("newTag: 0.1.0", "newTag: 0.1"),
        ("  - service.yaml", "  - volumes.yaml"),
        ('grafana_dashboard: "1"', "grafana_dashboard: 1"),
        ("configMapGenerator:", "configMapGenerators:"),
    ],
)
def test_the_schema_refuses_what_kustomize_refuses(tmp_path: Path, right: str, wrong: str) -> None:
    text = (FOLDER / "kustomization.yaml").read_text(encoding="utf-8")
    assert right in text
    path = tmp_path / "kustomization.yaml"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    assert kustomization_complaints(path)


def test_the_kustomization_names_every_file_beside_it() -> None:
    _, settings = settings_file()
    made = [entry["files"] for entry in KUSTOMIZATION["configMapGenerator"]]
    named = [*KUSTOMIZATION["resources"], *(file.rpartition("=")[2] for of in made for file in of)]
    assert [name for name in named if not (FOLDER / name).is_file()] == []
    used = {*KUSTOMIZATION["resources"], settings.name, "kustomization.yaml"}
    assert {path.name for path in FOLDER.iterdir()} == used


def test_no_two_resources_have_the_same_kind_and_name() -> None:
    """Kustomize refuses such resources."""
    named = [
        (found["apiVersion"], found["kind"], found["metadata"]["name"]) for found in documents()
    ]
    assert len(named) == len(set(named))


def test_the_kustomization_sets_the_tag_of_images_in_use() -> None:
    run = {container["image"].partition(":")[0] for container in CONTAINERS.values()}
    assert {image["name"] for image in KUSTOMIZATION["images"]} <= run


# The pod


@each_container
def test_an_image_is_pinned(name: str) -> None:
    assert PINNED.fullmatch(CONTAINERS[name]["image"])


def test_the_agents_image_is_named_after_its_version_in_both_places() -> None:
    assert CONTAINERS["agent"]["image"] == f"goodput-agent:{agent.__version__}"
    assert KUSTOMIZATION["images"] == [{"name": "goodput-agent", "newTag": agent.__version__}]


@each_container
def test_a_container_has_no_more_rights_than_it_needs(name: str) -> None:
    assert CONTAINERS[name]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_the_pod_does_not_run_as_root_and_shows_the_agent_the_engines_processes() -> None:
    pod = POD["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    # The same user: only then can the agent read the engine's view of its cgroup.
    assert pod["shareProcessNamespace"] is True
    assert not any("runAsUser" in found["securityContext"] for found in CONTAINERS.values())


@each_container
def test_a_container_has_resource_requests_and_probes(name: str) -> None:
    container = CONTAINERS[name]
    assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
        assert container[probe]["httpGet"]["path"] in {"/health", "/healthz"}


def test_the_agent_has_half_an_hour_to_migrate_a_large_database() -> None:
    probe = CONTAINERS["agent"]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_the_agents_store_does_not_affect_the_readiness_of_the_pod() -> None:
    assert CONTAINERS["vllm"]["readinessProbe"]["httpGet"] == {"path": "/health", "port": "engine"}
    assert "readinessProbe" not in CONTAINERS["agent"]


@each_container
def test_every_mounted_volume_is_declared(name: str) -> None:
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    claims = {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}
    generated = {found["name"] for found in KUSTOMIZATION["configMapGenerator"]}
    for mount in CONTAINERS[name]["volumeMounts"]:
        volume = volumes[mount["name"]]
        assert volume.get("persistentVolumeClaim", {}).get("claimName", None) in {None, *claims}
        assert volume.get("configMap", {}).get("name", None) in {None, *generated}


@each_container
def test_secrets_come_by_reference_and_may_be_absent(name: str) -> None:
    for variable in CONTAINERS[name]["env"]:
        if re.search("TOKEN|PASSWORD|SECRET|URL", variable["name"]):
            assert variable["valueFrom"]["secretKeyRef"]["optional"] is True
        else:
            assert "valueFrom" not in variable


# The agent's settings


def settings_file() -> tuple[str, Path]:
    """The name in the pod, and the file of this folder."""
    (entry,) = KUSTOMIZATION["configMapGenerator"][0]["files"]
    name, _, source = entry.partition("=")
    return name, FOLDER / source


def test_the_settings_are_mounted_at_the_path_of_the_image() -> None:
    name, _ = settings_file()
    (mount,) = (m for m in CONTAINERS["agent"]["volumeMounts"] if m["name"] == "settings")
    assert f"{mount['mountPath']}/{name}" == only(stages()[-1], "CMD").words()[-1]


def test_the_agent_accepts_its_settings() -> None:
    _, path = settings_file()
    settings = load(path, {})
    ports = {port["name"]: port["containerPort"] for port in CONTAINERS["agent"]["ports"]}
    assert ports["agent"] == settings.listen.port
    assert f"0.0.0.0:{ports['proxy']}" == settings.proxy.listen
    (engine,) = CONTAINERS["vllm"]["ports"]
    assert settings.engines[0].url == f"http://127.0.0.1:{engine['containerPort']}"
    spans = f"--otlp-traces-endpoint=http://{settings.otlp.grpc}"
    assert spans in CONTAINERS["vllm"]["args"]
    named = {"name": "OTEL_SERVICE_NAME", "value": settings.engines[0].name}
    assert named in CONTAINERS["vllm"]["env"]


def test_an_embedded_database_is_on_the_volume() -> None:
    _, path = settings_file()
    (mount,) = (m for m in CONTAINERS["agent"]["volumeMounts"] if m["name"] == "data")
    database = Path(load(path, {}).storage.url.removeprefix("sqlite:///"))
    assert database.parent == Path(mount["mountPath"])


def test_a_database_from_the_secret_replaces_the_embedded_one() -> None:
    _, path = settings_file()
    (name,) = (v["name"] for v in CONTAINERS["agent"]["env"] if v["name"].startswith("GOODPUT_"))
    url = "postgresql://goodput:p@db/goodput"
    assert load(path, {name: url}).storage.url == url


def test_the_tokens_of_the_secret_open_the_agents_port_to_prometheus() -> None:
    _, path = settings_file()
    tokens = load(path, {}).security.read_tokens
    (mount,) = (m for m in CONTAINERS["agent"]["volumeMounts"] if m["name"] == "tokens")
    (volume,) = (v for v in POD["spec"]["volumes"] if v["name"] == "tokens")
    (endpoint,) = (
        found
        for found in document("PodMonitor")["spec"]["podMetricsEndpoints"]
        if found["port"] == "agent"
    )
    key = endpoint["authorization"]["credentials"]
    assert str(tokens) == f"{mount['mountPath']}/{key['key']}"
    assert volume["secret"]["secretName"] == key["name"]


# Service and monitor


def test_the_service_and_the_monitor_select_the_pod_and_its_ports() -> None:
    labels = POD["metadata"]["labels"]
    ports = {port["name"] for found in CONTAINERS.values() for port in found["ports"]}
    service, monitor = document("Service")["spec"], document("PodMonitor")["spec"]
    assert service["selector"] == monitor["selector"]["matchLabels"] == labels
    assert {port["targetPort"] for port in service["ports"]} == ports
    assert {found["port"] for found in monitor["podMetricsEndpoints"]} == {"agent", "engine"}


def test_every_dashboard_is_in_a_config_map_within_kubernetes_limit() -> None:
    listed = [(FOLDER / name).resolve() for name in KUSTOMIZATION["configMapGenerator"][1]["files"]]
    assert listed == sorted((ROOT / "dashboards").glob("*.json"))
    assert sum(path.stat().st_size for path in listed) < 2**20
