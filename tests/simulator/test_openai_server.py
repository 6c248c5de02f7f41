"""The HTTP server of the simulator, and the command that starts it."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from aiohttp import ClientSession

from agent.errors import SettingsInvalid
from agent.simulator.openai_server import run_simulator
from agent.simulator.scenario import Scenario
from tests.simulator.kit import QUICK, Received, grpc_receiver, running, totals, values

CHAT = {"messages": [{"role": "user", "content": "Twelve chars"}], "max_tokens": 5}
ENDLESS = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}


def _with_client(test: Callable[[ClientSession], Awaitable[Any]]) -> Any:
    """The result of `test` with a client of a simulator without its own traffic."""

    async def run() -> Any:
        async with running() as url, ClientSession(url) as client:
            return await test(client)

    return asyncio.run(run())


async def _post(client: ClientSession, path: str, body: object, **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with client.post(path, json=body, headers=named) as response:
        return await response.text()


async def _exposition(client: ClientSession) -> str:
    async with client.get("/metrics") as response:
        return await response.text()


def test_pages_have_the_shapes_of_vllm() -> None:
    async def get(client: ClientSession) -> dict[str, tuple[int, str, str]]:
        pages = {}
        for path in ("/metrics", "/version", "/health", "/v1/models"):
            async with client.get(path) as response:
                kind = response.headers.get("Content-Type", "")
                pages[path] = (response.status, kind, await response.text())
        return pages

    pages = _with_client(get)
    status, content_type, exposition = pages["/metrics"]
    assert (status, content_type) == (200, "text/plain; version=1.0.0; charset=utf-8")
    assert "vllm:num_requests_running" in exposition
    assert json.loads(pages["/version"][2]) == {"version": "0.32.0+simulated"}
    assert pages["/health"][::2] == (200, "")
    listed = json.loads(pages["/v1/models"][2])
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["root"], card["parent"]) == (QUICK.model, QUICK.model, None)
    assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "vllm", 8192)
    assert card["permission"][0]["object"] == "model_permission"


def test_a_stream_is_server_sent_events_that_end_with_done() -> None:
    async def stream(client: ClientSession) -> tuple[str, bytes]:
        async with client.post("/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            return response.headers["Content-Type"], await response.read()

    content_type, body = _with_client(stream)
    assert content_type == "text/event-stream; charset=utf-8"
    *events, done, rest = body.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") for event in events)
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["id"] == chunks[0]["id"] for chunk in chunks)
    assert "usage" not in chunks[-1]


def test_a_response_is_limited_by_the_model_and_a_refusal_has_its_status() -> None:
    body = {"prompt": [1] * 8190, "max_tokens": 100, "ignore_eos": True}

    async def post(client: ClientSession) -> list[Any]:
        bodies = (body, {**body, "n": 3})
        return [json.loads(await _post(client, "/v1/completions", each)) for each in bodies]

    limited, refused = _with_client(post)
    assert limited["usage"]["completion_tokens"] == 2
    assert refused["error"]["code"] == 501


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(stream: bool) -> None:
    async def leave(client: ClientSession) -> Mapping[str, float]:
        body = {**ENDLESS, "stream": stream}
        pending = asyncio.create_task(_post(client, "/v1/completions", body))
        while not totals(await _exposition(client))["vllm:generation_tokens_total"]:
            pass
        pending.cancel()
        while (sums := totals(await _exposition(client)))["vllm:num_requests_running"]:
            pass
        return sums

    sums = _with_client(leave)
    assert sums["vllm:request_success_total"] == sums["vllm:kv_cache_usage_perc"] == 0


async def _served(send: Callable[[ClientSession], Awaitable[Any]]) -> Received:
    async with grpc_receiver() as received:
        async with running(spans=received.target) as url, ClientSession(url) as client:
            await send(client)
        return received


def test_the_span_of_a_request_agrees_with_its_response() -> None:
    responses: list[Any] = []

    async def send(client: ClientSession) -> None:
        trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {**CHAT, "temperature": 0}
        headers = {"X_Request_Id": "mine", "traceparent": trace}
        responses.append(json.loads(await _post(client, "/v1/chat/completions", body, **headers)))

    (span,) = asyncio.run(_served(send)).spans()
    sent = values(span.attributes)
    assert sent["gen_ai.request.id"] == responses[0]["id"] == "chatcmpl-mine"
    assert sent["gen_ai.usage.prompt_tokens"] == responses[0]["usage"]["prompt_tokens"]
    assert sent["gen_ai.usage.completion_tokens"] == responses[0]["usage"]["completion_tokens"]
    assert sent["gen_ai.request.max_tokens"] == 5
    assert "gen_ai.request.temperature" not in sent
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"


def test_a_taken_port_is_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsInvalid, match=rf"port {port} of 127.0.0.1 .* choose another"):
            asyncio.run(run_simulator(Scenario(), announce=print, port=port))


ANNOUNCED = re.compile(
    r"^simulator listening on (http://127\.0\.0\.1:\d+) \(simulated vLLM, not a real engine\)\n$"
)


@contextmanager
def _started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "agent.simulator", *arguments]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as simulator:
        try:
            yield simulator
        finally:
            simulator.kill()


def _announced_url(simulator: subprocess.Popen[str]) -> str:
    assert simulator.stdout is not None
    found = ANNOUNCED.match(simulator.stdout.readline())
    assert found is not None
    return found[1]


@pytest.mark.slow
def test_it_announces_its_port_serves_a_scenario_and_ends_cleanly_on_sigterm(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.yaml").write_text("model: own-simulated-model\n", encoding="utf-8")
    with _started("--port", "0", "--scenario", str(tmp_path / "own.yaml")) as simulator:
        models = requests.get(f"{_announced_url(simulator)}/v1/models", timeout=60).json()
        simulator.send_signal(signal.SIGTERM)
        assert simulator.wait(60) == 0
        assert simulator.stderr is not None
        assert simulator.stderr.read() == ""
    assert models["data"][0]["id"] == "own-simulated-model"


@pytest.mark.slow
def test_it_ends_when_its_stdin_is_closed_if_asked() -> None:
    with _started("--port", "0", "--no-traffic", "--until-stdin-closes") as simulator:
        _announced_url(simulator)
        assert simulator.stdin is not None
        simulator.stdin.close()
        assert simulator.wait(60) == 0


@pytest.mark.slow
def test_an_invalid_scenario_ends_it_with_the_problem(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: llama", encoding="utf-8")
    with _started("--scenario", str(tmp_path / "bad.yaml")) as simulator:
        _, stderr = simulator.communicate(timeout=60)
    assert simulator.returncode == 2
    assert "must contain 'simulated'" in stderr
    assert "Traceback" not in stderr
