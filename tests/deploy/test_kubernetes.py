"""The files for Kubernetes, without a cluster."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent
from agent.settings import load
from tests.deploy.kit import PINNED, ROOT, check, instruction_of, stages
from tests.real_parts import helm
from tests.sources.engines.wire import EngineServer

FOLDER = ROOT / "deploy" / "kubernetes"
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text(encoding="utf-8"))


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


# The kustomization, built by the real kubectl


def built_in(folder: Path) -> dict[tuple[str, str], Any]:
    """The objects by kind and name, the name without the digest of a ConfigMap's content."""
    text = helm.run("kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", folder)
    return {
        (found["kind"], found["metadata"]["name"].replace(digest(found), "")): found
        for found in helm.documents(text)
    }


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, str], Any]:
    return built_in(FOLDER)


def digest(found: dict[str, Any]) -> str:
    name = found["metadata"]["name"]
    return f"-{name.rpartition('-')[2]}" if name.startswith("goodput-agent-settings-") else ""


def test_kubernetes_accepts_every_object(built: dict[tuple[str, str], Any]) -> None:
    assert len(built) == 8
    for found in built.values():
        check(found)


def test_the_pod_mounts_the_settings_of_the_folder(built: dict[tuple[str, str], Any]) -> None:
    settings = built["ConfigMap", "goodput-agent-settings"]
    assert settings["data"]["settings.yml"] == (FOLDER / "agent.yml").read_text(encoding="utf-8")
    volumes = built["Deployment", "vllm"]["spec"]["template"]["spec"]["volumes"]
    mounted = {each["configMap"]["name"] for each in volumes if "configMap" in each}
    assert mounted == {settings["metadata"]["name"]}


# The pod


def test_the_dashboards_are_whole(built: dict[tuple[str, str], Any]) -> None:
    made = built["ConfigMap", "goodput-agent-dashboards"]
    files: list[Path] = sorted((ROOT / "dashboards").glob("*.json"))
    assert made["data"] == {path.name: path.read_text(encoding="utf-8") for path in files}
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert sum(path.stat().st_size for path in files) < 2**20


@each_container
def test_a_container_has_a_pinned_image_resources_probes_and_no_rights(name: str) -> None:
    container = CONTAINERS[name]
    assert PINNED.fullmatch(container["image"])
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    ports = {port["name"] for port in container["ports"]}
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
        assert container[probe]["httpGet"]["path"] in {"/health", "/healthz"}


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
        if re.search("TOKEN|PASSWORD|SECRET|URL|PUBLISH_TO", variable["name"]):
            assert variable["valueFrom"]["secretKeyRef"]["optional"] is True
        else:
            assert "valueFrom" not in variable


# The agent's settings


def test_the_agents_image_is_of_its_version_and_it_has_half_an_hour_to_migrate() -> None:
    container = CONTAINERS["agent"]
    assert container["image"] == f"goodput-agent:{agent.__version__}"
    assert KUSTOMIZATION["images"] == [{"name": "goodput-agent", "newTag": agent.__version__}]
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800
    # Its store does not affect whether the pod is ready.
    assert "readinessProbe" not in container
    assert CONTAINERS["vllm"]["readinessProbe"]["httpGet"] == {"path": "/health", "port": "engine"}


def test_the_agent_accepts_its_settings_which_fit_the_pod() -> None:
    (entry,) = KUSTOMIZATION["configMapGenerator"][0]["files"]
    name, _, source = entry.partition("=")
    container, engine = CONTAINERS["agent"], CONTAINERS["vllm"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert f"{mounts['settings']}/{name}" == instruction_of(stages()[-1], "CMD").words()[-1]
    (url,) = (each["name"] for each in container["env"] if each["name"].startswith("GOODPUT_"))
    settings = load(FOLDER / source, {url: "postgresql://goodput:p@db/goodput"})
    assert settings.storage.publish_to == "postgresql://goodput:p@db/goodput"
    assert Path(settings.storage.file).parent == Path(mounts["data"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["agent"] == settings.listen.port
    assert f"0.0.0.0:{ports['proxy']}" == settings.proxy.listen
    (port,) = engine["ports"]
    assert settings.engines[0].url == f"http://127.0.0.1:{port['containerPort']}"
    assert f"--otlp-traces-endpoint=http://{settings.otlp.grpc}" in engine["args"]
    assert {"name": "OTEL_SERVICE_NAME", "value": settings.engines[0].name} in engine["env"]
    # Prometheus reads with the token of the same secret.
    endpoints = document("PodMonitor")["spec"]["podMetricsEndpoints"]
    (endpoint,) = (found for found in endpoints if found["port"] == "agent")
    key = endpoint["authorization"]["credentials"]
    assert str(settings.security.read_tokens) == f"{mounts['tokens']}/{key['key']}"
    (volume,) = (v for v in POD["spec"]["volumes"] if v["name"] == "tokens")
    assert volume["secret"]["secretName"] == key["name"]


# Probes by progress


@pytest.fixture(scope="module")
def probing() -> dict[tuple[str, str], Any]:
    """The objects with vLLM probed through the agent."""
    return built_in(FOLDER.with_name("kubernetes-probes"))


def test_only_the_probes_of_vllm_differ_where_the_agent_probes_it(
    built: dict[tuple[str, str], Any], probing: dict[tuple[str, str], Any]
) -> None:
    changed = {key for key in built if probing[key] != built[key]}
    assert changed == {("Deployment", "vllm")}
    assert probing.keys() == built.keys()
    check(probing["Deployment", "vllm"])
    vllm = probed_vllm(probing)
    # It loads for as long as before.
    assert vllm["startupProbe"] == CONTAINERS["vllm"]["startupProbe"]
    for probe in ("livenessProbe", "readinessProbe"):
        assert "httpGet" not in vllm[probe]


def probed_vllm(objects: dict[tuple[str, str], Any]) -> dict[str, Any]:
    containers = objects["Deployment", "vllm"]["spec"]["template"]["spec"]["containers"]
    (found,) = (each for each in containers if each["name"] == "vllm")
    return dict(found)


@pytest.mark.parametrize(
    ("probe", "path"), [("livenessProbe", "livez"), ("readinessProbe", "readyz")]
)
def test_a_probe_fails_if_the_agent_says_503_and_not_if_the_agent_is_away(
    probing: dict[tuple[str, str], Any], probe: str, path: str
) -> None:
    command = probed_vllm(probing)[probe]["exec"]["command"]
    engine = load(FOLDER / "agent.yml", {}).engines[0].name
    with EngineServer() as server:
        there = [word.replace("127.0.0.1:9470", server.address) for word in command]
        for status, code in ((200, 0), (503, 1)):
            server.answers(f"/engines/{engine}/{path}", b"{}", status=status)
            assert subprocess.run(there, check=False).returncode == code
    assert subprocess.run(there, check=False).returncode == 0


# Service and monitor


def test_the_service_and_the_monitor_select_the_pod_and_its_ports() -> None:
    labels = POD["metadata"]["labels"]
    ports = {port["name"] for found in CONTAINERS.values() for port in found["ports"]}
    service, monitor = document("Service")["spec"], document("PodMonitor")["spec"]
    assert service["selector"] == monitor["selector"]["matchLabels"] == labels
    assert {port["targetPort"] for port in service["ports"]} == ports
    assert {found["port"] for found in monitor["podMetricsEndpoints"]} == {"agent", "engine"}
