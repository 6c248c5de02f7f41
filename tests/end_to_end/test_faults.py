"""Faults on a running site: the right alert arrives at a webhook, alone, and ends.

All faults are made at the same time, each in its own place, so that one must not cause an
alert on another either.
"""

import pytest

from agent.render.alerts.alert_rule import MIN_COUNT
from tests.end_to_end.faults import FAULTS, SLOW, Fault
from tests.end_to_end.story import Story

pytestmark = pytest.mark.timeout(1200)

# The requests of the client that asks for a model that does not exist.
_MISTAKES = (
    'llm_requests_total{{engine="slow-prefill",model!="simulated-slow-prefill",status="{}"}}'
)

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


def test_without_a_fault_only_the_watchdog_fires(story: Story) -> None:
    assert story.before == ()
    assert story.stirring == {"Watchdog"}
    assert {alert.name for alert in story.site.alerting.webhook.alerts("/deadman")} == {"Watchdog"}


@each_fault
def test_a_fault_is_reported_by_its_alert_alone(story: Story, fault: Fault) -> None:
    alerts = [dict(labels) for labels in story.of(fault)]
    assert len([labels for labels in alerts if fault.is_main(labels)]) == 1
    others = [labels for labels in alerts if not fault.is_main(labels)]
    events = story.site.agent.api.events()
    of_engine = [event for event in events if event["engine"] == fault.name]
    assert {labels["alertname"] for labels in others} <= fault.beside, of_engine
    assert {labels["severity"] for labels in others} <= {"ticket"}


@each_fault
def test_an_alert_ends_with_its_fault_and_does_not_fire_again(story: Story, fault: Fault) -> None:
    (statuses,) = [
        statuses for labels, statuses in story.of(fault).items() if fault.is_main(dict(labels))
    ]
    assert statuses[-1] == "resolved"
    assert "firing" not in statuses[statuses.index("resolved") :]


def test_a_clients_mistakes_are_counted_and_raise_no_alert(story: Story) -> None:
    prometheus = story.site.alerting.prometheus
    (row,) = prometheus.query(f"sum(last_over_time({_MISTAKES.format('invalid')}[1h]))")
    # More than any condition on failures asks for.
    assert float(row["value"][1]) > 10 * MIN_COUNT
    (failed,) = prometheus.query(f"sum(last_over_time({_MISTAKES.format('error')}[1h]))")
    assert float(failed["value"][1]) == 0
    raised = 'ALERTS{alertname=~"LlmRequestsFailing|LlmMissesExplained",%s}[1h]'
    for label in (f'engine="{SLOW}"', f'objective="{SLOW}"'):
        assert prometheus.query(f"last_over_time({raised % label})") == []


def test_no_alert_fires_without_a_fault(story: Story) -> None:
    strays = [
        alert
        for alert in story.all_
        if not any(fault.is_reported_by(alert, story.site) for fault in FAULTS)
    ]
    assert strays == []
