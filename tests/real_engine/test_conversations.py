"""Conversations with the real vLLM through the proxy, and what autoscalers read of them."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import requests

from tests.real_engine.watching import (
    ENGINE,
    LIMITS,
    OBJECTIVE,
    SPANS_ARRIVE_WITHIN_S,
    settings,
)
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(600)

SESSION_HEADER = "X-Conversation"
TURNS, OUTPUT_TOKENS = 3, 8
# vLLM on processors keeps prompts in blocks of 128 tokens.
WORDS = 120
THINKS_S = 0.2
# A wall clock that is being corrected and a monotonic one part by less in such a time.
SLACK_S = 0.005
ANSWER_WITHIN_S = 60.0

Turn = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTurn:
    """What a client measured of a streamed turn; Unix times."""

    began_at: float
    first_at: float
    ended_at: float
    text: str
    usage: Mapping[str, Any]

    @property
    def worst_ratio(self) -> float:
        """No latency over its limit is above this, by any clock between engine and client."""
        ttft_ms = 1000 * (self.first_at - self.began_at)
        tpot_ms = 1000 * (self.ended_at - self.began_at) / (OUTPUT_TOKENS - 1)
        return max(ttft_ms / LIMITS.ttft_ms, tpot_ms / LIMITS.tpot_ms)


@dataclass(slots=True, kw_only=True)
class Talking:
    """A client of the proxy, and the agent behind it."""

    agent: AgentProcess
    url: str
    model: str
    asked: list[ClientTurn] = field(default_factory=list)

    def ask(
        self, messages: Sequence[Any], headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> ClientTurn:
        """One streamed turn."""
        began_at = time.time()
        with requests.post(
            f"{self.url}/v1/chat/completions",
            json={
                "model": self.model,
                "messages": messages,
                "max_tokens": OUTPUT_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **body,
            },
            headers=headers,
            stream=True,
            timeout=ANSWER_WITHIN_S,
        ) as response:
            response.raise_for_status()
            first_at, events = 0.0, []
            for line in response.iter_lines():
                if line.startswith(b"data: {"):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                    # The first event has a role and no token.
                    first_at = first_at or (time.time() if len(events) > 1 else 0.0)
        texts = [choice["delta"].get("content") for each in events for choice in each["choices"]]
        turn = ClientTurn(
            began_at=began_at,
            first_at=first_at,
            ended_at=time.time(),
            text="".join(filter(None, texts)),
            usage=events[-1]["usage"],
        )
        self.asked.append(turn)
        return turn

    def converse(
        self, topic: str, headers: Mapping[str, str], body: Mapping[str, Any]
    ) -> list[ClientTurn]:
        """Three turns, each with all that was said before; a user thinks between them."""
        messages = [{"role": "user", "content": " ".join([topic] * WORDS)}]
        turns: list[ClientTurn] = []
        for _ in range(TURNS):
            if turns:
                time.sleep(THINKS_S)
                said = {"role": "assistant", "content": turns[-1].text}
                messages += [said, {"role": "user", "content": f"more {topic}"}]
            turns.append(self.ask(messages, headers, body))
        return turns

    def turns_of(self, session: str) -> list[Turn]:
        """The turns that the agent has of a session, once there are all."""

        def read() -> list[Turn]:
            found = self.agent.api.json("/api/v1/conversation", {"session": session})
            turns: list[Turn] = found["turns"]
            return turns if len(turns) == TURNS else []

        return eventually(read, within_s=SPANS_ARRIVE_WITHIN_S, what=f"turns of {session}")

    def sessions(self) -> list[str]:
        """The sessions of the last hour."""
        found = self.agent.api.json("/api/v1/conversations", {})
        return [each["session"] for each in found["items"]]


@pytest.fixture(scope="module")
def talking(
    engine: Vllm,
    ports: AgentPorts,
    collector: Collector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Talking]:
    """An agent of its own, on the ports that the engine sends its spans to."""
    listen = f"127.0.0.1:{free_port()}"
    configured = settings(engine, collector) | {
        "proxy": {"listen": listen, "engine": ENGINE, "session_header": SESSION_HEADER}
    }
    folder = tmp_path_factory.mktemp("conversations")
    with AgentProcess.with_settings(folder, ports, configured) as agent:
        yield Talking(agent=agent, url=f"http://{listen}", model=engine.model)


def is_conversation(turns: Sequence[Turn], asked: Sequence[ClientTurn]) -> None:
    """The agent has each turn as its client measured it."""
    assert [turn["number"] for turn in turns] == [1, 2, 3]
    for turn, client in zip(turns, asked, strict=True):
        usage = client.usage
        assert turn["input_tokens"] == usage["prompt_tokens"]
        assert turn["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert turn["output_tokens"] == OUTPUT_TOKENS
        assert 0 < turn["ttft_s"] <= client.first_at - client.began_at
    assert (turns[0]["gap_s"], turns[0]["cached_tokens"]) == (None, 0)
    for turn, (before, client) in zip(turns[1:], pairwise(asked), strict=True):
        assert 0 < turn["cached_tokens"] / turn["input_tokens"] < 1
        # The proxy ends a turn before its client does, and sees the next one later.
        assert client.began_at - before.ended_at - SLACK_S <= turn["gap_s"]
        assert turn["gap_s"] <= client.first_at - before.first_at + SLACK_S


def test_a_session_by_the_header_has_its_turns_with_gaps_and_cached_shares(
    talking: Talking,
) -> None:
    body = {"prompt_cache_key": "not-this-one"}
    asked = talking.converse("header", {SESSION_HEADER: "of-header"}, body)
    is_conversation(talking.turns_of("of-header"), asked)
    assert "not-this-one" not in talking.sessions()


def test_without_the_header_the_cache_key_names_the_session(talking: Talking) -> None:
    body = {"prompt_cache_key": "of-key", "cache_salt": "s1"}
    asked = talking.converse("caching", {}, body)
    is_conversation(talking.turns_of("of-key"), asked)


def test_without_both_a_digest_of_the_salt_names_the_session(talking: Talking) -> None:
    """The engine keeps prompts apart by their salts: those of the test before say nothing here."""
    asked = talking.converse("caching", {}, {"cache_salt": "a secret"})
    (session,) = eventually(
        lambda: [each for each in talking.sessions() if each.startswith("salt-")],
        within_s=SPANS_ARRIVE_WITHIN_S,
        what="the session of a salt",
    )
    is_conversation(talking.turns_of(session), asked)
    assert "secret" not in session


def test_the_signals_of_autoscalers_are_within_what_the_client_measured(talking: Talking) -> None:
    labels = {"engine": ENGINE, "model": talking.model}
    of_objective = {**labels, "objective": OBJECTIVE}
    for number in range(2):
        talking.converse(f"load {number}", {SESSION_HEADER: f"load-{number}"}, {})
    # Of the last minute, and of the time until its first poll.
    least_per_s = 2 * TURNS / 65.0

    def read() -> str:
        page = talking.agent.api.exposition()
        total(page, "llm_slo_p90_to_limit_ratio", **of_objective, window="1m")
        return page if total(page, "llm_engine_arrival_rate", **labels) >= least_per_s else ""

    page = eventually(read, within_s=ANSWER_WITHIN_S, what="the signals")
    # It is unknown before 5 s.
    assert total(page, "llm_engine_arrival_rate", **labels) <= len(talking.asked) / 5.0
    ratios = {
        window: total(page, "llm_slo_p90_to_limit_ratio", **of_objective, window=window)
        for window in ("1m", "5m")
    }
    worst = max(each.worst_ratio for each in talking.asked)
    assert 0 < ratios["1m"] <= 1.01 * worst
    assert 0 < ratios["5m"] <= 1.01 * worst
    needed = total(page, "llm_slo_replicas_needed", **of_objective)
    by_latency = min(ratios["1m"], 2.0)
    # By latency, or by the share of the engine that is occupied: no minute has held the objective.
    assert by_latency - 0.001 <= needed <= max(by_latency, 1.0) + 0.001
