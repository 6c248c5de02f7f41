"""Every series that a rule selects existed on the site, with its labels and values."""

import pytest
import yaml

from agent.catalog.gpu_problems import XIDS, XidGrade
from tests.end_to_end.faults import FAULTS
from tests.end_to_end.story import Story
from tests.render.alerts.cases import expressions, series_of

pytestmark = pytest.mark.timeout(1200)

# Causes without a ticket of their own.
GRADED = sorted(xid.number for xid in XIDS.values() if xid.grade is not XidGrade.WARNING)

NOT_THERE = {
    # GPUs older than Ampere retire pages.
    "gpu_page_retirement_pending",
    # Of agents that publish.
    "llm_agent_lost_rows_total",
    "llm_agent_publish_lag_seconds",
    # Of agents with a proxy before several engines.
    "llm_proxy_engine_in_rotation",
    "llm_proxy_requests_forced_total",
    # Of agents that find their engines in Kubernetes.
    "llm_agent_discovery_failures_total",
    # Of agents that push their metrics.
    "llm_agent_metrics_push_dropped_total",
    # No upgrade renames a series.
    "llm_engine_fact_missing",
    # Xids of another grade than that of the fault.
    f'gpu_xid_last_seen_timestamp_seconds{{xid!~"{"|".join(map(str, GRADED))}"}}',
    # Limits unknown to the rules, which exist only with different settings.
    *(
        f'llm_slo_limit_seconds{{objective="{fault.name}",measure!~"ttft|tpot"}}'
        for fault in FAULTS
        if fault.window is not None
    ),
}


def test_each_selector_found_its_series(story: Story) -> None:
    selected = {
        series
        for expression in expressions(yaml.safe_load(story.site.alerting.rules.read_text()))
        for series in series_of(expression)
        if not series.startswith("ALERTS{")
    }
    missing = {
        series
        for series in selected
        if not story.site.alerting.prometheus.query(f"last_over_time({series}[1h])")
    }
    assert missing == NOT_THERE, "\n".join(sorted(missing ^ NOT_THERE))
    assert len(selected) > 60
