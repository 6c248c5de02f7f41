"""The Helm chart, rendered by the real Helm."""

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import agent
from agent.settings import Settings, load
from tests.deploy.kit import (
    CHART,
    NAMES,
    PINNED,
    VALUES,
    YOURS,
    agent_container,
    check,
    containers_of,
    objects,
    only,
    pod,
    with_dependency,
)
from tests.deploy.values_table import README, written
from tests.real_parts.helm import documents, rendered, run
from tests.real_parts.processes import PartFailed

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
PODS = ("vllm", "your-vllm", "node")  # values that render pods
URL = "postgresql://goodput:password@db/goodput"
SERVE = "serve.enabled=true serve.database.existingSecret=x"

# What the kubelet fills in.
FIELDS = {
    "spec.nodeName": "node-a",
    "status.hostIP": "10.0.0.7",
    "metadata.name": "chat-0",
    "metadata.namespace": "llm",
}

each_name = pytest.mark.parametrize("name", NAMES)
each_pod = pytest.mark.parametrize("name", PODS)


def refusal(*values: str) -> str:
    """Why Helm refuses values, each as in `key=value`."""
    arguments = [word for value in values for word in ("--set", value)]
    with pytest.raises(PartFailed) as refused:
        rendered(CHART, *arguments)
    return str(refused.value)


# Lint, schemas


def test_lint_finds_nothing_in_the_chart(tmp_path: Path) -> None:
    for values in VALUES.values():
        run("helm", "lint", "--strict", CHART, "--values", values)
    run("helm", "lint", "--strict", CHART)
    run("helm", "lint", "--strict", with_dependency(tmp_path))


@each_name
def test_kubernetes_and_the_prometheus_operator_accept_every_object(name: str) -> None:
    for found in objects(name):
        check(found)


# Values


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("mode=side-car", "at '/mode': value must be"),
        ("sidecar.proxy.port=0", "at '/sidecar/proxy/port': minimum: got 0, want 1"),
        ("vllm.replica=2", "at '/vllm': additional properties 'replica' not allowed"),
        ("vllm.user=0", "at '/vllm/user': minimum: got 0, want 1"),
        ("podMonitor.enabled=yes", "at '/podMonitor/enabled': got string, want boolean"),
        ("dcgm.url=node:9400", "at '/dcgm/url': 'node:9400' does not match pattern"),
        ("alerts.grafana=grafana", "at '/alerts/grafana': 'grafana' does not match pattern"),
        ("settings.listen.port=1", "settings: listen and proxy.listen follow from the chart's"),
        ("tokens.existingSecret=", "tokens: set existingSecret to the name of a Secret"),
        ("data.createClaim=true data.existingClaim=x", "data: set createClaim or existing"),
        (f"database.url={URL} database.existingSecret=x", "database: set url or existing"),
        ("mode=node vllm.enabled=true", "vllm: its pods hold an agent of their own"),
        ("mode=node data.createClaim=true", "data: the agents of several nodes cannot"),
        ("mode=node tokens.read=0123456789abcdef", "tokens: with mode node set both"),
        ("alerts.enabled=true alerts.rules=rules", "alerts.rules: the text is no file of"),
        ("podMonitor.enabled=true serviceMonitor.enabled=true", "podMonitor, serviceMonitor:"),
        ("serviceMonitor.enabled=true service.enabled=false", "serviceMonitor: it selects the"),
        ("mode=node serviceAccount.create=false", "serviceAccount.name: name the account"),
        ("serve.enabled=true", "serve.database.existingSecret: set the name"),
        (f"{SERVE} serve.ingress.enabled=true", "serve.ingress.hosts: set the names"),
        (f"{SERVE} serve.httpRoute.enabled=true", "serve.httpRoute.parentRefs: set the Gateway"),
        (
            f"{SERVE} serve.podDisruptionBudget.minAvailable=1"
            " serve.podDisruptionBudget.maxUnavailable=1",
            "at '/serve/podDisruptionBudget': 'not' failed",
        ),
        (
            f"{SERVE} serve.settings.listen.port=1",
            "serve.settings: listen follows",
        ),
    ],
)
def test_values_that_are_wrong_or_exclude_each_other_are_refused(
    values: str, complaint: str
) -> None:
    assert complaint in refusal(*values.split())


@pytest.mark.parametrize("value", ["tokens.read=hunter2", "database.url=mysql://me:hunter2@db/x"])
def test_a_refusal_shows_no_secret(value: str) -> None:
    complaint = refusal(value)
    assert value.partition("=")[0] in complaint
    assert "hunter2" not in complaint


def test_the_readme_lists_every_value_with_its_default() -> None:
    """Make it with `python -m tests.deploy.values_table`."""
    assert README.read_text(encoding="utf-8") == written()
    assert "| `serve.ingress.hosts` | `[]` |" in written()


# The agent in a pod


def settings_of(name: str, folder: Path) -> Settings:
    """The settings that the agent gets, with what the environment of its container adds."""
    path = folder / "settings.yml"
    (made_settings,) = (o for o in objects(name) if o["metadata"]["name"].endswith("-settings"))
    path.write_text(made_settings["data"]["settings.yml"], encoding="utf-8")
    made = {found["metadata"]["name"]: found for found in objects(name)}
    environment = {}
    for each in agent_container(name).get("env", []) if name in PODS else []:
        source = each.get("valueFrom", {})
        if "secretKeyRef" in source:
            secret = made.get(source["secretKeyRef"]["name"], {"stringData": {"url": URL}})
            environment[each["name"]] = secret["stringData"][source["secretKeyRef"]["key"]]
        elif "fieldRef" in source:
            environment[each["name"]] = FIELDS[source["fieldRef"]["fieldPath"]]
        else:
            # As the kubelet does with the variables above.
            value = re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], each["value"])
            environment[each["name"]] = value
    return load(path, environment)


@each_name
def test_the_agent_loads_the_settings_of_a_rendering(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    assert settings.security.read_tokens == Path("/etc/goodput-agent-tokens/read")
    found = settings.engines_from.kubernetes
    assert (len(settings.engines), found is None) in {(1, True), (0, False)}
    accounts = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "DaemonSet"}
    assert found or not accounts & {each["kind"] for each in objects(name)}


def test_the_agent_reads_the_gpus_of_its_node_and_knows_its_pod(tmp_path: Path) -> None:
    on_node = settings_of("node", tmp_path)
    assert (on_node.dcgm.url, on_node.dcgm.pod) == ("http://10.0.0.7:9400/metrics", None)
    beside = settings_of("vllm", tmp_path)
    assert beside.dcgm.url == "http://nvidia-dcgm-exporter.gpu-operator:9400/metrics"
    assert (beside.engines[0].pod, beside.dcgm.pod) == ("llm/chat-0", "llm/chat-0")
    # The engine's own settings stay.
    assert (beside.engines[0].name, beside.engines[0].url) == ("chat-0", "http://127.0.0.1:8000")
    without = settings_of(YOURS, tmp_path)
    assert (without.dcgm.url, without.engines[0].pod) == (None, None)


def test_the_chart_takes_the_url_of_clickhouse() -> None:
    url = URL.replace("postgresql", "clickhousedb")
    assert url in rendered(CHART, "--values", VALUES["vllm"], "--set", f"database.url={url}")


def test_values_win_over_the_settings_of_the_chart(tmp_path: Path) -> None:
    settings = settings_of("sidecar", tmp_path)
    assert (settings.storage.file, settings.storage.publish_to) == ("/data/goodput.db", None)
    assert (settings.storage.keep_requests, settings.storage.max_bytes) == (86400, 2**32)
    assert settings.proxy.listen is None
    assert (settings.engines[0].name, settings.engines[0].url) == (
        "code-0",
        "http://127.0.0.1:9000",
    )


@each_pod
def test_with_a_database_the_agents_file_is_in_the_data_volume(name: str, tmp_path: Path) -> None:
    storage = settings_of(name, tmp_path).storage
    mounts = {each["name"]: each["mountPath"] for each in agent_container(name)["volumeMounts"]}
    assert storage.publish_to == URL
    assert storage.file == f"{mounts['goodput-data']}/goodput.db"


@each_pod
def test_the_agents_ports_are_those_of_its_settings(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    container = agent_container(name)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["agent"] == settings.listen.port
    if name == "node":
        spans = (f"0.0.0.0:{ports['otlp-grpc']}", f"0.0.0.0:{ports['otlp-http']}")
        assert spans == (settings.otlp.grpc, settings.otlp.http)
    else:
        assert settings.proxy.listen == f"0.0.0.0:{ports['proxy']}"
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "agent"}
    # By number: before 1.32 Kubernetes finds no port of a native sidecar by name.
    service = {port["name"]: port["targetPort"] for port in only(name, "Service")["spec"]["ports"]}
    assert ports.items() <= service.items()


@each_pod
def test_the_agent_has_no_more_rights_than_it_needs(name: str) -> None:
    context = agent_container(name)["securityContext"]
    assert (
        context.items()
        >= {
            "runAsNonRoot": True,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        }.items()
    )


def test_no_readiness_of_the_agent_takes_vllm_out_of_its_service() -> None:
    assert "readinessProbe" not in agent_container("vllm")
    ready = agent_container("node")["readinessProbe"]
    assert ready["httpGet"] == {"path": "/readyz", "port": "agent"}


def test_values_cannot_give_the_agent_more_rights() -> None:
    wanted = ("runAsNonRoot=false", "allowPrivilegeEscalation=true", "readOnlyRootFilesystem=false")
    places = [*(f"securityContext.{each}" for each in wanted), f"podSecurityContext.{wanted[0]}"]
    values = [word for each in places for word in ("--set", each)]
    more = documents(rendered(CHART, "--values", VALUES["vllm"], *values))
    (deployment,) = (found for found in more if found["kind"] == "Deployment")
    template = deployment["spec"]["template"]
    (container,) = (each for each in containers_of(template) if each["name"] == "agent")
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == agent_container("vllm")["securityContext"]


def test_vllm_sends_every_span_to_the_agent_that_sees_its_processes(tmp_path: Path) -> None:
    settings, spec = settings_of("vllm", tmp_path), pod("vllm")["spec"]
    engine = next(each for each in spec["containers"] if each["name"] == "vllm")
    spans = f"--otlp-traces-endpoint=http://{settings.otlp.grpc}"
    assert {spans, "--model=Qwen/Qwen3-0.6B", "--port=8000"} <= set(engine["args"])
    environment = {each["name"]: each.get("value") for each in engine["env"]}
    assert environment["OTEL_SERVICE_NAME"] == settings.engines[0].name
    assert environment["OTEL_TRACES_SAMPLER"] == "always_on"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "engine"}
    assert (spec["shareProcessNamespace"], spec["automountServiceAccountToken"]) == (True, False)
    assert engine["resources"]["limits"] == DEFAULTS["vllm"]["resources"]["limits"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("vllm", ("priorityClassName", "serviceAccountName")),
        ("node", ("priorityClassName", "runtimeClassName")),
        ("serve", ()),
    ],
)
def test_pods_run_where_the_values_say(name: str, more: Sequence[str]) -> None:
    values, spec = yaml.safe_load(VALUES[name].read_text(encoding="utf-8")), pod(name)["spec"]
    for key in ("nodeSelector", "tolerations", "affinity", *more):
        assert spec[key] == values[name][key]
    assert spec["imagePullSecrets"] == values["imagePullSecrets"]
    spread = values[name].get("topologySpreadConstraints", [])
    selector = {"matchLabels": pod(name)["metadata"]["labels"]}
    assert spec.get("topologySpreadConstraints", []) == [
        {**each, "labelSelector": selector} for each in spread
    ]


@pytest.mark.parametrize("name", ["vllm", "serve"])
def test_pods_have_the_annotations_environment_and_volumes_of_the_values(name: str) -> None:
    values, template = yaml.safe_load(VALUES[name].read_text(encoding="utf-8")), pod(name)
    assert template["metadata"]["annotations"].items() >= values["podAnnotations"].items()
    (container,) = (c for c in template["spec"]["containers"] if c["name"] == name)
    for key in ("env", "volumeMounts"):
        assert container[key][-1:] == values[name][key]
    assert values[name]["volumes"][0] in template["spec"]["volumes"]


def test_a_budget_keeps_pods_from_being_evicted_together() -> None:
    for name, budget in (("vllm", {"maxUnavailable": 1}), ("serve", {"minAvailable": 1})):
        labels = pod(name)["metadata"]["labels"]
        spec = only(name, "PodDisruptionBudget")["spec"]
        assert spec == {"selector": {"matchLabels": labels}, **budget}


# A native sidecar


def on_kubernetes(chart: Path, version: str, *values: str) -> dict[str, Any]:
    """The spec of the pod of vLLM that a chart makes for a version of Kubernetes."""
    made = documents(rendered(chart, "--kube-version", version, *values))
    (deployment,) = (found for found in made if found["kind"] == "Deployment")
    check(deployment)
    found: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return found


@pytest.fixture(params=["ours", YOURS])
def with_vllm(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """The pod of vLLM of our chart, and of one that has ours as a dependency, by version."""
    if request.param == YOURS:
        return partial(on_kubernetes, with_dependency(tmp_path))
    return lambda version: on_kubernetes(CHART, version, "--values", str(VALUES["vllm"]))


@pytest.mark.parametrize("version", ["1.29.0", "1.33.1-gke.1", "v1.37.0"])
def test_the_agent_is_a_native_sidecar_for_which_vllm_does_not_wait(
    with_vllm: Callable[[str], dict[str, Any]], version: str
) -> None:
    spec = with_vllm(version)
    assert [each["name"] for each in spec["containers"]] == ["vllm"]
    (sidecar,) = spec["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"]) == ("agent", "Always")
    assert "startupProbe" not in sidecar
    # As long as a start may take, which migrates the database.
    (plain,) = pod("node")["spec"]["containers"]
    start = plain["startupProbe"]
    patience_s = start["periodSeconds"] * start["failureThreshold"]
    assert sidecar["livenessProbe"]["initialDelaySeconds"] == patience_s


def test_before_kubernetes_1_29_the_agent_is_a_container_beside_vllm(
    with_vllm: Callable[[str], dict[str, Any]],
) -> None:
    spec = with_vllm("1.28.9")
    assert "initContainers" not in spec
    assert [each["name"] for each in spec["containers"]] == ["vllm", "agent"]
    assert "restartPolicy" not in spec["containers"][1]
    assert spec["containers"][1]["startupProbe"]["httpGet"]["path"] == "/healthz"


@pytest.mark.parametrize(
    ("native", "version", "key"),
    [("never", "1.37.0", "containers"), ("always", "1.28.0", "initContainers")],
)
def test_values_decide_whether_the_agent_is_a_native_sidecar(
    native: str, version: str, key: str
) -> None:
    values = ("--values", str(VALUES["vllm"]), "--set", f"sidecar.native={native}")
    spec = on_kubernetes(CHART, version, *values)
    assert "agent" in [each["name"] for each in spec[key]]


# OpenShift


def test_no_pod_fixes_its_user_where_the_cluster_chooses_it() -> None:
    made = [
        *documents(rendered(CHART, "--values", VALUES["vllm"], "--set", "vllm.user=null")),
        *objects("node"),
    ]
    pods = [o["spec"]["template"] for o in made if o["kind"] in {"Deployment", "DaemonSet"}]
    assert len(pods) == 2
    for template in [*pods, pod("serve")]:
        assert "runAsUser" not in json.dumps(template)
        assert "runAsGroup" not in json.dumps(template)
        assert template["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod("serve")["spec"]["securityContext"]["fsGroup"] == 3000
    assert pod("vllm")["spec"]["securityContext"]["runAsUser"] == DEFAULTS["vllm"]["user"]


@each_pod
def test_every_mounted_volume_is_there(name: str) -> None:
    spec, made = pod(name)["spec"], {o["metadata"]["name"] for o in objects(name)}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {m["name"] for c in containers_of(pod(name)) for m in c.get("volumeMounts", [])}
    assert mounted == volumes.keys()
    assert volumes["goodput-settings"]["configMap"]["name"] in made
    claims = {
        found["claimName"] for v in volumes.values() if (found := v.get("persistentVolumeClaim"))
    }
    assert claims <= made


@each_pod
def test_a_secret_is_in_no_pod_and_no_config_map(name: str) -> None:
    others = [found for found in objects(name) if found["kind"] != "Secret"]
    assert "password@" not in json.dumps(others)
    assert "token-of-the-tests" not in json.dumps(others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vllm", "settings.storage.max_series=5"),
        ("serve", "serve.settings.storage.query_timeout=5s"),
    ],
)
def test_changed_settings_make_a_new_pod(name: str, value: str) -> None:
    changed = rendered(CHART, "--values", VALUES[name], "--set", value)
    (deployment,) = (found for found in documents(changed) if found["kind"] == "Deployment")
    annotations = deployment["spec"]["template"]["metadata"]["annotations"]
    assert annotations.keys() == pod(name)["metadata"]["annotations"].keys()
    assert annotations != pod(name)["metadata"]["annotations"]


def test_images_are_pinned_and_the_agents_is_of_its_version() -> None:
    assert agent_container("vllm")["image"] == f"goodput-agent:{agent.__version__}"
    assert all(PINNED.fullmatch(each["image"]) for each in pod("vllm")["spec"]["containers"])
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (agent.__version__, agent.__version__)


# What selects the pods


def test_service_monitor_and_policy_select_the_pods() -> None:
    labels = pod("vllm")["metadata"]["labels"]
    assert only("vllm", "Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert only("vllm", "Service")["spec"]["selector"] == labels
    assert only("vllm", "PodMonitor")["spec"]["selector"]["matchLabels"] == labels
    assert only("vllm", "NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels


def test_prometheus_gets_the_token_that_the_agent_wants() -> None:
    agents, engine = only("vllm", "PodMonitor")["spec"]["podMetricsEndpoints"]
    volume = next(v for v in pod("vllm")["spec"]["volumes"] if v["name"] == "goodput-tokens")
    credentials = agents["authorization"]["credentials"]
    assert credentials == {"name": volume["secret"]["secretName"], "key": "read"}
    assert (agents["port"], engine["port"]) == ("agent", "engine")


def test_a_service_monitor_selects_the_service_of_the_agents_and_no_other() -> None:
    spec = only("serve", "ServiceMonitor")["spec"]
    services = [found for found in objects("serve") if found["kind"] == "Service"]
    assert len(services) == 2
    wanted = spec["selector"]["matchLabels"].items()
    (selected,) = (each for each in services if wanted <= each["metadata"]["labels"].items())
    ports = {port["name"] for port in selected["spec"]["ports"]}
    (agents,) = spec["endpoints"]
    assert agents["port"] in ports
    secret = {"name": DEFAULTS["tokens"]["existingSecret"], "key": "read"}
    assert agents["authorization"] == {"credentials": secret}


def test_a_service_monitor_reads_vllm_too_where_the_chart_makes_it() -> None:
    values = ("podMonitor.enabled=false", "serviceMonitor.enabled=true")
    arguments = [word for each in values for word in ("--set", each)]
    made = documents(rendered(CHART, "--values", VALUES["vllm"], *arguments))
    (monitor,) = (found for found in made if found["kind"] == "ServiceMonitor")
    check(monitor)
    ports = {port["name"] for port in only("vllm", "Service")["spec"]["ports"]}
    read = [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]]
    assert read == ["agent", "engine"]
    assert set(read) <= ports


def test_the_policy_lets_only_monitors_read_the_agent() -> None:
    reading, serving = only("vllm", "NetworkPolicy")["spec"]["ingress"]
    assert reading["ports"] == [{"port": 9470}]
    assert reading["from"] == DEFAULTS["networkPolicy"]["monitors"]
    assert {port["port"] for port in serving["ports"]} == {8000, 8080}
    assert serving["from"] == [{"podSelector": {"matchLabels": {"app": "gateway"}}}]


# An agent on each node


def test_the_agent_of_a_node_looks_for_the_pods_of_its_node(tmp_path: Path) -> None:
    settings = settings_of("node", tmp_path)
    found = settings.engines_from.kubernetes
    assert found is not None
    assert (settings.name, found.node) == ("node-a", "node-a")
    assert (found.selector, found.port) == ("app=chat,tier in (gold)", "http")
    assert (found.namespaces, found.name) == (("prod", "test"), "namespace/pod")
    assert settings.security.ingest_tokens == Path("/etc/goodput-agent-tokens/ingest")


def rights(name: str) -> dict[str, list[Any]]:
    """The rights of the agent's service account, by the namespace in which it has them."""
    account = only(name, "ServiceAccount")["metadata"]["name"]
    assert pod(name)["spec"]["serviceAccountName"] == account
    bound = [found for found in objects(name) if found["kind"].endswith("Binding")]
    roles = {
        (found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"]): found
        for found in objects(name)
    }
    given = {}
    for binding in bound:
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account, "namespace": "llm"}
        ]
        where = binding["metadata"].get("namespace")
        role = roles[binding["roleRef"]["kind"], where, binding["roleRef"]["name"]]
        given[where or "everywhere"] = role["rules"]
    return given


def test_the_agent_may_only_list_and_watch_pods_where_it_is_told_to() -> None:
    pods = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    assert rights("node") == {"prod": pods, "test": pods}
    assert rights("cluster") == {"everywhere": pods}


def test_the_agents_use_the_account_of_the_values() -> None:
    annotations = only("node", "ServiceAccount")["metadata"]["annotations"]
    values = yaml.safe_load(VALUES["node"].read_text("utf-8"))
    assert annotations == values["serviceAccount"]["annotations"]
    theirs = ("serviceAccount.create=false", "serviceAccount.name=mine")
    arguments = [word for each in theirs for word in ("--set", each)]
    made = documents(rendered(CHART, "--values", VALUES["node"], *arguments))
    assert "ServiceAccount" not in {found["kind"] for found in made}
    (pods,) = (found for found in made if found["kind"] == "DaemonSet")
    assert pods["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    bound = [found["subjects"][0]["name"] for found in made if found["kind"] == "RoleBinding"]
    assert bound == ["mine", "mine"]


def test_by_default_it_may_do_so_in_the_namespace_of_the_release() -> None:
    made = documents(rendered(CHART, "--set", "mode=node"))
    assert not any(found["metadata"]["name"].endswith("-serve") for found in made)
    roles = [found for found in made if found["kind"] in {"Role", "ClusterRole"}]
    assert [found["metadata"]["namespace"] for found in roles] == ["llm"]
    settings = next(each for each in made if "settings.yml" in each.get("data", {}))
    assert "namespaces:\n    - llm\n" in settings["data"]["settings.yml"]


def test_spans_stay_on_the_node_and_come_from_watched_namespaces() -> None:
    service = only("node", "Service")["spec"]
    assert (service["internalTrafficPolicy"], service["publishNotReadyAddresses"]) == (
        "Local",
        True,
    )
    _, sending = only("node", "NetworkPolicy")["spec"]["ingress"]
    assert {port["port"] for port in sending["ports"]} == {4317, 4318}
    (peer,) = sending["from"]
    (names,) = peer["namespaceSelector"]["matchExpressions"]
    assert names["values"] == ["prod", "test"]
