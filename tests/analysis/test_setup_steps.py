"""The steps of an engine's setup, over a table of what is known of it."""

import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml

from agent.analysis.setup_steps import (
    SetupFacts,
    SetupStep,
    SpansTarget,
    StepName,
    next_step_text,
    setup_steps,
    spans_target,
)
from agent.settings import Settings

TARGET = SpansTarget(url="http://127.0.0.1:4317")
PLAIN = SetupFacts(
    engine="chat-0",
    url="http://127.0.0.1:8000",
    program="vllm",
    version="0.32.0",
    model="Qwen/Qwen3-8B",
    seen=frozenset({StepName.METRICS}),
    spans=TARGET,
    gpus=(0, 1),
)
SPANS_LINE = (
    "OTEL_SERVICE_NAME=chat-0 OTEL_TRACES_SAMPLER=always_on vllm serve Qwen/Qwen3-8B "
    "--otlp-traces-endpoint http://127.0.0.1:4317"
)


def step(facts: SetupFacts, name: StepName) -> SetupStep:
    return next(each for each in setup_steps(facts) if each.name is name)


def lines(facts: SetupFacts, name: StepName) -> list[str]:
    """All lines to paste for a step."""
    return [line for action in step(facts, name).actions for line in action.lines]


def texts(facts: SetupFacts, name: StepName) -> str:
    return "; ".join(action.where for action in step(facts, name).actions)


def names(facts: SetupFacts, state: str) -> list[str]:
    return [each.name for each in setup_steps(facts) if each.state == state]


def test_what_is_seen_is_done_and_the_rest_is_missing_in_order() -> None:
    assert names(PLAIN, "done") == ["metrics"]
    assert names(PLAIN, "missing") == [
        "plugin", "spans", "proxy", "GPU", "price", "model config", "log",
    ]  # fmt: skip
    everything = replace(PLAIN, seen=frozenset(StepName))
    assert names(everything, "missing") == []
    assert all(each.actions == () for each in setup_steps(everything))


@pytest.mark.parametrize(
    ("seen", "in_front", "needed"),
    [
        ({StepName.PLUGIN}, True, []),
        # It was heard of, and no request has come yet.
        ({StepName.PLUGIN}, None, []),
        # GOODPUT_AGENT_MIDDLEWARE=off: only a proxy sees what users got.
        ({StepName.PLUGIN}, False, ["proxy"]),
        # The engine has lost its plugin.
        (set(), True, ["plugin", "spans", "proxy"]),
    ],
)
def test_an_engine_with_the_plugin_needs_no_spans_and_mostly_no_proxy(
    seen: set[StepName], in_front: bool | None, needed: list[str]
) -> None:
    facts = replace(PLAIN, seen=PLAIN.seen | seen, measured_in_front=in_front)
    assert names(facts, "missing") == [*needed, "GPU", "price", "model config", "log"]
    assert names(facts, "done") == ["metrics", *seen]


def test_spans_and_a_proxy_that_are_there_beside_the_plugin_are_shown() -> None:
    all_three = frozenset({StepName.PLUGIN, StepName.SPANS, StepName.PROXY})
    facts = replace(PLAIN, seen=all_three, measured_in_front=True)
    assert names(facts, "done") == ["plugin", "spans", "proxy"]


def test_a_rust_frontend_loads_no_plugin() -> None:
    facts = replace(PLAIN, rust_frontend=True)
    assert lines(facts, StepName.PLUGIN) == []
    assert "Rust frontend loads no plugins" in texts(facts, StepName.PLUGIN)


def test_spans_of_vllm_have_the_name_the_model_and_the_address_in_effect() -> None:
    assert lines(PLAIN, StepName.SPANS) == [SPANS_LINE]
    assert lines(replace(PLAIN, model=None), StepName.SPANS) == [
        SPANS_LINE.replace("Qwen/Qwen3-8B", "MODEL")
    ]
    hostile = replace(PLAIN, engine="a b", model="$(reboot)")
    assert "OTEL_SERVICE_NAME='a b'" in lines(hostile, StepName.SPANS)[0]
    assert "'$(reboot)'" in lines(hostile, StepName.SPANS)[0]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"program": None}, "first let the agent read the engine's metrics"),
        ({"rust_frontend": True}, "Rust frontend refuses --otlp-traces-endpoint"),
        ({"version": "0.9.2"}, "vLLM 0.9.2 may send none"),
    ],
)
def test_an_engine_that_can_send_no_spans_gets_a_reason_and_no_line(
    known: dict[str, Any], why: str
) -> None:
    facts = replace(PLAIN, **known)
    assert lines(facts, StepName.SPANS) == []
    assert why in texts(facts, StepName.SPANS)


def test_statistics_that_are_off_must_be_on_before_spans() -> None:
    off = replace(PLAIN, seen=frozenset(), statistics_off=True)
    assert lines(off, StepName.METRICS) == ["--disable-log-stats"]
    for step in (StepName.SPANS, StepName.PLUGIN):
        assert "restart vLLM without --disable-log-stats, with" in texts(off, step)


def test_sglang_loads_the_plugin_and_sends_no_spans() -> None:
    other = replace(PLAIN, program="sglang", plugin_socket="/run/a.sock")
    assert names(other, "missing") == ["plugin", "proxy", "GPU", "price", "model config", "log"]
    assert lines(other, StepName.PLUGIN) == [
        "pip install ./plugins/vllm", "GOODPUT_AGENT_SOCKET=/run/a.sock",
    ]  # fmt: skip
    found = replace(other, plugin_socket=None)
    assert lines(found, StepName.PLUGIN) == ["pip install ./plugins/vllm"]
    assert "restart SGLang with --enable-metrics" in texts(found, StepName.PLUGIN)
    assert "in SGLang's environment" in texts(other, StepName.PLUGIN)
    assert "vLLM" not in texts(other, StepName.PLUGIN)


@pytest.mark.parametrize("program", ["tgi", "trtllm", "llamacpp"])
def test_other_engines_have_neither_spans_nor_a_plugin(program: str) -> None:
    other = replace(PLAIN, program=program)
    assert names(other, "missing") == ["proxy", "GPU", "price", "model config", "log"]
    assert not [line for each in setup_steps(other) for line in lines(other, each.name)
                if "vllm" in line]  # fmt: skip


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("vllm", ["curl http://127.0.0.1:8000/metrics"]),
        ("sglang", ["--enable-metrics", "curl http://127.0.0.1:8000/metrics"]),
        (
            "trtllm",
            ["return_perf_metrics: true", "curl http://127.0.0.1:8000/prometheus/metrics"],
        ),
        ("llamacpp", ["--metrics", "curl http://127.0.0.1:8000/metrics"]),
        (None, ["curl http://127.0.0.1:8000/metrics"]),
    ],
)
def test_metrics_that_cannot_be_read_have_what_switches_them_on(
    program: str | None, expected: list[str]
) -> None:
    facts = replace(PLAIN, seen=frozenset(), program=program, failure="connection_refused")
    assert lines(facts, StepName.METRICS) == expected
    assert "connection_refused" in texts(facts, StepName.METRICS)


def test_a_later_command_keeps_what_earlier_steps_added() -> None:
    traced = replace(PLAIN, seen=frozenset({StepName.METRICS, StepName.SPANS}))
    assert lines(traced, StepName.PLUGIN) == ["pip install ./plugins/vllm", SPANS_LINE]
    assert lines(traced, StepName.LOG)[0] == f"{SPANS_LINE} 2>&1 | tee -a /var/log/chat-0.log"


def test_the_plugin_of_an_engine_elsewhere_needs_a_path_on_both_sides() -> None:
    assert lines(PLAIN, StepName.PLUGIN) == [
        "pip install ./plugins/vllm",
        "vllm serve Qwen/Qwen3-8B",
    ]
    elsewhere = replace(PLAIN, remote=True)
    assert "must share a machine" in texts(elsewhere, StepName.PLUGIN)
    *setting, _, command = lines(elsewhere, StepName.PLUGIN)
    assert setting[-1] == '    plugin_socket: "/run/goodput-agent/vllm.sock"'
    assert command.startswith("GOODPUT_AGENT_SOCKET=/run/goodput-agent/vllm.sock vllm serve ")


def test_what_the_settings_have_already_is_not_asked_for() -> None:
    configured = replace(PLAIN, plugin_socket="/run/a.sock", proxy_url="http://127.0.0.1:8090")
    assert "engines:" not in lines(configured, StepName.PLUGIN)
    assert "GOODPUT_AGENT_SOCKET=/run/a.sock" in lines(configured, StepName.PLUGIN)[-1]
    assert lines(configured, StepName.PROXY) == ["OPENAI_BASE_URL=http://127.0.0.1:8090/v1"]
    unread = replace(PLAIN, log="/var/log/a.log", model_config="/m/config.json")
    assert "/var/log/a.log cannot be read" in texts(unread, StepName.LOG)
    assert "/m/config.json cannot be read" in texts(unread, StepName.MODEL_CONFIG)
    partly = replace(unread, model_problem="the architecture 'strange' is unknown")
    assert texts(partly, StepName.MODEL_CONFIG) == partly.model_problem


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"gpus": None}, {"nvml": {"enabled": True}}),
        ({"gpus": ()}, {"dcgm": {"url": "http://10.0.0.7:9400/metrics"}}),
        ({"gpus": (0, 1)}, {"gpus": [0, 1]}),
    ],
)
def test_gpus_are_those_of_nvml_or_of_an_exporter_beside_the_engine(
    known: dict[str, Any], expected: dict[str, Any]
) -> None:
    remote = replace(PLAIN, url="http://10.0.0.7:8000", **known)
    given = yaml.safe_load("\n".join(lines(remote, StepName.GPU)))
    assert expected.items() <= given.get("engines", [given])[0].items()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("/models/llama", "/models/llama/config.json"),
        ("Qwen/Qwen3-8B", "/path/of/config.json"),
        (None, "/path/of/config.json"),
    ],
)
def test_the_models_config_is_beside_its_weights_or_fetched(
    model: str | None, expected: str
) -> None:
    found = lines(replace(PLAIN, model=model), StepName.MODEL_CONFIG)
    assert found[-1].endswith(f'model_config: "{expected}"')
    fetches = [line for line in found if line.startswith("hf download")]
    assert len(fetches) == (model == "Qwen/Qwen3-8B")


def test_every_line_for_the_settings_is_a_setting() -> None:
    for each in setup_steps(PLAIN):
        for action in each.actions:
            if "settings" in action.where:
                given = yaml.safe_load("\n".join(action.lines))
                given.setdefault("engines", [{"name": PLAIN.engine}])[0]["url"] = PLAIN.url
                Settings.model_validate(given)
            else:
                for line in action.lines:
                    assert shlex.split(line)


def test_a_step_that_an_engine_cannot_have_is_left_out_until_it_is_seen() -> None:
    without = replace(PLAIN, impossible=frozenset({StepName.GPU, StepName.PRICE}))
    assert not {"GPU", "price"} & {*names(without, "missing")}
    seen = replace(without, seen=frozenset({StepName.METRICS, StepName.GPU}))
    assert names(seen, "done") == ["metrics", "GPU"]


def test_a_price_without_a_number_of_gpus_asks_for_the_number() -> None:
    assert [line.strip() for line in lines(PLAIN, StepName.PRICE)][-1] == "gpu_hour_usd: 2.5"
    priced = [line.strip() for line in lines(replace(PLAIN, priced=True), StepName.PRICE)]
    assert priced == ["engines:", '- name: "chat-0"', 'parallelism: {"tensor": 1}']


# Where spans go


@pytest.mark.parametrize(
    ("given", "url", "settings"),
    [
        ({}, "http://127.0.0.1:4317", 0),
        ({"grpc": "0.0.0.0:5000"}, "http://127.0.0.1:5000", 0),
        ({"grpc": None}, "http://127.0.0.1:4318/v1/traces", 0),
        ({"grpc": None, "http": None}, None, 1),
        # vLLM's gRPC exporter sends plain text.
        ({"encrypted": True}, "https://127.0.0.1:4318/v1/traces", 0),
        ({"encrypted": True, "http": None}, None, 1),
        # An engine elsewhere reaches no loopback address, and needs a token for another one.
        ({"host": "node-1"}, "http://node-1:4317", 2),
        ({"host": "node-1", "grpc": "0.0.0.0:4317"}, "http://node-1:4317", 0),
    ],
)
def test_spans_go_to_the_address_that_the_engine_reaches(
    given: dict[str, Any], url: str | None, settings: int
) -> None:
    usual = {"grpc": "127.0.0.1:4317", "http": "127.0.0.1:4318", "host": None}
    target = spans_target(**{"encrypted": False, "needs_token": False, **usual, **given})
    assert target.url == url
    assert len(target.settings) == settings


def test_spans_over_http_and_with_a_token_have_their_variables() -> None:
    target = SpansTarget(url="http://a:4318/v1/traces", over_http=True, needs_token=True)
    (line,) = lines(replace(PLAIN, spans=target), StepName.SPANS)
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in line
    assert "OTEL_EXPORTER_OTLP_HEADERS=authorization=Bearer%20TOKEN" in line


def test_without_a_receiver_the_settings_come_first() -> None:
    target = spans_target(grpc=None, http=None, encrypted=False, needs_token=False, host=None)
    assert lines(replace(PLAIN, spans=target), StepName.SPANS) == ['otlp: {grpc: "127.0.0.1:4317"}']


# In one line


def test_the_log_names_what_is_seen_and_the_next_step_on_one_line() -> None:
    without = replace(PLAIN, impossible=frozenset({StepName.PLUGIN}))
    assert next_step_text("chat-0", setup_steps(without)) == (
        f"engine chat-0: metrics; for single requests restart vLLM with: {SPANS_LINE}"
    )
    text = next_step_text("chat-0", setup_steps(PLAIN))
    assert text.startswith("engine chat-0: metrics; for single requests ")
    assert "pip install ./plugins/vllm; restart vLLM with: vllm serve " in text
    traced = replace(PLAIN, seen=frozenset({StepName.METRICS, StepName.SPANS}))
    assert "metrics, spans; for plugin " in next_step_text("chat-0", setup_steps(traced))
    everything = replace(PLAIN, impossible=frozenset(StepName))
    assert next_step_text("chat-0", setup_steps(everything)) == "engine chat-0: metrics"
    one = replace(PLAIN, impossible=frozenset(StepName) - {StepName.GPU})
    assert next_step_text("chat-0", setup_steps(one)).endswith(
        'add to this engine: engines: - name: "chat-0" gpus: [0, 1]'
    )
