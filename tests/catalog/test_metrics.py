"""The rules for every published metric, and for the reasons in the labels of failure counters."""

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import grpc
import pytest

from agent.catalog import engine_facts, gpu_facts, routers
from agent.catalog import metrics as m
from agent.catalog import own_health as own
from agent.catalog.engine_facts import ENGINE_FACTS
from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.host_facts import HOST_FACTS
from agent.catalog.metric import Kind, Merge, Metric, Unit
from agent.catalog.reasons import FORWARDS_DROPPED, ProxyFailure, grpc_reason, http_reason
from agent.catalog.routers import ROUTER_FACTS
from tests.published_metrics import METRICS

PREFIXES = ("llm_", "gpu_", "gen_ai_server_")
# Endings of units that are no base units, or that the exposition adds.
WRONG_ENDINGS = re.compile(
    r"_(total|ms|us|ns|milliseconds|microseconds|minutes|hours|kb|mb|gb|kib|mib|gib|percent|pct"
    r"|count|sum|bucket|created|info_info)$"
)
# Prometheus sets these itself.
RESERVED_LABELS = {"le", "quantile", "job", "instance"}


def test_no_name_is_used_twice() -> None:
    names = [metric.name for metric in METRICS]
    assert sorted(set(names)) == sorted(names)


def test_every_declared_metric_is_published() -> None:
    values = (*vars(m).values(), *vars(own).values())
    declared = {value.name for value in values if isinstance(value, Metric)}
    assert declared == {metric.name for metric in m.AGENT_METRICS}


@pytest.mark.parametrize(
    ("module", "listed", "prefix", "labels"),
    [
        (engine_facts, ENGINE_FACTS, "llm_engine_", {"engine", "model"}),
        (gpu_facts, GPU_FACTS, "gpu_", {"gpu", "uuid", "index"}),
        (routers, ROUTER_FACTS, "llm_router_", {"router"}),
    ],
    ids=["engine", "gpu", "router"],
)
def test_facts_are_listed_and_named_for_their_source_and_leave_its_labels_to_the_exposition(
    module: ModuleType, listed: Sequence[Metric], prefix: str, labels: set[str]
) -> None:
    declared = {value.name for value in vars(module).values() if isinstance(value, Metric)}
    assert {fact.name for fact in listed} == declared
    for fact in listed:
        assert fact.name.startswith(prefix)
        assert not labels & set(fact.labels)


def test_a_name_has_a_known_prefix_and_plain_letters() -> None:
    for metric in METRICS:
        assert metric.name.startswith(PREFIXES)
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)+", metric.name)


def test_a_name_ends_in_its_base_unit_and_in_no_other() -> None:
    for metric in METRICS:
        assert not WRONG_ENDINGS.search(metric.name)
        units = [unit for unit in Unit if unit and metric.name.endswith(f"_{unit}")]
        assert units == ([metric.unit] if metric.unit else [])


def test_a_help_text_is_one_sentence() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[A-Z0-9][^\n\\\"]*[A-Za-z0-9)]\.", metric.help)
        assert " " in metric.help


def test_labels_are_not_reserved_by_prometheus() -> None:
    for metric in METRICS:
        assert len(set(metric.labels)) == len(metric.labels)
        assert not RESERVED_LABELS.intersection(metric.labels)
        for label in metric.labels:
            assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", label)


def test_ratios_and_shared_counters_are_never_summed() -> None:
    for metric in METRICS:
        if metric.unit is Unit.RATIO:
            assert metric.merge is Merge.MAX
        if metric.kind in (Kind.COUNTER, Kind.HISTOGRAM):
            # Several agents publish the same numbers of one GPU, machine or router: no sum.
            shared = metric in (*GPU_FACTS, *HOST_FACTS, *ROUTER_FACTS)
            assert metric.merge is (Merge.MAX if shared else Merge.SUM)
        if metric.kind is Kind.HISTOGRAM:
            assert metric.unit is Unit.SECONDS


# The explicit buckets that the GenAI conventions recommend.
ADVISED = {
    "gen_ai_server_time_to_first_token_seconds": (
        m.TTFT_BOUNDS_S,
        (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        m.TPOT_BOUNDS_S,
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5),
    ),
    "gen_ai_server_request_duration_seconds": (
        m.DURATION_BOUNDS_S,
        (*(0.01 * 2**power for power in range(14)),),
    ),
}


@pytest.mark.parametrize("name", ADVISED)
def test_metrics_of_the_genai_conventions_have_their_names_and_buckets(name: str) -> None:
    bounds, advised = ADVISED[name]
    metric = next(metric for metric in METRICS if metric.name == name)
    assert metric.kind is Kind.HISTOGRAM
    assert set(advised) <= set(bounds)


@pytest.mark.parametrize("bounds", [m.TTFT_BOUNDS_S, m.TPOT_BOUNDS_S, m.DURATION_BOUNDS_S])
def test_bucket_bounds_rise_from_above_zero(bounds: tuple[float, ...]) -> None:
    assert bounds[0] > 0
    assert all(low < high for low, high in pairwise(bounds))


AGENT = Path(__file__).parents[2] / "agent"


def test_every_declared_failure_of_the_proxy_is_reported_somewhere() -> None:
    used: set[str] = set()
    for file in AGENT.rglob("*.py"):
        used |= {*re.findall(r"\bProxyFailure\.(\w+)", file.read_text())}
    assert used == {reason.name for reason in ProxyFailure}


def test_every_grpc_status_code_has_a_reason() -> None:
    codes = {code.name for code in grpc.StatusCode} - {"OK"}
    assert {grpc_reason(code) for code in codes} <= set(FORWARDS_DROPPED)


@pytest.mark.parametrize(
    ("status", "reason"), [(503, "http_503"), (413, "http_413"), (418, "http_other")]
)
def test_rare_http_statuses_of_a_destination_share_a_reason(status: int, reason: str) -> None:
    assert http_reason(status) == reason
    assert reason in FORWARDS_DROPPED
