"""Environment variables override the settings file."""

from pathlib import Path

import pytest

from agent.errors import SettingsInvalid
from agent.settings import load
from tests.settings.reading import problem, problems, read


def test_every_kind_of_key_can_be_set(tmp_path: Path) -> None:
    settings = load(
        None,
        {
            "GOODPUT_NAME": "agent-7",
            "GOODPUT_LISTEN__PORT": "8080",
            "GOODPUT_OTLP__GRPC": "0.0.0.0:4317",
            "GOODPUT_OTLP__HTTP": "null",
            "GOODPUT_OTLP__FORWARD_TO": "",
            "GOODPUT_SECURITY__INGEST_TOKENS": "/tokens",
            "GOODPUT_STORAGE__KEEP_REQUESTS": "12h",
            "GOODPUT_ENGINES__0__NAME": "chat-0",
            "GOODPUT_ENGINES__0__URL": "http://h:8000",
            "GOODPUT_ENGINES__0__MODEL_CONFIG": "/models/config.json",
            "GOODPUT_ENGINES__0__GPUS__0": "0",
            "GOODPUT_ENGINES__0__GPUS__1": "GPU-5d1f",
            "GOODPUT_OBJECTIVES": "[{name: fast, ttft_ms: 100}]",
            "GOODPUT_OBJECTIVES__0__MATCH__MODEL": "llama*",
            "PATH": "/bin",
            "GOODPUTS__NAME": "not ours",
        },
    )
    assert settings.name == "agent-7"
    assert settings.listen.port == 8080
    assert (settings.otlp.grpc, settings.otlp.http, settings.otlp.forward_to) == (
        "0.0.0.0:4317",
        None,
        None,
    )
    assert settings.storage.keep_requests == 12 * 3600
    assert settings.security.ingest_tokens == Path("/tokens")
    (engine,) = settings.engines
    assert engine.gpus == (0, "GPU-5d1f")
    assert engine.model_config_path == Path("/models/config.json")
    (objective,) = settings.all_objectives()
    assert (objective.name, objective.ttft_s, objective.match.model) == ("fast", 0.1, "llama*")


def test_the_environment_overrides_single_keys_of_the_file(tmp_path: Path) -> None:
    settings = read(
        tmp_path,
        "listen: {host: 127.0.0.7, port: 1}\nengines: [{name: a, url: 'http://a', kind: vllm}]",
        {
            "GOODPUT_LISTEN__PORT": "2",
            "GOODPUT_ENGINES__0__URL": "http://b",
            "GOODPUT_ENGINES__1__NAME": "c",
            "GOODPUT_ENGINES__1__URL": "http://c",
        },
    )
    assert (settings.listen.host, settings.listen.port) == ("127.0.0.7", 2)
    shown = [(engine.name, engine.url, engine.kind) for engine in settings.engines]
    assert shown == [("a", "http://b", "vllm"), ("c", "http://c", "auto")]


def test_list_indexes_are_sorted_as_numbers() -> None:
    environment = {
        f"GOODPUT_ENGINES__{index}__{key}": value
        for index in range(12)
        for key, value in (("NAME", f"engine-{index}"), ("URL", f"http://h:{8000 + index}"))
    }
    settings = load(None, environment)
    assert [engine.name for engine in settings.engines] == [
        f"engine-{index}" for index in range(12)
    ]


def test_a_section_can_be_set_whole_then_by_key_and_to_its_defaults(tmp_path: Path) -> None:
    whole = {"GOODPUT_LISTEN": "{host: 127.0.0.7, port: 1}", "GOODPUT_LISTEN__PORT": "2"}
    listen = load(None, whole).listen
    assert (listen.host, listen.port) == ("127.0.0.7", 2)
    assert read(tmp_path, "listen: {port: 1}", {"GOODPUT_LISTEN": "null"}).listen.port == 9470


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        (
            "GOODPUT_COLOUR",
            "green",
            "GOODPUT_COLOUR: 'colour' is not a section of the settings; un",
        ),
        ("GOODPUT_LISTEN__PORT__TCP", "1", "GOODPUT_LISTEN__PORT__TCP: 'port' is a single value"),
        ("GOODPUT_ENGINES__0", "a", "engines[0]: must be a mapping of keys (got 'a')"),
        (
            "GOODPUT_ENGINES__1__NAME",
            "a",
            "GOODPUT_ENGINES__1__NAME: '1' is not an item of a list;",
        ),
        ("GOODPUT_ENGINES__FIRST", "a", "engines: must be a list (got a mapping)"),
        ("GOODPUT_NAME", "0x_", "GOODPUT_NAME: '0x_' is no whole number"),
        ("GOODPUT_LISTEN__PORT", "9" * 5000, "GOODPUT_LISTEN__PORT: '99999"),
        ("GOODPUT_LISTEN__PORT", "[" * 5000, "GOODPUT_LISTEN__PORT: '[[[[["),
        ("GOODPUT_LISTEN", "{1: x}", "GOODPUT_LISTEN: the key '1' is not a text; quote it"),
        ("GOODPUT_NAME", "a\udcff", "GOODPUT_NAME: 'a\\udcff' is not YAML: unacceptable character"),
        (f"GOODPUT_ENGINES__{'9' * 5000}__NAME", "a", "engines: must be a list (got a mapping)"),
        ("GOODPUT_LISTEN" + 5000 * "__A", "a", f"GOODPUT_LISTEN{62 * '__A'}...: names no key"),
        (
            "GOODPUT_OTLP_METRICS__HEADERS__AUTHORIZATION",
            "[s3cret",
            "GOODPUT_OTLP_METRICS__HEADERS__AUTHORIZATION: the value is not YAML: while parsing a",
        ),
        ("GOODPUT_", "a", "GOODPUT_: '' is not a section of the settings"),
        ("GOODPUT_LISTEN__", "a", "GOODPUT_LISTEN__: names no key; write GOODPUT_<SECTION>__<K"),
    ],
)
def test_a_wrong_variable_is_refused_with_a_sentence(
    tmp_path: Path, name: str, value: str, sentence: str
) -> None:
    found = problem(tmp_path, "listen: {port: 1}", {name: value})
    assert found.startswith(sentence)
    assert "s3cret" not in found
    assert len(found) < 600


def test_problems_of_the_file_and_of_the_environment_are_listed_together(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        "colour: green\nengines: [{name: a, url: 'http://h'}]",
        {
            "GOODPUT_NAME": "[",
            "GOODPUT_ENGINES__5__NAME": "b",
            "GOODPUT_ENGINES__1": "{name: a, url: h}",
        },
    )
    keys = [sentence.partition(": ")[0] for sentence in found]
    assert sorted(keys) == sorted(
        ["GOODPUT_NAME", "GOODPUT_ENGINES__5__NAME", "colour", "engines", "engines[1].url"]
    )


def test_variables_of_kubernetes_and_of_the_render_command_are_no_settings(
    tmp_path: Path,
) -> None:
    others = {
        "GOODPUT_AGENT_SERVICE_HOST": "10.0.0.1",
        "GOODPUT_AGENT_SERVICE_PORT_HTTP": "9470",
        "GOODPUT_AGENT_PORT": "tcp://10.0.0.1:9470",
        "GOODPUT_AGENT_PORT_9470_TCP_ADDR": "10.0.0.1",
        "GOODPUT_RENDER_WEBHOOK": "https://w.test",
    }
    assert read(tmp_path, "listen: {port: 1}", others) == read(tmp_path, "listen: {port: 1}")


@pytest.mark.parametrize("name", ["GOODPUT_RENDER", "GOODPUT_RENDER_", "GOODPUT_RENDER__WEBHOOK"])
def test_a_variable_that_resembles_a_render_option_is_refused(name: str) -> None:
    with pytest.raises(SettingsInvalid, match=f"{name}: "):
        load(None, {name: "x"})
