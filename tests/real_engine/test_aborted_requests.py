"""vLLM's spans and counters of requests whose clients left: a first token, and no more."""

import pytest

from tests.real_engine.watching import rows_once_there, times_seen
from tests.real_parts.agent_process import AgentProcess
from tests.real_parts.collector import Collector
from tests.real_parts.metric_pages import total
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

ABANDONED = ("left-1", "left-2", "left-3")
LONGEST = 1500
LAST = "stayed"


def figures(engine: Vllm) -> dict[str, float]:
    page = engine.exposition()
    return {
        name: total(page, f"vllm:{name}")
        for name in (
            "num_requests_running",
            "request_success_total",
            "e2e_request_latency_seconds_count",
            "time_to_first_token_seconds_count",
            "generation_tokens_total",
        )
    }


def test_the_engine_reports_no_request_that_its_client_left(
    engine: Vllm, agent: AgentProcess, collector: Collector
) -> None:
    before = figures(engine)
    for request_id in ABANDONED:
        with engine.streaming(request_id=request_id, max_tokens=LONGEST):
            pass
    # Spans leave the engine in the order in which requests end, so this one comes last.
    engine.complete(request_id=LAST, max_tokens=2)
    eventually(
        lambda: figures(engine)["num_requests_running"] == 0,
        within_s=180,
        what="an engine that has let go of what was abandoned",
    )
    eventually(
        lambda: span_request_id(LAST) in collector.spans(), within_s=180, what="the last span"
    )
    after = figures(engine)

    abandoned = {span_request_id(request_id) for request_id in ABANDONED}
    grown = {name: after[name] - before[name] for name in after}
    # On a busy machine the engine may finish a request before it notices that the client left.
    finished = abandoned & collector.spans().keys()
    rows = rows_once_there(agent.api, {span_request_id(LAST), *finished})
    assert len(finished) < len(ABANDONED)
    assert times_seen(rows, abandoned) == {each: int(each in finished) for each in abandoned}
    # The engine's own counters leave out the others as well, though each had a first token.
    assert grown["request_success_total"] == 1 + len(finished)
    assert grown["e2e_request_latency_seconds_count"] == 1 + len(finished)
    assert grown["time_to_first_token_seconds_count"] == 1 + len(ABANDONED)
    assert grown["generation_tokens_total"] < len(ABANDONED) * LONGEST
