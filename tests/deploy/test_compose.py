"""docker-compose.yml and what it mounts, without a container engine."""

import json
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

import agent
from agent.render.alerts import Receivers
from agent.settings import load
from tests.deploy.kit import (
    COMPOSE,
    HOST,
    PINNED,
    ROOT,
    complaints,
    document,
    environment,
    filled,
    mounted,
    mounts,
    names_on_the_network,
    required_variables,
    services,
)
from tests.real_parts.alertmanager import complaints_about_config, program

SECRETS = dict.fromkeys(required_variables(), "secret")
DATASOURCES = "/etc/grafana/provisioning"
AGENTS = ("agent-cpu", "agent-gpu")
ENGINES = ("vllm-cpu", "vllm-gpu")

each_service = pytest.mark.parametrize("name", services())
each_agent = pytest.mark.parametrize("name", AGENTS)


# The file


@pytest.mark.parametrize("path", [COMPOSE, HOST], ids=lambda path: path.name)
def test_the_file_matches_the_compose_specification(path: Path) -> None:
    assert complaints("check-jsonschema", "--builtin-schema", "vendor.compose-spec", path) == ""


@each_service
def test_a_service_has_a_pinned_image_no_privileges_and_ports_on_this_machine_only(
    name: str,
) -> None:
    service = services()[name]
    assert PINNED.fullmatch(service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert "privileged" not in service
    assert name in ENGINES or "no-new-privileges:true" in service["security_opt"]


def test_no_two_services_of_a_profile_publish_the_same_port() -> None:
    for profile in ("cpu", "gpu", "demo"):
        ports = [
            port.split(":")[1]
            for service in services().values()
            if profile in service.get("profiles", [profile])
            for port in service.get("ports", [])
        ]
        assert len(ports) == len(set(ports)) > 3


@each_service
def test_a_service_waits_only_for_services_that_have_a_health_check(name: str) -> None:
    waits = services()[name].get("depends_on", {})
    assert not set(AGENTS) & waits.keys()
    for other, wait in waits.items():
        assert wait == {"condition": "service_healthy"}
        assert "healthcheck" in services()[other]
        assert "profiles" not in services()[other]


# Secrets


def test_the_file_contains_no_password() -> None:
    given = [
        (key, value)
        for service in services().values()
        for key, value in service.get("environment", {}).items()
    ]
    secret = [value for key, value in given if re.search("PASSWORD|TOKEN|SECRET", key)]
    assert len(secret) >= 6
    assert [value for value in secret if not re.fullmatch(r"\$\{\w+:(\?[^}]+|-)\}", value)] == []
    in_urls = [urlsplit(filled(value, SECRETS)).password for _, value in given if "://" in value]
    assert set(in_urls) == {"secret"}


@pytest.fixture
def make_secrets(tmp_path: Path) -> Path:
    """The script, in a copy of the repository without a file of passwords."""
    script = tmp_path / "deploy" / "compose" / "make-secrets"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "deploy" / "compose" / "make-secrets", script)
    return script


def test_passwords_are_generated_once_and_readable_by_their_owner_alone(
    make_secrets: Path, tmp_path: Path
) -> None:
    made = tmp_path / ".env"
    subprocess.run([make_secrets], check=True, capture_output=True)
    before = made.read_text(encoding="utf-8")
    subprocess.run([make_secrets], check=True, capture_output=True)
    passwords = dict(line.split("=") for line in before.splitlines())
    assert made.read_text(encoding="utf-8") == before
    assert passwords.keys() == required_variables()
    assert len(set(passwords.values())) == len(passwords)
    # They are part of a URL, so they must need no quoting.
    assert all(re.fullmatch("[0-9a-f]{48}", password) for password in passwords.values())
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    tokens = make_secrets.parent / "tokens"
    assert (tokens / "ingest").read_text(encoding="utf-8").strip() == passwords["INGEST_TOKEN"]
    assert re.fullmatch("[0-9a-f]{48}", (tokens / "read").read_text(encoding="utf-8"))


def test_an_older_file_of_passwords_keeps_them_and_gets_what_is_new(
    make_secrets: Path, tmp_path: Path
) -> None:
    made = tmp_path / ".env"
    made.write_text("GPUS=[1]\nPOSTGRES_PASSWORD=old", encoding="utf-8")
    made.chmod(0o644)
    subprocess.run([make_secrets], check=True, capture_output=True)
    variables = dict(line.split("=") for line in made.read_text(encoding="utf-8").splitlines())
    assert (variables["GPUS"], variables["POSTGRES_PASSWORD"]) == ("[1]", "old")
    assert variables.keys() == {"GPUS", *required_variables()}
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_git_and_the_image_exclude_secret_files() -> None:
    keys = "deploy/compose/alertmanager-secrets/slack_api_url"
    paths = [".env", keys, "deploy/compose/tokens/read", "deploy/compose/tokens/ingest"]
    finished = subprocess.run(
        ["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert finished.stdout.split() == paths


# Mounts


def test_every_mounted_file_exists_and_is_read_only() -> None:
    files = [mount for mount in mounts() if mount.source.startswith(".")]
    assert len(files) >= 7
    for mount in files:
        assert (ROOT / mount.source).exists(), mount
        assert mount.read_only, mount


def test_every_other_mount_is_a_declared_volume() -> None:
    used = {mount.source for mount in mounts() if not mount.source.startswith((".", "/"))}
    assert used == document()["volumes"].keys()
    system = [mount for mount in mounts() if mount.source.startswith("/")]
    assert {mount.source for mount in system} == {"/sys/fs/cgroup"}
    assert all(mount.read_only for mount in system)


# The agent and the engine


def agent_settings(name: str, *, on_host: bool = False) -> Any:
    variables = environment(name, SECRETS)
    if on_host:
        variables |= document(HOST)["services"][name]["environment"]
    return load(mounted(name, "/etc/goodput-agent/settings.yml"), variables)


@each_agent
def test_the_agent_accepts_its_settings_and_finds_what_they_name(name: str) -> None:
    service, settings = services()[name], agent_settings(name)
    assert settings.storage.publish_to == "postgresql://goodput:secret@postgres:5432/goodput"
    assert settings.otlp.forward_to == "grpc://tempo:4317"
    assert settings.reads_nvml is (name == "agent-gpu")
    assert settings.engines[0].gpus == ((0,) if name == "agent-gpu" else ())
    # Only with access to the host does it find the engine's processes.
    assert settings.engines[0].same_machine is None
    assert agent_settings(name, on_host=True).engines[0].same_machine is True
    inner = {port.split(":")[2] for port in service["ports"]}
    assert inner == {str(settings.listen.port), settings.proxy.listen.partition(":")[2]}
    assert settings.listen.host == "0.0.0.0"
    # Its file is in the volume, which is the folder in which it starts.
    (volume,) = (mount for mount in mounts() if mount[:2] == (name, "agent"))
    assert f"WORKDIR {volume.target}\n" in (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert not Path(settings.storage.file).is_absolute()
    assert service["image"] == f"goodput-agent:{agent.__version__}"
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


def test_the_demo_is_an_agent_in_all_but_its_engines() -> None:
    service, beside = services()["demo"], services()["agent-cpu"]
    settings = agent_settings("demo")
    assert service["command"] == ["demo", "--config", "/etc/goodput-agent/settings.yml"]
    for key in ("image", "read_only", "cap_drop", "security_opt", "networks", "depends_on"):
        assert service[key] == beside[key]
    ours = agent_settings("agent-cpu")
    for section in ("listen", "security", "storage"):
        assert getattr(settings, section) == getattr(ours, section)
    assert settings.otlp == ours.otlp
    assert settings.engines == ()
    (port,) = service["ports"]
    assert port.split(":")[2] == str(settings.listen.port)


def test_the_demo_starts_in_a_project_of_its_own_with_one_command(tmp_path: Path) -> None:
    folder = tmp_path / "deploy" / "compose"
    folder.mkdir(parents=True)
    for name in ("demo", "make-secrets"):
        shutil.copy(ROOT / "deploy" / "compose" / name, folder)
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$PWD" "$@"\n', encoding="utf-8")
    docker.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    asked = f"{tmp_path} compose --project-name goodput-demo --profile demo"
    for arguments, command in (
        ([], "up --detach --wait"),
        (["down", "--volumes"], "down --volumes"),
    ):
        done = subprocess.run(
            [folder / "demo", *arguments],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert done.stdout.splitlines()[0] == f"{asked} {command}"
    assert (tmp_path / ".env").exists()


def test_the_page_of_all_agents_reads_the_database_as_a_role_that_cannot_write() -> None:
    variables = environment("serve", SECRETS)
    settings = load(mounted("serve", "/etc/goodput-agent/serve.yml"), variables)
    agents = urlsplit(agent_settings("agent-cpu").storage.read_url)
    reader = urlsplit(settings.storage.read_url)
    assert (reader.hostname, reader.path) == (agents.hostname, agents.path)
    role = mounted("postgres", "/docker-entrypoint-initdb.d/grafana-reader.sh").read_text("utf-8")
    assert f"CREATE ROLE {reader.username} LOGIN" in role
    assert f"ALTER ROLE {reader.username} SET default_transaction_read_only = on" in role
    service = services()["serve"]
    assert service["image"] == services()["agent-cpu"]["image"]
    assert service["command"] == ["serve", "--config", "/etc/goodput-agent/serve.yml"]
    assert {port.split(":")[2] for port in service["ports"]} == {str(settings.listen.port)}
    assert settings.listen.host == "0.0.0.0"
    # The image's health check asks at the port of the environment.
    assert variables["GOODPUT_LISTEN__PORT"] == str(settings.listen.port)
    assert settings.security.read_tokens == Path("/run/tokens/read")
    assert mounted("serve", "/run/tokens") == mounted("agent-cpu", "/run/tokens")
    assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])


@pytest.mark.parametrize("name", ENGINES)
def test_the_engine_sends_every_span_to_the_agent_under_its_configured_name(name: str) -> None:
    settings = agent_settings("agent-cpu")
    (target,) = (
        argument.partition("=")[2]
        for argument in services()[name]["command"]
        if argument.startswith("--otlp-traces-endpoint=")
    )
    port = settings.otlp.grpc.partition(":")[2]
    assert target == f"http://agent:{port}"
    variables = environment(name, SECRETS)
    assert variables["OTEL_SERVICE_NAME"] == settings.engines[0].name
    assert variables["OTEL_TRACES_SAMPLER"] == "always_on"
    # As the exporter reads it, W3C Baggage.
    name, _, value = variables["OTEL_EXPORTER_OTLP_HEADERS"].partition("=")
    assert (name, unquote(value)) == ("authorization", "Bearer secret")


def test_spans_are_forwarded_to_the_trace_store() -> None:
    store = yaml.safe_load(mounted("tempo", "/etc/tempo/tempo.yml").read_text(encoding="utf-8"))
    grpc = store["distributor"]["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"]
    assert agent_settings("agent-cpu").otlp.forward_to.endswith(":" + grpc.partition(":")[2])
    (source,) = (source for source in datasources() if source["type"] == "tempo")
    assert urlsplit(source["url"]).port == store["server"]["http_listen_port"]
    written = [store["storage"]["trace"][part]["path"] for part in ("wal", "local")]
    (volume,) = (mount.target for mount in mounts() if mount.source == "tempo")
    assert all(Path(path).is_relative_to(volume) for path in written)


def test_every_host_in_the_settings_is_on_the_network() -> None:
    settings = agent_settings("agent-gpu")
    urls = [settings.engines[0].url, settings.otlp.forward_to, settings.storage.publish_to]
    urls += [source["url"] for source in datasources()]
    targets = re.findall(r'targets: \["(.+?)"\]', prometheus_text())
    hosts = {urlsplit(url if "://" in url else f"//{url}").hostname for url in [*urls, *targets]}
    assert len(hosts) >= 6
    assert hosts - {"127.0.0.1"} <= names_on_the_network()


@each_agent
def test_the_agent_and_prometheus_use_the_tokens_that_are_made(name: str) -> None:
    security = agent_settings(name).security
    assert not security.insecure
    (folder,) = {security.read_tokens.parent, security.ingest_tokens.parent}
    made = mounted(name, str(folder))
    assert {security.read_tokens.name, security.ingest_tokens.name} == {"read", "ingest"}
    (scrape,) = (
        job
        for job in yaml.safe_load(prometheus_text())["scrape_configs"]
        if job["job_name"] == "goodput-agent"
    )
    file = Path("/etc/prometheus") / scrape["authorization"]["credentials_file"]
    assert mounted("prometheus", str(file.parent)) == made
    assert file.name == "read"


# Prometheus and Alertmanager


def prometheus_text() -> str:
    return mounted("prometheus", "/etc/prometheus/prometheus.yml").read_text(encoding="utf-8")


def test_prometheus_accepts_its_configuration_with_the_rules(tmp_path: Path) -> None:
    for mount in mounts():
        if mount.service == "prometheus" and mount.source.startswith("."):
            inside = tmp_path / mount.target.lstrip("/")
            inside.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / mount.source).is_dir() else shutil.copy
            copy(ROOT / mount.source, inside)
    # The file that make-secrets writes.
    (tmp_path / "etc/prometheus/tokens/read").write_text("a token of the test")
    finished = subprocess.run(
        [program("promtool"), "check", "config", tmp_path / "etc/prometheus/prometheus.yml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rules = re.search(r"(\d+) rules found", finished.stdout)
    assert rules is not None
    assert int(rules[1]) > 30


def test_links_in_alerts_use_the_published_ports_of_the_agent_and_grafana() -> None:
    rules = mounted("prometheus", "/etc/prometheus/rules/goodput-agent.yml")
    text = rules.read_text(encoding="utf-8")
    for annotation, names in (("runbook_url", AGENTS), ("dashboard_url", ("grafana",))):
        (address,) = set(re.findall(rf"{annotation}: (http://localhost:\d+/\w+)", text))
        for name in names:
            ports = {port.split(":")[1] for port in services()[name]["ports"]}
            assert str(urlsplit(address).port) in ports
        assert urlsplit(address).path in ("/runbooks", "/d")


def test_alertmanager_accepts_its_configuration_and_can_deliver_every_alert() -> None:
    config = mounted("alertmanager", "/etc/alertmanager/alertmanager.yml")
    assert complaints_about_config(config) == ""
    # No receiver is configured yet, and no secret exists.
    receivers = yaml.safe_load(config.read_text(encoding="utf-8"))["receivers"]
    assert all(list(receiver) == ["name"] for receiver in receivers)


def test_alertmanager_finds_the_secrets_of_configured_receivers() -> None:
    everyone = Receivers(
        pagerduty=True, slack_pages="#p", webhook="https://w.test", webhook_token=True
    )
    files = {Path(file) for file in re.findall(r"_file': '(.+?)'", str(everyone.configured()))}
    (folder,) = {file.parent for file in files}
    note = (mounted("alertmanager", str(folder)) / ".gitignore").read_text(encoding="utf-8")
    assert len(files) == 3
    assert all(file.name in note for file in files)


# Grafana


def provisioned(kind: str) -> dict[str, Any]:
    folder = mounted("grafana", DATASOURCES) / kind
    (path,) = folder.glob("*.yml")
    found: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found


def datasources() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = provisioned("datasources")["datasources"]
    return found


def test_grafana_opens_with_the_fleet() -> None:
    home = Path(services()["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    board = mounted("grafana", str(home.parent)) / home.name
    assert json.loads(board.read_text(encoding="utf-8"))["uid"] == "goodput-fleet"


def test_grafana_links_an_exemplar_to_its_trace() -> None:
    by_uid = {source["uid"]: source for source in datasources()}
    (link,) = by_uid["prometheus"]["jsonData"]["exemplarTraceIdDestinations"]
    assert link["name"] == "trace_id"
    assert by_uid[link["datasourceUid"]]["type"] == "tempo"
    assert "--enable-feature=exemplar-storage" in services()["prometheus"]["command"]


def test_grafana_uses_a_read_only_database_role() -> None:
    (source,) = (
        source for source in datasources() if source["type"] == "grafana-postgresql-datasource"
    )
    assert source["user"] == "grafana_reader"
    assert source["secureJsonData"] == {"password": "$GRAFANA_READER_PASSWORD"}
    assert "GRAFANA_READER_PASSWORD" in environment("grafana", SECRETS)
