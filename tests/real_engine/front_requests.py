"""Requests to an engine whose plugin measures them in its front, and their rows."""

from dataclasses import dataclass
from typing import Any

import pytest
import requests

from tests.real_parts.agent_process import AgentApi, AgentProcess
from tests.real_parts.engine_server import MODEL
from tests.real_parts.waiting import eventually

KEY = "sk-test"
ANSWER_WITHIN_S, ROW_WITHIN_S = 60.0, 30.0

CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
WHOLE = {"ignore_eos": True, "max_tokens": 12}
STREAMED = {"stream": True, **WHOLE}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WatchedFront:
    """An engine by its address and by its name in the agent."""

    url: str
    name: str
    agent: AgentProcess

    @property
    def api(self) -> AgentApi:
        """The agent's API."""
        return self.agent.api

    def ask(self, path: str, request_id: str, body: dict[str, Any], **headers: str) -> Any:
        """Send a request; return the response, whose body is not read yet."""
        sent = {"Authorization": f"Bearer {KEY}", "X-Request-Id": request_id, **headers}
        return requests.post(
            f"{self.url}{path}",
            json={"model": MODEL, **body},
            headers=sent,
            stream=True,
            timeout=ANSWER_WITHIN_S,
        )

    def is_known(self) -> bool:
        """Whether the agent knows which model the engine serves: else a failed request has none."""
        engines = self.api.items("/api/v1/engines", {})
        return [each["model"] for each in engines if each["name"] == self.name] == [MODEL]

    def row(self, request_id: str) -> Row:
        """The one row of a request, once it is there."""

        def found() -> list[Row]:
            return [row for row in self.api.requests() if row["request_id"] == request_id]

        rows = eventually(found, within_s=ROW_WITHIN_S, what=f"a row of {request_id}")
        assert len(rows) == 1
        return rows[0]

    def row_of(
        self, path: str, body: dict[str, Any], choices: int, input_tokens: int, output_tokens: int
    ) -> Row:
        """The row of a request that ends well, with what is the same of every engine in it."""
        request_id = f"both{path.replace('/', '-')}-{choices}-{'stream' in body}"
        response = self.ask(path, request_id, body, **{"X-SLO-TTFT-ms": "1500"})
        assert response.status_code == 200
        assert response.content
        row = self.row(request_id)
        assert (row["vantage"], row["status"], row["http_status"]) == ("joined", "ok", 200)
        assert (row["engine"], row["model"], row["route"]) == (self.name, MODEL, path)
        assert (row["input_tokens"], row["output_tokens"]) == (input_tokens, output_tokens)
        assert row["tenant"].startswith("key-")
        assert (row["preemptions"], row["finish_reason"]) == (0, "length")
        assert row["ttft_limit_s"] == 1.5
        if choices == 1:
            assert row["queue_s"] + row["prefill_s"] <= row["engine_e2e_s"] <= row["e2e_s"]
        assert (row["holdback_s"] is not None) == (choices == 1 and "stream" in body)
        return row

    def refused_row(
        self, name: str, path: str, body: dict[str, Any], headers: dict[str, str], status: int
    ) -> Row:
        """The row of a request that the engine refuses with this HTTP status."""
        assert self.ask(path, f"refused-{name}", body, **headers).status_code == status
        row = self.row(f"refused-{name}")
        assert (row["vantage"], row["status"]) == ("proxy", "invalid")
        assert (row["http_status"], row["output_tokens"]) == (status, None)
        return row

    def left_row(self, max_tokens: int) -> Row:
        """The row of a request whose client left before the response began."""
        with pytest.raises(requests.ReadTimeout):
            requests.post(
                f"{self.url}/v1/chat/completions",
                json={"model": MODEL, **CHAT, "ignore_eos": True, "max_tokens": max_tokens},
                headers={"Authorization": f"Bearer {KEY}", "X-Request-Id": "left-whole"},
                timeout=(ANSWER_WITHIN_S, 0.2),
            )
        row = self.row("left-whole")
        error = row["status"], row["http_status"], row["error"]
        assert error == ("cancelled", None, "client_gone")
        assert row["vantage"] == "joined"
        # On a busy machine it left before the first token.
        assert row["output_tokens"] is not None
        return row

    def left_stream_row(self) -> Row:
        """The row of a stream that its client left."""
        body = {**CHAT, **STREAMED, "max_tokens": 1500}
        with self.ask("/v1/chat/completions", "left-stream", body) as response:
            lines = (line for line in response.iter_lines() if line)
            # The first event has a role and no text.
            next(lines)
            next(lines)
        row = self.row("left-stream")
        error = row["status"], row["http_status"], row["error"]
        assert error == ("cancelled", 200, "client_gone")
        assert 0 < row["output_tokens"] < 1500
        return row
