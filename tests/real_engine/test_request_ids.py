"""Ids of requests, as the real engine gives them: one id does not mean one span."""

import pytest

from tests.real_engine.watching import times_seen
from tests.real_parts.agent_process import AgentProcess
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)


def rows_of(agent: AgentProcess, request_id: str, *, expected: int) -> None:
    named = span_request_id(request_id)
    eventually(
        lambda: times_seen(agent.api.requests(), {named})[named] == expected,
        within_s=180,
        what=f"{expected} rows of {named}",
    )
    detail = agent.api.request(named)
    assert len(detail["others"]) == expected - 1
    spans = {(row["trace_id"], row["span_id"]) for row in (detail, *detail["others"])}
    assert len(spans) == expected


def test_every_answer_to_one_prompt_has_a_row(engine: Vllm, agent: AgentProcess) -> None:
    engine.complete(request_id="three-answers", max_tokens=3, choices=3)
    rows_of(agent, "three-answers", expected=3)


def test_an_id_that_a_client_repeats_has_a_row_for_each_request(
    engine: Vllm, agent: AgentProcess
) -> None:
    for _ in range(2):
        engine.complete(request_id="repeated", max_tokens=3)
    rows_of(agent, "repeated", expected=2)
