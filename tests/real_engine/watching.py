"""What the tests of this folder agree on: names, limits, and how rows are awaited."""

from collections import Counter
from collections.abc import Collection
from typing import Any

from tests.real_parts.agent_process import AgentApi
from tests.real_parts.bench import BenchedRequest, BenchmarkResult, Limits
from tests.real_parts.collector import Collector
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import Vllm
from tests.real_parts.waiting import eventually

ENGINE, BAD_ENGINE = "chat-0", "bad-0"
OBJECTIVE = "chat"
LIMITS = Limits(ttft_ms=200, tpot_ms=120)
# What the engine takes into one step. So few requests run at once that the prompts of a benchmark,
# of 48 tokens at most, fit in one.
STEP_TOKENS, RUNNING = 512, 8
# Longer than the exporter's pause between two tries at a receiver that was away.
SPANS_ARRIVE_WITHIN_S = 180.0

Row = dict[str, Any]


def settings(engine: Vllm, collector: Collector, *, url: str | None = None) -> dict[str, Any]:
    """The real engine, perhaps by another address, one that is away, and one objective."""
    return {
        "otlp": {"forward_to": f"grpc://127.0.0.1:{collector.port}"},
        "engines": [
            {
                "name": ENGINE,
                "url": url or engine.url,
                "scrape_interval": "1s",
                "log": str(engine.log),
            },
            engine_away(),
        ],
        "objectives": [{"name": OBJECTIVE, "ttft_ms": LIMITS.ttft_ms, "tpot_ms": LIMITS.tpot_ms}],
    }


def engine_away() -> dict[str, str]:
    """The settings of an engine that nobody can reach."""
    return {"name": "away-0", "url": f"http://127.0.0.1:{free_port()}"}


def rows_once_there(api: AgentApi, request_ids: Collection[str]) -> list[Row]:
    """Every row that the agent has, as soon as each of these requests has one."""

    def look() -> list[Row]:
        rows = api.requests()
        return rows if set(request_ids) <= {row["request_id"] for row in rows} else []

    return eventually(
        look, within_s=SPANS_ARRIVE_WITHIN_S, what=f"rows of {len(request_ids)} requests"
    )


def times_seen(rows: list[Row], request_ids: Collection[str]) -> dict[str, int]:
    """How many rows each of these requests has."""
    seen = Counter(row["request_id"] for row in rows)
    return {request_id: seen[request_id] for request_id in request_ids}


def good_for_the_client(result: BenchmarkResult) -> list[BenchedRequest]:
    """The requests that the benchmark counts in its goodput."""
    limits_s = LIMITS.ttft_ms / 1000, LIMITS.tpot_ms / 1000
    good = [r for r in result.requests if r.ttft_s <= limits_s[0] and r.tpot_s <= limits_s[1]]
    assert len(good) == round(result.goodput_rps * result.duration_s)
    return good


def certainly_met(result: BenchmarkResult) -> list[BenchedRequest]:
    """Those of them that no other clock may see as missed.

    A client has its first token last. Its TPOT may be lower than another clock's where its first
    token was late, so that counts only far below the limit.
    """
    far_s = LIMITS.tpot_ms / 2000
    return [request for request in good_for_the_client(result) if request.tpot_s <= far_s]
