"""How near the proxy's times of a request are to its client's: vLLM's benchmark on the real engine.

The client's clock starts before a request is sent and stops after its last token came, so its times
are longer. Both programs share the machine with the engine, which the figures contain.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tests.real_engine.watching import LIMITS, rows_once_there
from tests.real_parts.agent_process import AgentPorts, AgentProcess
from tests.real_parts.bench import BenchedRequest, BenchmarkRunner, Load
from tests.real_parts.ports import free_port
from tests.real_parts.vllm import SpanExport, Vllm

TARGET_APART_S = 0.005
TARGET_TPOT = 0.03

# A client's first requests pay for its own start.
LOADS = (
    Load(name="first", requests_per_s=4, prompts=6),
    Load(name="calm", requests_per_s=2, prompts=40),
    Load(name="busy", requests_per_s=6, prompts=60),
)

Pairs = Sequence[tuple[BenchedRequest, dict[str, Any]]]


def run() -> bool:
    """Print the figures; return whether the targets are met."""
    with tempfile.TemporaryDirectory() as name:
        pairs = _measure(Path(name))
    ttft_s = [request.ttft_s - row["ttft_s"] for request, row in pairs]
    e2e_s = [request.latency_s - row["e2e_s"] for request, row in pairs]
    tpot = [abs(row["tpot_s"] / request.tpot_s - 1) for request, row in pairs]
    for figure, apart_s in (("TTFT", ttft_s), ("end-to-end time", e2e_s)):
        print(
            f"proxy times, {figure}: the client's is {1000 * median(apart_s):.1f} ms longer, "
            f"95 % of {len(pairs)} requests within {1000 * quantiles(apart_s, n=20)[-1]:.1f} ms "
            f"(target for the median {1000 * TARGET_APART_S:.0f} ms)"
        )
    print(
        f"proxy times, TPOT: {median(tpot):.2%} apart, 95 % within {quantiles(tpot, n=20)[-1]:.2%} "
        f"(target for the median {TARGET_TPOT:.0%})"
    )
    furthest_s = max(median(ttft_s), abs(median(e2e_s)))
    return bool(furthest_s <= TARGET_APART_S and median(tpot) <= TARGET_TPOT)


def _measure(folder: Path) -> Pairs:
    ports, proxy = AgentPorts.free(), free_port()
    spans = SpanExport.grpc(ports.grpc)
    with (
        BenchmarkRunner(folder) as benchmark,
        Vllm(folder, port=free_port(), spans=spans) as engine,
    ):
        settings = {
            "engines": [{"name": engine.service, "url": engine.url}],
            "proxy": {"listen": f"127.0.0.1:{proxy}"},
            "nvml": {"enabled": False},
        }
        with AgentProcess.with_settings(folder, ports, settings) as agent:
            url = f"http://127.0.0.1:{proxy}"
            _, *results = benchmark.run(engine, LOADS, LIMITS, folder, url=url)
            requests = {
                request.request_id.removeprefix("cmpl-").removesuffix("-0"): request
                for result in results
                for request in result.requests
            }
            rows = rows_once_there(agent.api, requests)
            return [
                (requests[row["request_id"]], row) for row in rows if row["request_id"] in requests
            ]
