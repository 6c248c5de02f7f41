"""Errors of percentiles of the agent and of Prometheus, on the real engine.

Run as a module, it rewrites the table of docs/percentiles.md.
"""

import platform
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil, inf
from os import cpu_count, getloadavg
from pathlib import Path
from typing import Any

import requests

import agent
from agent.analysis.quantiles import bins_of, quantile
from tests.real_engine.watching import ENGINE, LIMITS, Row, rows_once_there
from tests.real_parts.agent_process import AgentApi, AgentPorts, AgentProcess
from tests.real_parts.bench import BenchmarkResult, BenchmarkRunner, Load
from tests.real_parts.ports import free_port
from tests.real_parts.prometheus import Prometheus, scrape_of
from tests.real_parts.vllm import ANSWER_WITHIN_S, SpanExport, Vllm
from tests.real_parts.waiting import eventually

DOCUMENT = Path(__file__).parents[2] / "docs" / "percentiles.md"
MEASURED = ("<!-- measured -->\n", "<!-- until here -->\n")

# From an engine that is nearly idle to one that has all of its requests at once.
LOADS = (
    Load(name="calm", requests_per_s=5, prompts=40, output_tokens=16),
    Load(name="busy", requests_per_s=15, prompts=120, output_tokens=16, seed=2),
    Load(name="burst", requests_per_s=inf, prompts=80, output_tokens=16, seed=3),
)
PERCENTS = (50, 90, 95, 99)
WINDOW = "1h"
SCRAPED_WITHIN_S = 180.0

# By the name of ours, the histogram in which the engine keeps the same.
HISTOGRAMS = {
    "ttft": "vllm:time_to_first_token_seconds",
    "tpot": "vllm:request_time_per_output_token_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}

Buckets = dict[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """One percentile of one figure in milliseconds: the exact one, the agent's and Prometheus'."""

    figure: str
    percent: int
    exact_ms: float
    agent_ms: float
    prometheus_ms: float

    @property
    def agent_error(self) -> float:
        """Relative to the exact one."""
        return self.agent_ms / self.exact_ms - 1

    @property
    def prometheus_error(self) -> float:
        """Relative to the exact one."""
        return self.prometheus_ms / self.exact_ms - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The requests of one run as the agent stored them, and their percentiles.

    `buckets` are the engine's own, by upper bound: how many requests of the run lie at or below.
    """

    results: list[BenchmarkResult]
    rows: list[Row]
    summary: dict[str, Any]
    percentiles: list[Percentile]
    buckets: dict[str, Buckets]
    versions: dict[str, str]

    @property
    def relative_error(self) -> float:
        """As the agent states it."""
        return float(self.summary["relative_error"])

    def values_s(self, figure: str) -> list[float]:
        """The figure of each request; one output token has no gap, for which the engine says 0."""
        return [row[f"{figure}_s"] or 0.0 for row in self.rows]


class Scraped:
    """A Prometheus' samples of an engine from now on."""

    def __init__(self, prometheus: Prometheus) -> None:
        self._prometheus = prometheus
        counts = eventually(
            lambda: prometheus.query(f"timestamp({HISTOGRAMS['e2e']}_count)"),
            within_s=SCRAPED_WITHIN_S,
            what="a scrape of the engine",
        )
        self._since = counts[0]["value"][1]

    def buckets(self, figure: str) -> Buckets:
        """The counts of later requests, by upper bound."""
        found = self._prometheus.query(self._grown(figure))
        return {float(each["metric"]["le"]): float(each["value"][1]) for each in found}

    def quantile_s(self, figure: str, share: float) -> float:
        """histogram_quantile of later requests."""
        (found,) = self._prometheus.query(f"histogram_quantile({share}, {self._grown(figure)})")
        return float(found["value"][1])

    def _grown(self, figure: str) -> str:
        series = f"{HISTOGRAMS[figure]}_bucket"
        # No rate(), which would add an error of its own by guessing at the ends of its range.
        return f"sum by (le) ({series}) - sum by (le) ({series} @ {self._since})"


def measure(
    engine: Vllm,
    api: AgentApi,
    folder: Path,
    benchmark: BenchmarkRunner,
    loads: Sequence[Load] = LOADS,
) -> Measured:
    """Put the loads on an engine, and query the percentiles of the run."""
    with Prometheus(folder, scrape_of("vllm", engine.url)) as prometheus:
        scraped = Scraped(prometheus)
        results = benchmark.run(engine, loads, LIMITS, folder)
        benched = {request.request_id for result in results for request in result.requests}
        rows = rows_once_there(api, benched)
        summary = api.summary(window=WINDOW)
        eventually(
            lambda: scraped.buckets("e2e").get(inf, 0) >= len(benched),
            within_s=SCRAPED_WITHIN_S,
            what="the scraped end of the run",
        )
        return Measured(
            results=results,
            rows=rows,
            summary=summary,
            percentiles=list(_percentiles(rows, summary, scraped)),
            buckets={figure: scraped.buckets(figure) for figure in HISTOGRAMS},
            versions={
                "vLLM": _json(f"{engine.url}/version")["version"],
                "Prometheus": _json(f"{prometheus.url}/api/v1/status/buildinfo")["data"]["version"],
            },
        )


def _percentiles(
    rows: list[Row], summary: Mapping[str, Any], scraped: Scraped
) -> Iterable[Percentile]:
    for figure in HISTOGRAMS:
        values_s = sorted(row[f"{figure}_s"] for row in rows if row[f"{figure}_s"] is not None)
        for percent in PERCENTS:
            share = percent / 100
            yield Percentile(
                figure=figure,
                percent=percent,
                exact_ms=1000 * values_s[ceil(share * len(values_s) - 1e-9) - 1],
                agent_ms=_agent_ms(summary[f"{figure}_ms"], percent, values_s),
                prometheus_ms=1000 * scraped.quantile_s(figure, share),
            )


def _agent_ms(published_ms: Mapping[str, float], percent: int, values_s: Sequence[float]) -> float:
    """The percentile of the API, or the same computation where the API does not offer it."""
    if f"p{percent}" in published_ms:
        return published_ms[f"p{percent}"]
    found_s = quantile(bins_of(values_s), percent / 100)
    assert found_s is not None
    return 1000 * found_s


def interpolated(buckets: Buckets, share: float) -> float:
    """histogram_quantile as documented: a straight line through the bucket of the rank.

    After promql/quantile.go of Prometheus 2.42.
    """
    rank = share * buckets[inf]
    low, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            return low if bound == inf else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    raise AssertionError(f"no bucket holds rank {rank}")


def table(measured: Measured) -> str:
    """The table of the document."""
    lines = [
        "| | exact | this agent | error | `histogram_quantile` | error |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.figure.upper()} p{one.percent} | {one.exact_ms:.2f} ms "
        f"| {one.agent_ms:.2f} ms | {100 * one.agent_error:+.2f} % "
        f"| {one.prometheus_ms:.2f} ms | {100 * one.prometheus_error:+.1f} % |"
        for one in measured.percentiles
    ]
    return "\n".join(lines)


def conditions(measured: Measured) -> str:
    """Date, machine and versions of the measurement, as a sentence."""
    return (
        f"Measured on {datetime.now(UTC):%Y-%m-%d} over {len(measured.rows)} requests: vLLM\n"
        f"{measured.versions['vLLM']} for CPU with a random Llama of 4M weights, Prometheus "
        f"{measured.versions['Prometheus']} and goodput-agent {agent.__version__} on Python\n"
        f"{platform.python_version()}, all on one {platform.machine()} machine with "
        f"{cpu_count()} cores and a load average of {getloadavg()[0]:.0f} at the end."
    )


def _json(url: str) -> Any:
    response = requests.get(url, timeout=ANSWER_WITHIN_S)
    response.raise_for_status()
    return response.json()


def main() -> None:
    """Measure on an engine and an agent of its own, and put the table into the document."""
    ports = AgentPorts.free()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = Vllm(folder, port=free_port(), spans=SpanExport.grpc(ports.grpc), service=ENGINE)
        watching = AgentProcess.with_settings(
            folder, ports, {"engines": [{"name": ENGINE, "url": engine.url}]}
        )
        with BenchmarkRunner(folder) as benchmark, engine, watching:
            measured = measure(engine, watching.api, folder, benchmark)
    before, rest = DOCUMENT.read_text().split(MEASURED[0])
    _, after = rest.split(MEASURED[1])
    found = f"\n{conditions(measured)}\n\n{table(measured)}\n\n"
    DOCUMENT.write_text(f"{before}{MEASURED[0]}{found}{MEASURED[1]}{after}")


if __name__ == "__main__":
    main()
