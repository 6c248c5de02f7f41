import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner, Result

from agent.cli import main
from agent.errors import EngineUnreachable, SettingsInvalid
from agent.settings import Settings
from tests.real_parts.certificates import make_certificate
from tests.real_parts.ports import free_port
from tests.sources.engines.fixture_pages import body
from tests.sources.engines.wire import EngineServer

WITHOUT = b"vllm:kv_cache_usage_perc"


def check(engine: EngineServer, tmp_path: Path, *options: str) -> tuple[int, str]:
    settings = tmp_path / "agent.yml"
    settings.write_text(f"engines: [{{name: chat, url: '{engine.url}'}}]\n")
    ended = CliRunner().invoke(main, ["config", "check", "--engines", str(settings), *options])
    return ended.exit_code, ended.stdout


@pytest.mark.parametrize("has_all", [True, False])
def test_check_lists_the_facts_that_an_engine_does_not_give(tmp_path: Path, has_all: bool) -> None:
    page = body("vllm-0.32.0")
    with EngineServer() as engine:
        engine.answers("/metrics", page if has_all else page.replace(WITHOUT, b"vllm:other"))
        code, said = check(engine, tmp_path)
        (chat,) = json.loads(check(engine, tmp_path, "--json")[1])["engines"]
    assert code == 0
    assert said.startswith("engine chat: vllm, model tiny-llama, ")
    absent = "; absent: llm_engine_kv_cache_usage_ratio (some engines"
    assert ("facts, none is absent" if has_all else absent) in said
    assert (chat["engine"], chat["problem"]) == ("chat", None)
    assert (chat["dialect"], chat["model"]) == ("vllm", "tiny-llama")
    assert chat["absent"] == ([] if has_all else ["llm_engine_kv_cache_usage_ratio"])


def test_check_fails_for_an_engine_that_cannot_be_read(tmp_path: Path) -> None:
    with EngineServer() as engine:
        engine.answers("/metrics", b"<html></html>\n")
        problem = f"{engine.url}/metrics has an HTML page, not metrics"
        assert check(engine, tmp_path) == (1, f"engine chat: cannot be read: {problem}\n")
        code, said = check(engine, tmp_path, "--json")
    (chat,) = json.loads(said)["engines"]
    assert (code, chat["problem"]) == (1, problem)
    assert chat["facts"] is chat["absent"] is None


# Each setting that names a file, by its place.
NAMES_FILES = """
engines:
- name: chat
  url: http://127.0.0.1:1
  model_config: {0}/model/config.json
  log: {0}/chat.log
  plugin_socket: {0}/run/vllm.sock
security:
  read_tokens: {0}/read
  ingest_tokens: {0}/ingest
  tls_certificate: {0}/tls/agent.pem
  tls_key: {0}/tls/agent.key
tls: {{ca: {0}/tls/agent.pem}}
storage:
  file: {0}/run/goodput.db
  publish_to: postgresql://h/d?sslrootcert={0}/tls/agent.pem
engines_from:
  kubernetes: {{selector: a=b, service_account: {0}/account, model_config: {0}/model}}
"""


def settings_check(folder: Path, text: str) -> Result:
    file = folder / "agent.yml"
    file.write_text(text)
    return CliRunner().invoke(main, ["config", "check", str(file)])


def test_check_takes_the_file_as_the_other_commands_do(tmp_path: Path) -> None:
    file = tmp_path / "agent.yml"
    file.write_text("name: named-here\n")
    result = CliRunner().invoke(main, ["config", "check", "--config", str(file)])
    assert "name: named-here" in result.stdout
    both = CliRunner().invoke(main, ["config", "check", str(file), "--config", str(file)])
    assert str(both.exception).startswith("--config: give one file")


def named_by(kind: object, place: str = "") -> Iterator[str]:
    """The places of the settings whose type is a path."""
    if kind is Path:
        yield place
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from named_by(field.annotation, f"{place}.{field.alias or name}".lstrip("."))
    for part in get_args(kind):
        yield from named_by(part, f"{place}[0]" if get_origin(kind) is tuple else place)


def test_check_lists_each_missing_file_of_the_settings(tmp_path: Path) -> None:
    result = settings_check(tmp_path, NAMES_FILES.format(tmp_path / "gone"))
    assert isinstance(result.exception, SettingsInvalid)
    assert result.stdout == ""
    lines = result.exception.problems
    gone = tmp_path / "gone"
    assert f"tls.ca: {gone}/tls/agent.pem cannot be used: No such file or directory" in lines
    socket = f"engines[0].plugin_socket: {gone}/run/vllm.sock"
    assert f"{socket} cannot be used: the folder {gone}/run is missing" in lines
    named = {line.partition(": ")[0] for line in lines}
    assert named >= set(named_by(Settings))
    assert {"storage.file", "storage.publish_to"} <= named
    assert "engines_from.kubernetes.service_account" in named


def test_check_takes_settings_whose_files_are_all_there(tmp_path: Path) -> None:
    for folder in ("model", "run", "tls", "account"):
        (tmp_path / folder).mkdir()
    for file in ("model/config.json", "account/token", "account/ca.crt"):
        (tmp_path / file).write_text("{}")
    for file in ("read", "ingest"):
        (tmp_path / file).write_text("a-token-of-the-tests\n")
    # No writer has it open.
    os.mkfifo(tmp_path / "chat.log")
    made = make_certificate(tmp_path / "tls", "localhost")
    made.certificate.rename(tmp_path / "tls/agent.pem")
    made.key.rename(tmp_path / "tls/agent.key")
    text = NAMES_FILES.format(tmp_path)
    assert settings_check(tmp_path, text).exit_code == 0
    in_folder = text.replace("/model/config.json", "/model")
    assert settings_check(tmp_path, in_folder).exit_code == 0
    (tmp_path / "read").write_text("short\n")
    refused = settings_check(tmp_path, text).exception
    assert "security.read_tokens: " in str(refused)
    assert "must hold one token on each line" in str(refused)


def test_check_refuses_a_directory_as_a_log(tmp_path: Path) -> None:
    text = f"engines: [{{name: a, url: 'http://h:1', log: {tmp_path}}}]"
    refused = settings_check(tmp_path, text).exception
    assert str(refused) == f"engines[0].log: {tmp_path} cannot be used: Is a directory"


# Without the requests that it refused while it was recorded.
PAGE = (
    body("vllm-0.32.0")
    .replace(b'reason="max_num_queued_reqs"} 12.0', b'reason="max_num_queued_reqs"} 0.0')
    .replace(b'status="5xx"} 12.0', b'status="5xx"} 0.0')
)


@pytest.fixture
def vllm() -> Iterator[EngineServer]:
    """A recorded vLLM."""
    with EngineServer() as engine:
        engine.answers("/metrics", PAGE)
        engine.answers("/version", b'{"version": "0.32.0"}')
        engine.answers("/v1/models", b'{"data": [{"id": "tiny-llama", "max_model_len": 2048}]}')
        engine.answers("/health", b"")
        yield engine


def audit(*arguments: str) -> Result:
    """The command with an agent that does not run, and without GPUs."""
    environment = {"GOODPUT_LISTEN__PORT": str(free_port()), "GOODPUT_NVML__ENABLED": "false"}
    return CliRunner().invoke(main, ["audit", *arguments], env=environment)


def found(result: Result) -> dict[str, str]:
    """The findings of an audit in JSON."""
    return {line["check"]: line["finding"] for line in json.loads(result.stdout)["lines"]}


def test_a_live_engine_is_audited(vllm: EngineServer) -> None:
    result = audit(vllm.url, "--json")
    findings = found(result)
    assert findings["prefix caching"] == "pass"
    assert findings["expected series"] == "pass"
    # The objective of the defaults, chat.
    assert findings["bucket edges"] == "warn"
    assert findings["single requests"] == "unknown"
    assert findings["utilisation"] == "unknown"
    assert "fail" not in findings.values()
    assert result.exit_code == 0
    assert vllm.posted == []


def test_a_line_that_fails_is_in_the_exit_code(vllm: EngineServer) -> None:
    page = PAGE.replace(b'enable_prefix_caching="True"', b'enable_prefix_caching="False"')
    vllm.answers("/metrics", page)
    result = audit(vllm.url)
    assert result.exit_code == 1
    assert "fail    prefix caching       off" in result.stdout
    assert "1 fail" in result.stdout.splitlines()[-1]


def test_a_503_of_the_admission_is_refused_and_has_not_failed(vllm: EngineServer) -> None:
    vllm.answers("/metrics", body("vllm-0.32.0"))
    lines = json.loads(audit(vllm.url, "--json").stdout)["lines"]
    (line,) = (line for line in lines if line["check"] == "refused requests")
    assert line["seen"] == "12 of 23 (52.2 %) since the engine's start"


def test_limits_of_the_settings_are_those_of_the_edges(vllm: EngineServer, tmp_path: Path) -> None:
    settings = tmp_path / "agent.yml"
    settings.write_text("objectives: [{name: edges, ttft_ms: 250, tpot_ms: 100}]\n")
    result = audit(vllm.url, "--json", "--config", str(settings))
    assert found(result)["bucket edges"] == "pass"


def test_an_engine_that_is_away_cannot_be_audited() -> None:
    result = audit(f"http://127.0.0.1:{free_port()}")
    assert isinstance(result.exception, EngineUnreachable)


@pytest.mark.parametrize(
    ("given", "words"),
    [("URL", ["127.0.0.1:8000"]), ("--agent", ["http://127.0.0.1:1", "--agent", "127.0.0.1:8000"])],
)
def test_what_is_no_url_is_refused(given: str, words: list[str]) -> None:
    result = audit(*words)
    assert isinstance(result.exception, SettingsInvalid)
    assert f"{given}: '127.0.0.1:8000' is not the URL of a server" in str(result.exception)


def test_an_agent_that_was_named_must_respond(vllm: EngineServer) -> None:
    result = audit(vllm.url, "--agent", f"http://127.0.0.1:{free_port()}")
    assert isinstance(result.exception, SettingsInvalid)
    assert "no agent responds at" in str(result.exception)


def test_a_key_file_holds_one_key(vllm: EngineServer, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one two\n")
    for content in (b"one two\n", b"", b"\xff\xfe"):
        keys.write_bytes(content)
        result = audit(vllm.url, "--key-file", str(keys))
        assert f"--key-file: {keys} must hold one key or token" in str(result.exception)
