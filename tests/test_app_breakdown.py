"""Latencies by engine, model, tenant and input length, from a running agent."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import requests

from agent.analysis.quantiles import RELATIVE_ERROR
from agent.analysis.tally import input_length_of
from agent.records.queries import Dimension
from tests.outputs.api.traffic import exact
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.ports import free_port
from tests.real_parts.waiting import eventually
from tests.simulated import WITHIN_S, Row, Simulator, rows_in

# Without traffic of the simulated engines: these tests count their own requests.
QUIET = {
    **{"arrival_rate": 0.001, "time_scale": 5.0, "max_model_len": 100_000},
    "kv_cache": {"blocks": 8192},
}
# One input length of each group; a prompt of token ids has exactly as many tokens.
LENGTHS = (100, 2_000, 8_000, 20_000, 70_000)


def complete(url: str, model: str, tokens: int, headers: Mapping[str, str]) -> None:
    """A streamed completion of a prompt of this many tokens, read to its end."""
    body = {"model": model, "prompt": [1] * tokens, "max_tokens": 3, "stream": True}
    response = requests.post(f"{url}/v1/completions", json=body, headers=headers, timeout=WITHIN_S)
    response.raise_for_status()


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """Two engines with a model each; two tenants use the first through the proxy."""
    folder, ports, proxy = tmp_path_factory.mktemp("watched"), AgentPorts.free(), free_port()
    models = {f"engine-{number}": f"simulated-{number}" for number in range(2)}
    first, second = (
        Simulator(folder, grpc=ports.grpc, service=name, scenario=QUIET | {"model": model})
        for name, model in models.items()
    )
    with first, second:
        settings = {
            "engines": [
                {"name": name, "url": engine.url, "scrape_interval": "1s"}
                for name, engine in zip(models, (first, second), strict=True)
            ],
            "proxy": {
                **{"listen": f"127.0.0.1:{proxy}", "engine": "engine-0", "join_wait": "30s"},
                "tenant_header": "X-Tenant",
            },
        }
        with AgentProcess.with_settings(folder, ports, settings) as agent:
            for tokens in LENGTHS:
                for tenant in ("acme", "umbrella"):
                    complete(
                        f"http://127.0.0.1:{proxy}", "simulated-0", tokens, {"X-Tenant": tenant}
                    )
            complete(second.url, "simulated-1", LENGTHS[0], {})
            yield agent


def counted_rows(agent: AgentProcess) -> list[Row]:
    """The rows of all requests, once all of them are counted."""

    def read() -> list[Row]:
        rows = [row for row in rows_in(agent, 2 * len(LENGTHS) + 1) if row["counted"]]
        return rows if len(rows) == 2 * len(LENGTHS) + 1 else []

    return eventually(read, within_s=WITHIN_S, what="rows that are counted")


def group_of(row: Row, by: Dimension) -> Any:
    return input_length_of(row["input_tokens"]) if by == "input_length" else row[by]


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("input_length", {"0-1k", "1k-4k", "4k-16k", "16k-64k", "64k+"}),
        ("engine", {"engine-0", "engine-1"}),
        ("model", {"simulated-0", "simulated-1"}),
        ("tenant", {"acme", "umbrella", None}),
    ],
)
def test_each_group_has_the_percentiles_of_its_own_rows(
    watched: AgentProcess, by: Dimension, expected: set[str | None]
) -> None:
    rows = counted_rows(watched)
    groups = {group["group"]: group for group in watched.api.breakdown(by=by)["groups"]}
    assert groups.keys() == expected
    for name, figures in groups.items():
        of = [row for row in rows if group_of(row, by) == name]
        assert figures["requests"] == len(of)
        for latency in ("ttft", "tpot", "e2e", "queue"):
            for percentile, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
                wanted = exact([row[f"{latency}_s"] for row in of], q)
                near = pytest.approx(wanted, rel=RELATIVE_ERROR * (1 + 1e-9), abs=0.0011)
                assert figures[f"{latency}_ms"][percentile] == near, (name, latency, percentile)
