"""Counters that alerts use are published from the start, so that no first increment is missed."""

import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as read_text

from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.gpu_facts import XID_ERRORS
from agent.catalog.metric import Kind
from agent.catalog.reasons import PUSHES_DROPPED, LostRows
from agent.outputs.prometheus.agent_exposition import AgentExposition
from agent.outputs.prometheus.meter import Meter
from agent.records.engine import EngineSample
from agent.records.gpu import Facts, GpuSample
from agent.sources.dcgm.exporter_gpus import XidCounts, XidSeries
from agent.sources.nvml.xid_events import XidErrors
from tests.outputs.prometheus.filled import INFO, OBJECTIVES
from tests.records.making import NOON
from tests.render.alerts.cases import expressions, selects, series_of

RULES = Path(__file__).parents[3] / "alerts" / "goodput-agent.yml"
GPU = "GPU-0"

_COUNTED = re.compile(r"\b(?:increase|rate)\(([\w:]+(?:\{(?:[^}\"]|\"[^\"]*\")*\})?)\[")
# Counters of the agent itself, not copied from an engine or a driver.
OWN = {f"{metric.name}_total" for metric in m.AGENT_METRICS if metric.kind is Kind.COUNTER}
OWN |= {f"{XID_ERRORS.name}_total"}
# An alert only names the cause with the most seconds: 48 zeros of each model are not worth its
# first increment.
OWN -= {f"{m.SLO_MISSED_SECONDS.name}_total"}
# As an engine's histograms, from which it comes, it begins when the engine has them.
OWN -= {f"{m.SLO_ENGINE_REQUESTS.name}_total"}


def counted() -> set[str]:
    """Return the selectors of own counters whose increase an alert uses."""
    selectors = {
        selector
        for expression in expressions(yaml.safe_load(RULES.read_text()))
        for inside in _COUNTED.findall(expression)
        for selector in series_of(inside)
    }
    return {selector for selector in selectors if selector.partition("{")[0] in OWN}


def at_start(xids: Facts) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield each counter after the first scrape of an engine, of an agent with it and one GPU."""
    gpu = GpuSample(gpu=GPU, index=0, name="NVIDIA H200", at=NOON, facts=xids)
    meter = Meter(OBJECTIVES, ["chat-0"])
    for reason in LostRows:
        # As an agent that publishes begins.
        meter.count(m.LOST_ROWS, reason, by=0)
    for dropped in PUSHES_DROPPED:
        # As one begins that pushes its metrics.
        meter.count(own.PUSH_DROPPED, dropped, by=0)
    # As one begins with a proxy before several engines.
    meter.count(m.PROXY_FORCED, by=0)
    for failure in product(own.DiscoveryCall, own.DiscoveryFailure):
        # As one begins that finds its engines in a cluster: see tests/test_app_discovery.py.
        meter.gauge(own.DISCOVERY_FAILURES, lambda: 0, "llm", *failure)
    meter.sample(EngineSample(engine="chat-0", at=NOON, dialect="vllm", model="llama", facts={}))
    body, _ = AgentExposition(meter, INFO, lambda: [gpu]).render("text/plain")
    for family in read_text(body.decode()):
        for sample in family.samples:
            if family.type == "counter":
                yield sample.name, sample.labels, sample.value


def counted_by_nvml() -> Facts:
    errors = XidErrors(lambda: NOON)
    errors.count([GPU])
    return errors.facts(GPU)


def counted_from_dcgm() -> Facts:
    counts = XidCounts()
    counts.read(GPU, {XidSeries.LAST: {}}, NOON)
    return counts.facts(GPU)


@pytest.mark.parametrize("xids", [counted_by_nvml, counted_from_dcgm])
def test_every_counter_of_an_alert_starts_at_zero(xids: Callable[[], Facts]) -> None:
    counters = list(at_start(xids()))
    assert {name for name, _, value in counters if value} == {f"{m.SCRAPES.name}_total"}
    missing = {
        selector
        for selector in counted()
        if not any(selects(selector, name, labels) for name, labels, _ in counters)
    }
    assert missing == set()
    assert len(counted()) > 15


@pytest.mark.parametrize("xids", [counted_by_nvml, counted_from_dcgm])
def test_each_xid_of_an_alert_is_published_from_the_start(xids: Callable[[], Facts]) -> None:
    shown = {labels["xid"] for name, labels, _ in at_start(xids()) if name.startswith("gpu_xid")}
    assert {"13", "31", "43", "48", "79"} <= shown
