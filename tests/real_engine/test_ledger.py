"""Work that vanishes from the real engine's requests is in the ledger, and the proxy finds it."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.real_engine.watching import ENGINE, RUNNING, SPANS_ARRIVE_WITHIN_S, settings
from tests.real_parts.agent_process import AgentPorts, AgentProcess, HastyAgent
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import ANSWER_WITHIN_S, Vllm
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

# Five aborted streams took 3,010 prompt tokens (vllm#55634).
LEFT, PROMPT_TOKENS = 5, 602
LONGEST = 1400
# A busy engine may finish a request before it notices that its client has left.
OF_A_FINISHED = {"input_tokens": PROMPT_TOKENS, "output_tokens": LONGEST, "requests": 1}
WHOLE, TOKENS = 20, 100
SILENT_S = 1.0
MOST_UNACCOUNTED = 0.005


def ask(url: str, path: str, **body: Any) -> requests.Response:
    """A streamed response whose body is not read yet."""
    fields = {"model": "tiny-llama", "ignore_eos": True, "stream": True, **body}
    response = requests.post(f"{url}{path}", json=fields, stream=True, timeout=ANSWER_WITHIN_S)
    response.raise_for_status()
    return response


def leave(url: str) -> None:
    """Begin a stream with a long prompt, and leave it after its first token."""
    prompt = list(range(10, 10 + PROMPT_TOKENS))
    with closing(ask(url, "/v1/completions", prompt=prompt, max_tokens=LONGEST)) as response:
        lines = response.iter_lines()
        next(line for line in lines if line.startswith(b"data:"))


def leave_in_silence(engine: Vllm, agent: AgentProcess, url: str) -> None:
    """Begin streams, and leave them when nothing more comes of a stopped engine.

    The engines of users make no token between a client's leaving and the request's end;
    this one would make some hundred a second.
    """
    prompt = list(range(10, 10 + PROMPT_TOKENS))
    streams = [ask(url, "/v1/completions", prompt=prompt, max_tokens=LONGEST) for _ in range(LEFT)]
    events = [stream.iter_lines() for stream in streams]
    for lines in events:
        next(lines)
    with engine.standing_still():
        for stream, lines in zip(streams, events, strict=True):
            connection: Any = stream.raw.connection
            connection.sock.settimeout(SILENT_S)
            with suppress(requests.ConnectionError):
                list(lines)
            stream.close()
        eventually(
            lambda: rows_of_left(agent) == LEFT, within_s=SPANS_ARRIVE_WITHIN_S, what="their rows"
        )


def rows_of_left(agent: AgentProcess) -> int:
    """How many requests the agent knows whose clients left."""
    return sum(row["status"] == "cancelled" for row in agent.api.requests())


def whole(url: str) -> None:
    """A stream that is read to its end."""
    ask(url, "/v1/completions", prompt="bacade", max_tokens=TOKENS).content  # noqa: B018


def serve(url: str) -> None:
    """Streams that are read to their ends."""
    with ThreadPoolExecutor(RUNNING) as clients:
        list(clients.map(whole, [url] * WHOLE))


def several(url: str) -> None:
    """A chat with three choices, whose prompt the engine counts three times."""
    messages = [{"role": "user", "content": "hogonu bari"}]
    ask(url, "/v1/chat/completions", messages=messages, n=3, max_tokens=20).content  # noqa: B018


def counters(engine: Vllm) -> dict[str, float]:
    """What the engine itself has counted."""
    page = engine.exposition()
    return {
        "input_tokens": total(page, "vllm:prompt_tokens_total"),
        "output_tokens": total(page, "vllm:generation_tokens_total"),
        "requests": total(page, "vllm:time_to_first_token_seconds_count"),
    }


def finished_of(engine: Vllm) -> float:
    """How many requests the engine has finished."""
    return total(engine.exposition(), "vllm:request_success_total")


def idle(engine: Vllm) -> dict[str, float]:
    """The counters when the engine has let go of all requests."""
    eventually(
        lambda: total(engine.exposition(), "vllm:num_requests_running") == 0,
        within_s=SPANS_ARRIVE_WITHIN_S,
        what="an idle engine",
    )
    return counters(engine)


def less(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The difference, by name."""
    return {name: value - other[name] for name, value in one.items()}


def closed_ledger(agent: AgentProcess, grown: dict[str, float]) -> dict[str, Any]:
    """The ledger as soon as it is closed for all that the engine counted."""

    def closed() -> dict[str, Any]:
        ledger = agent.api.summary(window="1h")["ledger"]
        return ledger if ledger is not None and ledger["counted"] == grown else {}

    return eventually(closed, within_s=SPANS_ARRIVE_WITHIN_S, what=f"a closed ledger of {grown}")


def scraped(agent: AgentProcess) -> bool:
    """Whether the agent knows the engine's counters."""
    name = "llm_agent_scrapes_total"
    return total(agent.api.exposition(), name, outcome="ok", engine=ENGINE) >= 1


def assert_nearly_nothing(beyond: dict[str, float], counted: dict[str, float]) -> None:
    """Under half a percent of what the engine counted is unaccounted."""
    for name, value in counted.items():
        assert -1e-6 <= beyond[name] <= MOST_UNACCOUNTED * value, (beyond, counted)


def test_what_vanishes_is_in_the_ledger_and_behind_the_proxy_that_is_nearly_nothing(
    engine: Vllm, ports: AgentPorts, collector: Collector, tmp_path: Path
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    proxy = {"listen": f"127.0.0.1:{port}", "continuous_usage": True, "join_wait": "2s"}
    configured = settings(engine, collector) | {"proxy": proxy}
    with HastyAgent.with_settings(tmp_path, ports, configured) as agent:
        eventually(lambda: scraped(agent), within_s=SPANS_ARRIVE_WITHIN_S, what="a scrape")
        begin, finished = idle(engine), finished_of(engine)
        for _ in range(LEFT):
            leave(engine.url)
        direct_end, finished = idle(engine), finished_of(engine) - finished
        several(url)
        leave_in_silence(engine, agent, url)
        serve(url)
        end = idle(engine)
        ledger = closed_ledger(agent, less(end, begin))

    direct, proxied = less(direct_end, begin), less(end, direct_end)
    assert (direct["input_tokens"], direct["requests"]) == (LEFT * PROMPT_TOKENS, LEFT)
    assert proxied["requests"] == LEFT + 3 + WHOLE
    vanished = less(direct, {name: finished * value for name, value in OF_A_FINISHED.items()})
    assert vanished["requests"] > 0
    assert_nearly_nothing(less(ledger["unaccounted"], vanished), proxied)
    by_reason = {"aborted": LEFT - finished, "finished": 0, "died": 0, "refused": 0}
    assert ledger["unaccounted_requests"] == pytest.approx(by_reason, abs=1e-6)
    assert ledger["rows_without_tokens"] == 0
