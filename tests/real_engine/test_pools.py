"""Two real engines, one for prompts and one for the rest, with the example connector of vLLM.

The test is the router. The KV values go from one engine to the other through files.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_engine.watching import OBJECTIVE, SPANS_ARRIVE_WITHIN_S
from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, SpanExport, Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

PREFILL, DECODE = "prefill-0", "decode-0"
# Several blocks of the KV cache, which alone are transferred.
PROMPT_TOKENS, OUTPUT_TOKENS = 300, 8
EXTERNAL = "vllm:prompt_tokens_by_source_total"


@dataclass(frozen=True, slots=True)
class Pools:
    """Both engines and their agent."""

    prefill: Vllm
    decode: Vllm
    api: AgentApi

    def ask(self, request_id: str, trace: str | None = None) -> float:
        """Send a request to both engines, one after the other; returns the seconds to its token."""
        body = {"model": self.prefill.model, "prompt": prompt(request_id), "ignore_eos": True}
        headers = {"X-Request-Id": request_id}
        if trace is not None:
            headers["traceparent"] = f"00-{trace}-00f067aa0ba902b7-01"
        began_s = time.monotonic()
        requests.post(
            f"{self.prefill.url}/v1/completions",
            json={**body, "max_tokens": 1},
            headers=headers,
            timeout=ANSWER_WITHIN_S,
        ).raise_for_status()
        with requests.post(
            f"{self.decode.url}/v1/completions",
            json={**body, "max_tokens": OUTPUT_TOKENS, "stream": True},
            headers=headers,
            timeout=ANSWER_WITHIN_S,
            stream=True,
        ) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            first_s = time.monotonic() - began_s
            assert list(lines)[-1] == b"data: [DONE]"
        return first_s

    def row(self, request_id: str) -> dict[str, Any]:
        """The request's row, once its hop is known."""
        own = span_request_id(request_id)

        def look() -> Any:
            rows = self.api.requests(id=own)
            return [row for row in rows if row["prefill_engine"]]

        (row,) = eventually(look, within_s=SPANS_ARRIVE_WITHIN_S, what=f"the hop of {own}")
        return dict(row)


def prompt(seed: str) -> list[int]:
    """The tokens of a prompt that no other request begins with."""
    numbers = [ord(letter) for letter in seed]
    return [3 + numbers[at % len(numbers)] % 20 for at in range(PROMPT_TOKENS)]


def start(folder: Path, name: str, ports: AgentPorts, files: Path) -> Vllm:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    engine = Vllm(
        folder,
        port=free_port(),
        spans=SpanExport.grpc(ports.grpc),
        service=name,
        extra=("--kv-transfer-config", json.dumps(connector)),
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    ports, files = AgentPorts.free(), tmp_path_factory.mktemp("kv")
    with ExitStack() as stack, ThreadPoolExecutor(2) as starting:
        folders = [tmp_path_factory.mktemp(name) for name in (PREFILL, DECODE)]
        found = starting.map(start, folders, (PREFILL, DECODE), [ports] * 2, [files] * 2)
        prefill, decode = found
        stack.callback(prefill.stop)
        stack.callback(decode.stop)
        engines = [
            {"name": name, "url": engine.url, "role": role, "scrape_interval": "1s"}
            for name, engine, role in (
                (PREFILL, prefill, "prefill"),
                (DECODE, decode, "decode"),
            )
        ]
        settings = {"engines": engines, "objectives": [{"name": OBJECTIVE, "ttft_ms": 60_000}]}
        folder = tmp_path_factory.mktemp("agent")
        agent = stack.enter_context(AgentProcess.with_settings(folder, ports, settings))
        yield Pools(prefill, decode, agent.api)


@pytest.mark.parametrize("trace", ["4bf92f3577b34da6a3ce929d0e0e4736", None], ids=["trace", "id"])
def test_a_request_of_two_engines_is_one_row_with_its_hop(pools: Pools, trace: str | None) -> None:
    request_id = f"routed-{'by-trace' if trace else 'by-id'}"
    measured_s = pools.ask(request_id, trace)
    row = pools.row(request_id)
    assert (row["engine"], row["prefill_engine"], row["counted"]) == (DECODE, PREFILL, True)
    assert (row["input_tokens"], row["output_tokens"]) == (PROMPT_TOKENS, OUTPUT_TOKENS)
    parts = row["first_token"]
    assert 0 < parts["prefill_s"] < parts["whole_s"] < measured_s
    assert parts["prefill_s"] >= row["prefill_queue_s"]
    (hop,) = [each for each in pools.api.requests(id=span_request_id(request_id)) if each["hop"]]
    assert (hop["engine"], hop["counted"], hop["part"]) == (PREFILL, False, True)


def test_both_pools_have_their_load_by_metrics_alone(pools: Pools) -> None:
    def look() -> list[dict[str, Any]]:
        found = [each for model in pools.api.items("/api/v1/pools", {}) for each in model["pools"]]
        return found if len(found) == 2 else []

    decode, prefill = eventually(look, within_s=ANSWER_WITHIN_S, what="two pools")
    assert (decode["role"], decode["engines"]) == ("decode", [DECODE])
    assert (prefill["role"], prefill["engines"]) == ("prefill", [PREFILL])
    known = [(each["running"], each["waiting"]) for each in (decode, prefill)]
    assert None not in (*known[0], *known[1])
    page = pools.api.exposition()
    assert total(page, "llm_engine_role", engine=PREFILL, role="prefill") == 1


def test_the_second_engine_got_the_kv_values_of_the_first(pools: Pools) -> None:
    before = total(pools.decode.exposition(), EXTERNAL, source="external_kv_transfer")
    pools.ask("transferred")
    after = total(pools.decode.exposition(), EXTERNAL, source="external_kv_transfer")
    assert 0 < after - before < PROMPT_TOKENS
