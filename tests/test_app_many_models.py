"""The running agent before an engine with hundreds of adapters and an odd name on its page."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests

from agent.outputs.prometheus.meter import MAX_SERVED
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

LONG = "m" * 1_000_000
PAGE = f'vllm:num_requests_running{{engine="0",model_name="{LONG}"}} 1\n'
ADAPTERS = [f"adapter-{number}" for number in range(MAX_SERVED + 100)]


class _Engine(BaseHTTPRequestHandler):
    """An engine whose model has a name of a megabyte, and that answers for every adapter."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Respond with the exposition or the models."""
        models = {"data": [{"id": name} for name in ADAPTERS]}
        self._respond(PAGE if self.path == "/metrics" else json.dumps(models))

    def do_POST(self) -> None:
        """Respond to a completion."""
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        choice = {"index": 0, "text": "b", "finish_reason": "stop"}
        self._respond(json.dumps({"id": "x", "model": asked["model"], "choices": [choice]}))

    def _respond(self, body: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def engine() -> Iterator[str]:
    """The engine's URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Engine)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_metrics_stay_whole_for_two_scrapers_at_once(tmp_path: Path) -> None:
    port = free_port()
    with engine() as url:
        settings = {
            "engines": [{"name": "e", "url": url, "scrape_interval": "1s"}],
            "proxy": {"listen": f"127.0.0.1:{port}", "join_wait": "1s", "workers": 1},
            "nvml": {"enabled": False},
        }
        agent = AgentProcess.with_settings(tmp_path, AgentPorts.free(), settings)
        with agent, Prometheus(tmp_path, scrape_of("agent", agent.url, every="5s")) as prometheus:

            def ask(model: str) -> int:
                body = {"model": model, "prompt": "a"}
                asked = f"http://127.0.0.1:{port}/v1/completions"
                return requests.post(asked, json=body, timeout=WITHIN_S).status_code

            with ThreadPoolExecutor(8) as clients:
                assert set(clients.map(ask, ADAPTERS)) == {200}
            # The page is too large to be read again and again.
            eventually(
                lambda: agent.api.summary(window="1h")["requests"] == len(ADAPTERS),
                within_s=WITHIN_S,
                what="every request counted",
            )
            with ThreadPoolExecutor(2) as scrapers:
                first, second = scrapers.map(lambda _: agent.api.exposition(), range(2))
            page = max(first, second, key=len)
            assert len(page) < 12_000_000
            assert total(page, "llm_requests_total") == len(ADAPTERS)
            running = f'llm_engine_requests_running{{engine="e",model="{LONG[:243]}~'
            assert running in page
            assert total(page, "llm_requests_total", model="other") >= 50
            assert total(page, "llm_agent_labels_replaced_total", label="model") >= 50
            eventually(
                lambda: prometheus.query(
                    f'sum(llm_requests_total{{job="agent"}}) == {len(ADAPTERS)}'
                ),
                within_s=WITHIN_S,
                what="a whole scrape by Prometheus",
            )
