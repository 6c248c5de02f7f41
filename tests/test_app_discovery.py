"""Engines that are found in pods: the agent watches those of now, and starts anew for others."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
import yaml
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from agent.app import processes
from agent.app.discovery import EngineDiscovery, discovery_of
from agent.app.supervising import Plan, Trial
from agent.catalog.own_health import DiscoveryCall, DiscoveryFailure
from agent.errors import SettingsInvalid
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from agent.settings import Settings, load
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.span_sender import request_span
from tests.real_parts.waiting import eventually
from tests.sources.dcgm.exporter_pages import page_of, row
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer
from tests.sources.kubernetes.fake_api_server import (
    LABELS,
    TOKEN,
    FakeApiServer,
    api_server,
    pod,
)

WITHIN_S = 120.0


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with api_server() as fake:
        yield fake


@pytest.fixture
def account(tmp_path: Path) -> Path:
    """The folder of a service account."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text(TOKEN, encoding="utf-8")
    (folder / "ca.crt").touch()
    return folder


def kubernetes(server: FakeApiServer, account: Path, **more: Any) -> dict[str, Any]:
    """The setting `engines_from`."""
    found = {"api": server.url, "service_account": str(account), "namespaces": ["llm"], **more}
    return {"kubernetes": {"selector": "app.kubernetes.io/name=vllm", "port": 8000, **found}}


def settings_with(folder: Path, **sections: Any) -> Settings:
    file = folder / "settings.yml"
    file.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return load(file, {})


def discovery(folder: Path, **sections: Any) -> EngineDiscovery:
    found = discovery_of(settings_with(folder, **sections), settles_after_s=0.05)
    assert found is not None
    return found


def engines(found: EngineDiscovery) -> Mapping[str, str]:
    return {engine.name: engine.url for engine in found.settings().engines}


# What is found


def test_engines_that_were_found_are_beside_those_of_the_settings(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    for name in ("chat-1", "chat-0", "fixed"):
        server.put(pod(name))
    fixed = {"name": "fixed", "url": "http://127.0.0.1:9000"}
    own = {"kind": "vllm", "scrape_interval": "9s", "model_config": "/models/chat"}
    found = discovery(tmp_path, engines=[fixed], engines_from=kubernetes(server, account, **own))
    assert engines(found) == {"fixed": "http://127.0.0.1:9000"}
    found.read_first()
    assert list(engines(found).items()) == [
        ("fixed", "http://127.0.0.1:9000"),
        ("chat-0", "http://10.0.0.1:8000"),
        ("chat-1", "http://10.0.0.1:8000"),
    ]
    chat = found.settings().engines[1]
    assert (chat.kind, chat.scrape_interval) == ("vllm", 9.0)
    assert (chat.pod, chat.model_config_path) == ("llm/chat-0", Path("/models/chat"))
    assert found.status_text() == "ok"


@pytest.mark.parametrize(
    ("setting", "labels"),
    [
        ({}, {"prefill-0": "prefill", "decode-0": "decode", "whole-0": "prefill-decode"}),
        (
            {"role_label": "disaggregatedset.x-k8s.io/role"},
            {"prefill-0": "prefill", "decode-0": "decode", "whole-0": "router"},
        ),
    ],
    ids=["llm-d and KServe", "LWS"],
)
def test_the_role_of_an_engine_is_that_of_a_label_of_its_pod(
    server: FakeApiServer,
    account: Path,
    tmp_path: Path,
    setting: dict[str, str],
    labels: dict[str, str],
) -> None:
    label = setting.get("role_label", "llm-d.ai/role")
    for name, role in labels.items():
        server.put(pod(name, labels={**LABELS, label: role}))
    server.put(pod("other-0", labels={**LABELS, "another/role": "prefill"}))
    found = discovery(tmp_path, engines_from=kubernetes(server, account, **setting))
    found.read_first()
    assert {engine.name: engine.role for engine in found.settings().engines} == {
        "decode-0": "decode",
        "other-0": "both",
        "prefill-0": "prefill",
        "whole-0": "both",
    }


def test_pods_of_one_name_are_told_apart_by_their_namespace(
    server: FakeApiServer, account: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(pod("chat-0"))
    server.put(pod("chat-0", namespace="test"))
    both = {"namespaces": ["llm", "test"]}
    found = discovery(tmp_path, engines_from=kubernetes(server, account, **both))
    found.read_first()
    assert engines(found).keys() == {"chat-0"}
    assert "two pods are named chat-0" in caplog.text
    full = kubernetes(server, account, name="namespace/pod", **both)
    found = discovery(tmp_path, engines_from=full)
    found.read_first()
    assert engines(found).keys() == {"llm/chat-0", "test/chat-0"}


def test_a_pod_with_a_name_too_long_for_an_engine_is_left_out(
    server: FakeApiServer, account: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.put(pod("x" * 101))
    server.put(pod("chat-0"))
    found = discovery(tmp_path, engines_from=kubernetes(server, account))
    found.read_first()
    assert engines(found).keys() == {"chat-0"}
    assert f"the pod {'x' * 101} is not watched" in caplog.text


def test_what_fails_is_said_and_the_other_namespaces_are_watched(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    server.refuse(403, "pods is forbidden")
    found = discovery(tmp_path, engines_from=kubernetes(server, account))
    found.read_first()
    assert engines(found) == {}
    assert found.status_text() == "the API server answers 403: pods is forbidden"


def published(found: EngineDiscovery, name: str, **labels: str) -> float:
    """The value of a metric of discovery; KeyError where it has none."""
    meter = Meter((), [])
    found.publish(meter)
    body, _ = AgentExposition(meter, ("agent-0", "1.2.3", "false")).render("text/plain")
    return total(body.decode(), name, **labels)


def test_engines_found_failed_calls_and_the_last_success_are_published(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    success = "llm_agent_discovery_success_timestamp_seconds"
    failures = "llm_agent_discovery_failures_total"
    server.put(pod("chat-0"))
    server.put(pod("chat-1"))
    found = discovery(tmp_path, engines_from=kubernetes(server, account))
    with pytest.raises(KeyError):
        published(found, success)
    before = time.time()
    found.read_first()
    assert before <= published(found, success, namespace="llm") <= time.time()
    assert published(found, "llm_agent_discovered_engines", namespace="llm") == 2
    # Of each kind, so that an alert sees the first one.
    for call, reason in product(DiscoveryCall, DiscoveryFailure):
        assert published(found, failures, call=call, reason=reason) == 0
    server.refuse(403, "pods is forbidden")
    found.read_first()
    assert published(found, failures, namespace="llm", call="list", reason="forbidden") == 1
    assert published(found, failures) == 1
    # What was known last counts on.
    assert published(found, "llm_agent_discovered_engines", namespace="llm") == 2


def test_engines_of_every_namespace_are_published_as_one_number(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    server.put(pod("chat-0"))
    server.put(pod("chat-1", namespace="test"))
    found = discovery(tmp_path, engines_from=kubernetes(server, account, namespaces=[]))
    found.read_first()
    assert published(found, "llm_agent_discovered_engines", namespace="all") == 2


# When others must be watched


def test_other_engines_are_told_once(
    server: FakeApiServer,
    account: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.sources.kubernetes.FIRST_PAUSE_S", 0.01)
    server.put(pod("chat-0"))
    found = discovery(tmp_path, engines_from=kubernetes(server, account))
    found.read_first()
    told = threading.Semaphore(0)
    found.start(told.release)
    # Neither a pod that loads its model nor one that hangs changes what must be watched.
    server.put(pod("chat-1", ready=False))
    server.put(pod("chat-0", ready=False, restarts=1))
    eventually(server.watches, within_s=WITHIN_S, what="a watch")
    server.put(pod("chat-1"))
    server.put(pod("chat-2"))
    assert told.acquire(timeout=WITHIN_S)
    eventually(lambda: len(engines(found)) == 3, within_s=WITHIN_S, what="three engines")
    found.stop()
    server.refuse(503, "the test is over")
    assert not told.acquire(blocking=False)


# Settings


def test_engines_that_are_found_have_no_proxy(tmp_path: Path) -> None:
    section = {"kubernetes": {"selector": "app=vllm"}}
    engine = {"name": "fixed", "url": "http://127.0.0.1:9000"}
    with pytest.raises(SettingsInvalid, match="engines that are found have no proxy"):
        settings_with(
            tmp_path, engines=[engine], engines_from=section, proxy={"listen": "127.0.0.1:8080"}
        )


def test_outside_of_a_cluster_the_address_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsInvalid, match=r"set engines_from\.kubernetes\.api"):
        discovery_of(settings_with(tmp_path, engines_from={"kubernetes": {"selector": "app=x"}}))


# A supervisor of the agent


@pytest.mark.parametrize(("asked_to_stop", "done"), [(False, ["stop", "become"]), (True, ["stop"])])
def test_after_a_trial_an_agent_without_a_proxy_starts_anew(
    monkeypatch: pytest.MonkeyPatch, asked_to_stop: bool, done: list[str]
) -> None:
    seen: list[str] = []

    class Reloading:
        """A supervisor whose trial succeeds at once."""

        def __init__(self, groups: Any, trial: Any, reload: Callable[[Any, Plan], None]) -> None:
            self.asked_to_stop = asked_to_stop
            self.reload = reload

        def run(self) -> int:
            self.reload(self, Plan(None, 1))
            return 0

        def stop(self) -> None:
            seen.append("stop")

    monkeypatch.setattr(processes, "Supervisor", Reloading)
    monkeypatch.setattr("os.execv", lambda *_: seen.append("become"))
    assert processes.run_again(lambda: 0, _no_trial) == 0
    assert seen == done


def _no_trial() -> Trial:
    raise AssertionError("nothing is tried")


# The running agent


def states(url: str) -> dict[str, bool]:
    """Whether each engine of the running agent is up; empty while it does not answer."""
    try:
        items = requests.get(f"{url}/api/v1/engines", timeout=WITHIN_S).json()["items"]
    except requests.RequestException:
        return {}
    return {item["name"]: item["up"] for item in items}


def engine_of_row(agent: AgentProcess, port: int, service: str) -> Any:
    """The engine of the row of a span that this service sends."""
    span = request_span(service)
    export = ExportTraceServiceRequest()
    resource = export.resource_spans.add()
    resource.resource.attributes.append(
        KeyValue(key="service.name", value=AnyValue(string_value=service))
    )
    resource.scope_spans.add().spans.append(span)
    sent = export.SerializeToString()
    kind = {"Content-Type": "application/x-protobuf"}
    url = f"http://127.0.0.1:{port}/v1/traces"
    requests.post(url, data=sent, headers=kind, timeout=WITHIN_S).raise_for_status()
    return agent.api.request(service)["engine"]


def listening(agent: AgentProcess) -> list[int]:
    """The ports at which any process of the agent listens."""
    processes = [psutil.Process(agent.pid), *agent.children()]
    found = {each.pid: each.net_connections() for each in processes}
    return sorted(c.laddr.port for each in found.values() for c in each if c.status == "LISTEN")


@pytest.mark.slow
def test_the_running_agent_watches_the_pods_of_now(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    ports = AgentPorts.free()
    with EngineServer() as engine:
        engine.answers("/metrics", body("vllm-0.32.0"))
        number = int(engine.address.rpartition(":")[2])
        section = kubernetes(server, account, port=number)
        agent = AgentProcess.with_settings(tmp_path, ports, {"engines_from": section})
        with agent:
            assert states(agent.url) == {}
            before = agent.pid
            server.put(pod("chat-0", ip="127.0.0.1"))
            eventually(lambda: states(agent.url), within_s=WITHIN_S, what="an engine")
            assert states(agent.url) == {"chat-0": True}
            assert engine_of_row(agent, ports.http, "chat-0") == "chat-0"
            assert engine_of_row(agent, ports.http, "not-known-yet") is None
            # Of the earlier process no socket is left.
            assert agent.pid != before
            assert listening(agent) == sorted([ports.listen, ports.grpc, ports.http])
            parts = requests.get(f"{agent.url}/readyz", timeout=WITHIN_S).json()["parts"]
            assert (parts["discovery"], parts["engines"]) == ("ok", "ok")
            shown = total(agent.api.exposition(), "llm_agent_discovered_engines", namespace="llm")
            assert shown == len(agent.api.json("/api/v1/engines", {})["items"])


def steps(agent: AgentProcess) -> dict[str, Mapping[str, str]]:
    """What is seen of each engine of the running agent: the state of each step."""
    try:
        items = agent.api.json("/api/v1/setup", {})["items"]
    except requests.RequestException:
        return {}
    return {row["engine"]: {s["name"]: s["state"] for s in row["steps"]} for row in items}


@pytest.mark.slow
def test_pods_have_the_gpus_and_prices_that_an_exporter_shows(
    server: FakeApiServer, account: Path, tmp_path: Path
) -> None:
    page = page_of(
        row("DCGM_FI_DEV_GPU_TEMP", 30, 0, namespace="llm", pod="chat-0"),
        row("DCGM_FI_DEV_GPU_TEMP", 30, 1, namespace="llm", pod="code-0"),
    )
    with EngineServer() as engine:
        engine.answers("/metrics", body("vllm-0.32.0"))
        engine.answers("/gpus", page)
        number = int(engine.address.rpartition(":")[2])
        for name in ("chat-0", "idle-0"):
            server.put(pod(name, ip="127.0.0.1"))
        sections = {
            "engines_from": kubernetes(server, account, port=number),
            "dcgm": {"url": f"{engine.url}/gpus"},
            "prices": [{"gpu": "NVIDIA H200", "gpu_hour_usd": 2.5}],
        }
        with AgentProcess.with_settings(tmp_path, AgentPorts.free(), sections) as agent:

            def has_gpus() -> bool:
                return steps(agent).get("chat-0", {}).get("GPU") == "done"

            eventually(has_gpus, within_s=WITHIN_S, what="a GPU of the pod")
            assert steps(agent)["chat-0"]["price"] == "done"
            assert steps(agent)["idle-0"]["GPU"] == "missing"
