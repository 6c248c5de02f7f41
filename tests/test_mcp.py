"""The `mcp` command, read by the SDK's own client, at an API over a real database."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from mcp import Client, StdioServerParameters
from typer.testing import CliRunner

from agent.catalog.causes import Cause
from agent.cli import main
from agent.errors import SettingsInvalid
from agent.settings.access import AccessPolicy, TokenFile
from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.traffic import NOW
from tests.outputs.report.reported import filled
from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess

WITHIN_S = 120.0
TOKEN = "a-read-token-of-the-tests"


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    """An API over two hours of traffic."""
    with open_api(tmp_path) as opened:
        filled(opened)
        yield opened


def by_stdio(*options: str) -> StdioServerParameters:
    """The command, as an assistant starts it."""
    return StdioServerParameters(command=sys.executable, args=["-m", "agent", "mcp", *options])


def asked(server: Any, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
    """What a client gets of a server."""

    async def within() -> Any:
        async with asyncio.timeout(WITHIN_S), Client(server) as client:
            return await work(client)

    return asyncio.run(within())


def called(server: Any, tool: str, **arguments: Any) -> Any:
    """The JSON that a tool returns."""
    result = asked(server, lambda client: client.call_tool(tool, arguments))
    assert not result.is_error, result.content[0].text
    return result.structured_content


def refused(server: Any, tool: str, **arguments: Any) -> str:
    """The text of a tool's error."""
    result = asked(server, lambda client: client.call_tool(tool, arguments))
    assert result.is_error
    (content,) = result.content
    return str(content.text)


def test_an_assistant_finds_tools_that_only_read_and_say_what_null_is(api: Api) -> None:
    async def described(client: Client) -> Any:
        return client.instructions, (await client.list_tools()).tools

    instructions, tools = asked(by_stdio("--agent", api.url), described)
    assert {each.name for each in tools} == {
        *("summary", "worst_requests", "why", "check", "compare")
    }
    for each in tools:
        assert each.annotations.read_only_hint, each.name
        assert "null" in each.description, each.name
        # Without the spaces by which a docstring is indented.
        assert "\n  " not in each.description, each.name
        for name, schema in each.input_schema["properties"].items():
            assert schema["description"], (each.name, name)
    assert "null is unknown, never 0" in instructions


def test_the_summary_is_that_of_the_api(api: Api) -> None:
    agent = by_stdio("--agent", api.url)
    assert called(agent, "summary", window="2h") == api.query("summary", window="2h")
    chosen = {"model": "llama", "tenant": "acme", "engine": "chat-0"}
    found = called(agent, "summary", window="2h/1h", **chosen)
    assert found == api.query("summary", **{"from": "now-2h"}, window="1h", **chosen)
    assert found["requests"] < api.query("summary", window="2h")["requests"]


def test_the_worst_requests_missed_and_are_in_the_window(api: Api) -> None:
    agent = by_stdio("--agent", api.url)
    found = called(agent, "worst_requests", window="1h", limit=5, by="ttft")
    summary = api.query("summary", window="1h")
    assert (found["window_from"], found["window_until"]) == (
        *(summary["window_from"], summary["window_until"]),
    )
    assert found["simulated"] is True
    listed = api.query(
        "requests", verdict="missed", worst="ttft", limit=5, started_from=found["window_from"]
    )["items"]
    assert [each["span_id"] for each in found["items"]] == [each["span_id"] for each in listed]
    of_cause = called(agent, "worst_requests", cause=Cause.BURST.value)["items"]
    assert [each["cause"] for each in of_cause] == ["burst"]
    past = called(agent, "worst_requests", window="2h/1h")["items"]
    assert past
    assert {each["span_id"] for each in past}.isdisjoint(
        each["span_id"] for each in called(agent, "worst_requests", limit=100)["items"]
    )


def test_why_has_phases_causes_with_evidence_and_advice(api: Api) -> None:
    agent = by_stdio("--agent", api.url)
    (worst,) = called(agent, "worst_requests", cause="burst")["items"]
    found = called(agent, "why", request_id=worst["trace_id"])
    assert {*("queue_s", "prefill_s", "decode_s", "front_s", "rest_s")} <= found.keys()
    burst, pressure = found["explanation"]["shares"]
    assert (burst["cause"], pressure["cause"]) == ("burst", "kv_pressure")
    assert burst["excess_s"] == pytest.approx(0.75)
    assert burst["evidence"]
    assert burst["advice"]["text"]
    assert found["others"] == []


def test_check_has_the_health_of_the_agent_and_the_state_of_its_engines(api: Api) -> None:
    agent = by_stdio("--agent", api.url)
    assert called(agent, "check") == {
        "ready": api.get("/readyz").json(),
        "engines": api.query("engines")["items"],
        "setup": api.query("setup")["items"],
    }
    api.agent.problems.append("the database is away")
    found = called(agent, "check")["ready"]
    assert (found["status"], found["problems"]) == ("not ready", ["the database is away"])


def test_two_windows_are_compared_side_by_side(api: Api) -> None:
    found = called(by_stdio("--agent", api.url), "compare", before="2h/1h", after="1h")
    assert found == {
        "before": api.query("summary", **{"from": "now-2h"}, window="1h"),
        "after": api.query("summary", window="1h"),
    }
    assert found["before"]["requests"] != found["after"]["requests"]


@pytest.mark.parametrize(
    ("tool", "arguments", "sentence"),
    [
        ("why", {"request_id": "a/b?c#d"}, "no request 'a/b?c#d' is stored"),
        ("summary", {"window": "yesterday"}, "window: 'yesterday' is not a duration"),
        ("summary", {"window": "yesterday/1h"}, "from: 'yesterday' is not a moment"),
        ("compare", {"before": "1h/2h/1h"}, "until: '2h/1h' is not a moment"),
        ("worst_requests", {"by": "queue"}, "Input should be 'ttft', 'tpot' or 'e2e'"),
    ],
)
def test_a_mistake_is_told_to_the_assistant(
    api: Api, tool: str, arguments: dict[str, str], sentence: str
) -> None:
    assert sentence in refused(by_stdio("--agent", api.url), tool, **arguments)


def test_an_agent_that_is_away_is_named() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    said = refused(by_stdio("--agent", url), "check")
    assert f"no agent responds at {url}: connection refused" in said


def test_the_token_of_the_file_is_sent_and_without_one_the_agent_refuses(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    access = AccessPolicy(tokens=TokenFile("security.read_tokens", file))
    with open_api(tmp_path, access=access) as api:
        api.agent.now = NOW
        said = refused(by_stdio("--agent", api.url), "summary")
        assert f"{api.url}: send a valid token" in said
        allowed = by_stdio("--agent", api.url, "--token-file", str(file))
        assert called(allowed, "summary")["requests"] == 0


def test_the_token_of_the_settings_goes_to_their_agent_alone(tmp_path: Path) -> None:
    file, config = tmp_path / "tokens", tmp_path / "agent.yml"
    file.write_text(TOKEN)
    access = AccessPolicy(tokens=TokenFile("security.read_tokens", file))
    with open_api(tmp_path, access=access) as api:
        api.agent.now = NOW
        port = api.url.rpartition(":")[2]
        config.write_text(
            f"listen: {{host: 127.0.0.1, port: {port}}}\nsecurity: {{read_tokens: {file}}}\n"
        )
        own = by_stdio("--config", str(config))
        assert called(own, "summary")["requests"] == 0
        named = by_stdio("--config", str(config), "--agent", api.url)
        assert "send a valid token" in refused(named, "summary")


def test_http_is_served_to_this_machine_by_its_own_names(api: Api, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/mcp"
    command = [sys.executable, "-m", "agent", "mcp", "--agent", api.url, "--http", str(port)]
    process = ServerProcess(command, tmp_path / "log")

    def listens() -> bool:
        try:
            return requests.get(url, timeout=WITHIN_S).status_code >= 400
        except requests.ConnectionError:
            return False

    try:
        process.wait_until(listens, within_s=WITHIN_S)
        assert called(url, "summary", window="2h") == api.query("summary", window="2h")
        elsewhere = {"Host": f"goodput.example.org:{port}"}
        assert requests.post(url, json={}, headers=elsewhere, timeout=WITHIN_S).status_code == 421
        assert url in (tmp_path / "log").read_text()
    finally:
        process.kill()


def test_without_the_sdk_the_command_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    monkeypatch.delitem(sys.modules, "agent.assistant_tools", raising=False)
    error = CliRunner().invoke(main, ["mcp"]).exception
    assert isinstance(error, SettingsInvalid)
    assert "run `pip install 'goodput-agent[mcp]'`" in str(error)
