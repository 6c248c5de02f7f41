"""The Helm chart, rendered by the real Helm."""

import gzip
import json
from collections.abc import Sequence
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
    ROOT,
    VALUES,
    agent_container,
    check,
    objects,
    only,
    pod,
    with_dependency,
)
from tests.real_parts.helm import documents, rendered, run
from tests.real_parts.processes import PartFailed

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
PODS = ("vllm", "your-vllm", "node")  # values that render pods
URL = "postgresql://goodput:password@db/goodput"
READER_URL = "postgresql://reader:secret@db/goodput"

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
        ("alerts.grafana=grafana", "at '/alerts/grafana': 'grafana' does not match pattern"),
        ("settings.listen.port=1", "settings: listen and proxy.listen follow from the chart's"),
        ("tokens.existingSecret=", "tokens: set existingSecret to the name of a Secret"),
        ("data.createClaim=true data.existingClaim=x", "data: set createClaim or existing"),
        (f"database.url={URL} database.existingSecret=x", "database: set url or existing"),
        ("mode=node vllm.enabled=true", "vllm: its pods hold an agent of their own"),
        ("mode=node data.createClaim=true", "data: the agents of several nodes cannot"),
        ("mode=node tokens.read=0123456789abcdef", "tokens: with mode node set both"),
        ("alerts.enabled=true alerts.rules=rules", "alerts.rules: the text is no file of"),
        ("serve.enabled=true", "serve.database.existingSecret: set the name"),
        (
            "serve.enabled=true serve.database.existingSecret=x serve.settings.listen.port=1",
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
            environment[each["name"]] = f"<{source['fieldRef']['fieldPath']}>"
    return load(path, environment)


@each_name
def test_the_agent_loads_the_settings_of_a_rendering(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    assert settings.security.read_tokens == Path("/etc/goodput-agent-tokens/read")
    found = settings.engines_from.kubernetes
    assert (len(settings.engines), found is None) in {(1, True), (0, False)}
    accounts = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "DaemonSet"}
    assert found or not accounts & {each["kind"] for each in objects(name)}


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
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "agent"}
    service = {port["targetPort"] for port in only(name, "Service")["spec"]["ports"]}
    assert ports.keys() <= service


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
    values = [word for each in wanted for word in ("--set", f"securityContext.{each}")]
    more = documents(rendered(CHART, "--values", VALUES["vllm"], *values))
    (deployment,) = (found for found in more if found["kind"] == "Deployment")
    (container,) = (
        each for each in deployment["spec"]["template"]["spec"]["containers"]
        if each["name"] == "agent"
    )  # fmt: skip
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
    ("name", "more"), [("vllm", ()), ("node", ("priorityClassName", "runtimeClassName"))]
)
def test_pods_run_where_the_values_say(name: str, more: Sequence[str]) -> None:
    values, spec = yaml.safe_load(VALUES[name].read_text(encoding="utf-8")), pod(name)["spec"]
    for key in ("nodeSelector", "tolerations", *more):
        assert spec[key] == values[name][key]
    assert spec["imagePullSecrets"] == values["imagePullSecrets"]


@each_pod
def test_every_mounted_volume_is_there(name: str) -> None:
    spec, made = pod(name)["spec"], {o["metadata"]["name"] for o in objects(name)}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {each["name"] for c in spec["containers"] for each in c.get("volumeMounts", [])}
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


def test_the_policy_lets_only_monitors_read_the_agent() -> None:
    reading, serving = only("vllm", "NetworkPolicy")["spec"]["ingress"]
    assert reading["ports"] == [{"port": "agent"}]
    assert reading["from"] == DEFAULTS["networkPolicy"]["monitors"]
    assert {port["port"] for port in serving["ports"]} == {8000, "proxy"}
    assert serving["from"] == [{"podSelector": {"matchLabels": {"app": "gateway"}}}]


# An agent on each node


def test_the_agent_of_a_node_looks_for_the_pods_of_its_node(tmp_path: Path) -> None:
    settings = settings_of("node", tmp_path)
    found = settings.engines_from.kubernetes
    assert found is not None
    assert (settings.name, found.node) == ("<spec.nodeName>", "<spec.nodeName>")
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
    assert {port["port"] for port in sending["ports"]} == {"otlp-grpc", "otlp-http"}
    (peer,) = sending["from"]
    (names,) = peer["namespaceSelector"]["matchExpressions"]
    assert names["values"] == ["prod", "test"]


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
    assert {labels.get("objective") for labels in alerts} == {None, "chat"}
    assert all("labels" not in rule for rule in rules if "record" in rule)


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
    missing = ("makes no pod", "create secret", "rows end", "podMonitor", "alerts.enabled")
    said = notes()
    assert "create secret generic goodput-agent-tokens --from-literal=read=" in said
    assert all(each in said for each in missing)
    on_nodes = notes("mode=node", "node.selector=app=chat")
    assert "--otlp-traces-endpoint=http://demo-goodput-agent.default:4317" in on_nodes
    assert "--from-literal=ingest=" in on_nodes
    assert "makes no pod" not in on_nodes
    whole = notes(
        "vllm.enabled=true", "tokens.read=0123456789abcdef", "data.createClaim=true",
        "podMonitor.enabled=true", "alerts.enabled=true", "alerts.runbooks=https://r.test/x",
    )  # fmt: skip
    assert "port-forward service/demo-goodput-agent 9470" in whole
    assert not any(each in whole for each in missing)


# `goodput-agent serve`


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
    (variable,) = serve_container()["env"]
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
