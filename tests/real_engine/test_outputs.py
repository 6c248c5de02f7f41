"""Outputs of an agent beside the real engine: Prometheus, promtool and a browser."""

from pathlib import Path

import pytest

from tests.real_engine.watching import Row, rows_once_there
from tests.real_parts.agent_process import AgentProcess
from tests.real_parts.chromium import opened
from tests.real_parts.prometheus import Prometheus, complaints_about, scrape_of
from tests.real_parts.vllm import Vllm, span_request_id
from tests.real_parts.waiting import eventually

pytestmark = pytest.mark.timeout(1500)

ASKED = tuple(f"asked-{number}" for number in range(6))
SCRAPED_WITHIN_S = 180.0
TTFT_BUCKETS = "gen_ai_server_time_to_first_token_seconds_bucket"


@pytest.fixture(scope="module")
def rows(engine: Vllm, agent: AgentProcess) -> list[Row]:
    """All rows of the agent after its last request."""
    for request_id in ASKED:
        engine.complete(request_id=request_id, max_tokens=4)
    return rows_once_there(agent.api, {span_request_id(request_id) for request_id in ASKED})


def test_prometheus_scrapes_the_counts_and_the_trace_ids(
    agent: AgentProcess, rows: list[Row], tmp_path: Path
) -> None:
    with Prometheus(tmp_path, scrape_of("goodput-agent", agent.url)) as prometheus:
        counted = eventually(
            lambda: prometheus.query("sum(llm_slo_requests_total)"),
            within_s=SCRAPED_WITHIN_S,
            what="the scraped counter",
        )
        exemplars = prometheus.exemplars(TTFT_BUCKETS)
    assert float(counted[0]["value"][1]) == len(rows)
    seen = {exemplar["labels"]["trace_id"] for exemplar in exemplars}
    assert seen
    assert seen <= {row["trace_id"] for row in rows}


def test_promtool_accepts_the_exposition(agent: AgentProcess, rows: list[Row]) -> None:
    assert complaints_about(agent.api.exposition()) == []


def test_the_page_shows_the_summary_and_the_newest_requests(
    agent: AgentProcess, rows: list[Row]
) -> None:
    with opened(agent.url) as there:
        now = there.html("Why requests missed")
        there.page.get_by_role("link", name="Requests", exact=True).click()
        requests = there.html("Requests that began in the last")
        assert there.problems == []
    summary = agent.api.summary(window="5m")
    assert summary["requests"] == len(rows)
    assert f"{summary['met']} met, {summary['missed']} missed" in now
    for row in rows:
        assert row["request_id"] in requests
