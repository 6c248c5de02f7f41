"""The evidence of an audit, from a recorded engine, the API of an agent and a scripted driver."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from math import inf
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]
import pytest

from agent import auditing
from agent.agent_api import open_agent
from agent.analysis.audit import audit
from agent.analysis.joined_record import served_row
from agent.analysis.setup_steps import SetupStep, StepName
from agent.audited_setup import steps_of_agent, steps_of_evidence
from agent.auditing import AuditOptions, gather
from agent.catalog import engine_facts as fact
from agent.catalog.causes import Cause
from agent.catalog.hardware import Precision
from agent.errors import SettingsInvalid
from agent.records.audit import AuditEvidence, CommandLine, EvidencePart, LoadHistory
from agent.records.engine import HistogramSnapshot, ServedRequest
from agent.records.engine_counts import EngineCounts, GaugeSum
from agent.records.gpu import FactKey
from agent.records.objective import CauseShare, ExplainedRequest, Explanation
from agent.records.request import ProxyView, Status, Vantage
from agent.settings import Settings
from agent.sources.host.processes import EngineProcesses
from tests.outputs.api.serving import Api, open_api
from tests.real_parts.ports import free_port
from tests.records.making import judged, objective, record
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer
from tests.sources.model_config.published import PUBLISHED
from tests.sources.nvml.fake_driver import FakeDriver, build
from tests.store.making import ended_request

MODELS = b'{"data": [{"id": "tiny-llama", "max_model_len": 2048}]}'


@pytest.fixture
def vllm() -> Iterator[EngineServer]:
    """A recorded vLLM."""
    with EngineServer() as engine:
        # Without its start, so that rows of any time are of this start.
        page = body("vllm-0.32.0").replace(b"process_start_time_seconds 1", b"# ")
        engine.answers("/metrics", page)
        engine.answers("/version", b'{"version": "0.32.0"}')
        engine.answers("/v1/models", MODELS)
        engine.answers("/health", b"")
        yield engine


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """The API of an agent that watches one engine."""
    with open_api(tmp_path) as opened:
        opened.agent.now = time.time()
        watches(opened, "chat-0")
        yield opened


def watches(api: Api, *names: str) -> None:
    """The agent watches these engines."""
    api.agent.engines = [
        {"agent": "a", "name": name, "up": True, "model": None, "dialect": None, "read_at": None}
        for name in names
    ]


def gathered(
    vllm: EngineServer,
    api: Api | None,
    *,
    nvml: bool = False,
    send: bool = False,
    wait_s: float = 9,
    **configured: str,
) -> AuditEvidence:
    settings = Settings.model_validate(
        {
            "nvml": {"enabled": nvml},
            "listen": {"port": free_port()},
            "engines": [{"name": "chat-0", "url": vllm.url, **configured}],
        }
    )
    return gather(
        AuditOptions(
            url=vllm.url,
            settings=settings,
            step=lambda _: None,
            agent_url=None if api is None else api.url,
            send=send,
            wait_s=wait_s,
        )
    )


def finding(of: AuditEvidence, name: str) -> str:
    """What a check finds in the evidence."""
    return next(line.result.finding for line in audit(of) if line.check.name == name)


def test_the_agent_tells_lengths_and_views_of_the_engine(vllm: EngineServer, api: Api) -> None:
    api.store(
        [
            record(1, input_tokens=2000, output_tokens=48),
            record(2, vantage=Vantage.PROXY),
            record(3, engine="other-0", input_tokens=9),
            record(4, output_tokens=None),
        ],
        [objective()],
    )
    found = gathered(vllm, api)
    assert found.agent is not None
    assert sorted(found.agent.lengths) == [(100, 21), (2000, 48)]
    assert found.agent.engine_views == 2
    assert finding(found, "--max-model-len") == "fail"
    assert finding(found, "single requests") == "pass"
    assert vllm.posted == []


def test_the_agent_tells_which_requests_found_the_engine_cold(vllm: EngineServer, api: Api) -> None:
    slow = [record(number, ttft_s=9.0) for number in (1, 2, 3)]
    api.store(slow, [objective()])
    for one, cause in zip(judged(slow), (Cause.COLD_START, Cause.BURST), strict=False):
        share = CauseShare("chat", "ttft", cause, 1.0, ("seen",))
        ids = one.record.trace_id, one.record.span_id
        api.explain(ExplainedRequest(one, Explanation(*ids, cause, (share,), ("span",))))
    found = gathered(vllm, api)
    assert found.agent is not None
    assert found.agent.cold == 1
    assert finding(found, "warm-up") == "warn"


def test_the_agent_tells_the_load_of_the_last_hour(vllm: EngineServer, api: Api) -> None:
    without = gathered(vllm, api).agent
    assert without is not None
    assert without.load is None
    gauges: dict[FactKey, GaugeSum] = {
        (fact.REQUESTS_RUNNING.name, ()): GaugeSum(1500.0, 600.0, 4.0),
        (fact.REQUESTS_WAITING.name, ()): GaugeSum(7200.0, 600.0, 30.0),
        (fact.KV_CACHE_USAGE.name, ()): GaugeSum(150.0, 600.0, 0.5),
    }
    # Of 20 requests 18 waited 0.3 s at most, and two longer than 2.5 s.
    waits = HistogramSnapshot((0.3, 2.5, 5.0, inf), (18.0, 18.0, 20.0, 20.0), 10.0)
    counts = EngineCounts(covered_s=600.0, gauges=gauges, histograms={fact.QUEUE_TIME.name: waits})
    api.store_engine_sample("chat-0", api.agent.now - 30.0, counts)
    by_engine = gathered(vllm, api)
    assert by_engine.agent is not None
    assert by_engine.agent.load == LoadHistory(
        covered_s=600.0, running=2.5, waiting=12.0, cache_usage=0.25,
        waited_over_s=2.5, waited_within_s=5.0,
    )  # fmt: skip
    assert finding(by_engine, "queue") == "warn"
    api.store([record(1, queue_s=0.04, ended_at=api.agent.now - 60.0)], [objective()])
    by_rows = gathered(vllm, api).agent
    assert by_rows is not None
    assert by_rows.load is not None
    assert by_rows.load.waited_over_s == by_rows.load.waited_within_s
    assert by_rows.load.waited_over_s == pytest.approx(0.04, rel=0.02)


def steps_of(
    vllm: EngineServer, model_config: Path | None = None, api: Api | None = None
) -> dict[str, SetupStep]:
    """The steps by the evidence of an audit, without an agent or with one that has no steps."""
    configured = {} if model_config is None else {"model_config": str(model_config)}
    engine = {"name": "chat-0", "url": vllm.url, **configured}
    settings = Settings.model_validate({"nvml": {"enabled": False}, "engines": [engine]})
    found = gathered(vllm, api, nvml=False, send=False, wait_s=9, **configured)
    return {step.name: step for step in steps_of_evidence(found, settings, settings.engines[0])}


def test_without_an_agent_the_next_step_follows_from_the_evidence(
    vllm: EngineServer, tmp_path: Path
) -> None:
    steps = steps_of(vllm)
    assert steps["metrics"].state == "done"
    assert "proxy" not in steps
    assert steps["spans"].actions[0].lines == (
        "OTEL_SERVICE_NAME=chat-0 OTEL_TRACES_SAMPLER=always_on vllm serve tiny-llama "
        "--otlp-traces-endpoint http://127.0.0.1:4317",
    )
    assert steps["model config"].state == "missing"
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]))
    assert steps_of(vllm, model_config=path)["model config"].state == "done"


def test_the_proxy_is_missing_until_the_agent_has_a_request_through_it(
    vllm: EngineServer, api: Api
) -> None:
    api.store([record(1)], [objective()])
    assert steps_of(vllm, api=api)["proxy"].state == "missing"
    api.store([record(2, vantage=Vantage.PROXY)], [objective()])
    assert steps_of(vllm, api=api)["proxy"].state == "done"


def test_requests_that_a_front_measured_came_by_no_span_and_no_proxy(
    vllm: EngineServer, api: Api
) -> None:
    seen = record(1, vantage=Vantage.PROXY, proxied=ProxyView(), parent_span_id=None)
    api.store([served_row(ServedRequest(seen, (ended_request(),)))], [objective()])
    found = gathered(vllm, api)
    assert found.agent is not None
    assert (found.agent.engine_views, found.agent.proxy_views, found.agent.in_front) == (1, 1, 1)
    steps = steps_of(vllm, api=api)
    assert (steps["spans"].state, steps["proxy"].state) == ("missing", "missing")


def test_the_steps_that_the_agent_knows_are_those_of_the_engines_name_or_of_its_only_engine(
    api: Api,
) -> None:
    row = {"agent": "a", "dialect": "vllm", "version": None, "model": None}
    chat_0, chat_1 = (
        SetupStep(name=step, state="missing", shows="users", actions=())
        for step in (StepName.PROXY, StepName.GPU)
    )
    first = {**row, "engine": "chat-0", "steps": (chat_0,)}
    second = {**row, "engine": "chat-1", "steps": (chat_1,)}
    cases: list[tuple[list[Mapping[str, Any]], str, Sequence[SetupStep]]] = [
        ([], "chat-0", ()),
        ([first], "engine-0", [chat_0]),
        ([first, second], "chat-1", [chat_1]),
        ([first, second], "engine-0", ()),
    ]
    for setups, engine, steps in cases:
        api.agent.setups = setups
        with open_agent(api.url, None, None) as asked:
            assert steps_of_agent(asked, engine) == steps


def test_an_agent_of_other_engines_says_nothing_of_this_one(vllm: EngineServer, api: Api) -> None:
    watches(api, "a-0", "b-0")
    found = gathered(vllm, api)
    assert found.agent is None
    assert found.unread[EvidencePart.AGENT] == (
        "the agent watches a-0, b-0; --config says which it is"
    )


def test_an_agent_that_does_not_run_is_unknown_unless_it_was_named(vllm: EngineServer) -> None:
    assert "no agent responds at" in gathered(vllm, None).unread[EvidencePart.AGENT]
    with pytest.raises(SettingsInvalid, match="no agent responds at"):
        gather(
            AuditOptions(
                url=vllm.url,
                settings=Settings.model_validate({"nvml": {"enabled": False}}),
                step=lambda _: None,
                agent_url=f"http://127.0.0.1:{free_port()}",
            )
        )


@pytest.mark.parametrize("vantage", [Vantage.PROXY, Vantage.JOINED])
def test_the_proxy_tells_after_how_long_clients_left(
    vllm: EngineServer, api: Api, vantage: Vantage
) -> None:
    # Spans alone do not.
    api.store([record(7)], [objective()])
    spans = gathered(vllm, api)
    assert spans.agent is not None
    assert spans.agent.left_after_s is None
    assert finding(spans, "client time-outs") == "unknown"
    left = [
        record(number, vantage=vantage, status=Status.CANCELLED, e2e_s=30.0) for number in range(5)
    ]
    api.store([*left, record(9, engine="other-0")], [objective()])
    found = gathered(vllm, api)
    assert found.agent is not None
    assert found.agent.requests == 6
    assert found.agent.left_after_s == pytest.approx([30.0] * 5)
    assert finding(found, "client time-outs") == "warn"


def test_the_format_of_weights_is_that_of_the_configured_model_or_unknown_with_the_reason(
    vllm: EngineServer, tmp_path: Path
) -> None:
    without = gathered(vllm, None).unread[EvidencePart.WEIGHTS]
    assert without == "the settings name no config.json of the model"
    path = tmp_path / "config.json"
    path.write_text("{")
    unread = gathered(vllm, None, model_config=str(path)).unread
    assert "cannot be read as JSON" in unread[EvidencePart.WEIGHTS]
    path.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]["config"]))
    plain = gathered(vllm, None, model_config=str(path)).model
    narrow = gathered(vllm, None, model_config=str(path), dtype="fp8").model
    assert plain is not None
    assert narrow is not None
    assert (plain.compute, narrow.compute) == (Precision.BF16, Precision.FP8)


def test_of_an_unknown_architecture_the_step_says_what_its_files_give(
    vllm: EngineServer, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "strange", "num_hidden_layers": 2, "torch_dtype": "bfloat16"})
    )
    said = steps_of(vllm, model_config=config)["model config"].actions[0].where
    assert said.startswith("the model architecture 'strange' is unknown")
    names = ("model.embed_tokens.weight", "lm_head.weight")
    index = {"metadata": {"total_size": 1000}, "weight_map": dict.fromkeys(names, "model-1")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    said = steps_of(vllm, model_config=config)["model config"].actions[0].where
    assert said.startswith("the architecture 'strange' is unknown, and MFU with it; its files")


def completes(vllm: EngineServer, api: Api, lead_s: float = 0.0, *, in_front: bool = False) -> None:
    """The engine completes a request, and its row comes with a clock that is ahead: that of its
    span, or that of its front."""

    def complete(handler: BaseHTTPRequestHandler) -> None:
        now = time.time() + lead_s
        row = record(7, request_id="cmpl-7-0", started_at=now, ended_at=now)
        if in_front:
            seen = row._replace(vantage=Vantage.PROXY, proxied=ProxyView())
            row = served_row(ServedRequest(seen, (ended_request(request_id="cmpl-7-0"),)))
        api.store([row], [objective()])
        vllm.answers("/completed", b'{"id": "cmpl-7"}')
        vllm.scripts["/completed"](handler)

    vllm.scripts["/v1/completions"] = complete


@pytest.mark.parametrize("lead_s", [0.0, 30.0, -30.0])
def test_the_span_of_the_request_is_awaited_and_its_clock_compared(
    vllm: EngineServer, api: Api, lead_s: float
) -> None:
    completes(vllm, api, lead_s)
    found = gathered(vllm, api, send=True)
    assert found.trial is not None
    assert found.trial.lead_s is not None
    # The request itself takes a while, and within that nobody can tell.
    took_s = found.trial.ended_at - found.trial.sent_at
    assert abs(lead_s) - took_s <= abs(found.trial.lead_s) <= abs(lead_s)
    assert found.trial.lead_s * lead_s >= 0
    assert finding(found, "clocks") == ("pass" if lead_s == 0 else "fail")


@pytest.mark.parametrize(("heard", "waits"), [(True, True), (False, False), (None, False)])
def test_without_spans_the_row_of_a_plugin_that_is_heard_is_awaited(
    vllm: EngineServer,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
    heard: bool | None,
    waits: bool,
) -> None:
    seen = EngineProcesses(command_line=CommandLine(flags={}, limits={}))
    monkeypatch.setattr(auditing, "read_processes", lambda *_: seen)
    monkeypatch.setattr(auditing, "_plugin", lambda *_: heard)
    completes(vllm, api, in_front=True)
    found = gathered(vllm, api, send=True)
    assert found.trial is not None
    assert found.trial.in_front is waits
    assert finding(found, "single requests") == ("pass" if waits else "fail")


def test_a_span_that_does_not_come_is_not_waited_for_for_ever(vllm: EngineServer, api: Api) -> None:
    vllm.answers("/v1/completions", b'{"id": "cmpl-7"}')
    found = gathered(vllm, api, send=True, wait_s=0.3)
    assert found.trial is not None
    assert found.trial.waited_s >= 0.3
    assert finding(found, "single requests") == "fail"


@pytest.mark.slow
def test_gpus_are_read_through_their_driver(
    vllm: EngineServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    driver = FakeDriver(build(tmp_path))
    driver.install()
    driver.do("gpus 2")
    checks = ("memory errors", "clocks held down", "persistence mode", "CUDA graphs")
    found = gathered(vllm, None, nvml=True)
    assert [finding(found, name) for name in checks] == ["pass", "pass", "pass", "unknown"]
    driver.do("field 1 4 3", f"set 0 throttle {0x40}", "set 1 persistence 0")
    found = gathered(vllm, None, nvml=True)
    assert [finding(found, name) for name in checks] == ["fail", "fail", "warn", "unknown"]
