"""Latency, throughput and processor time of the proxy, compared with vllm-router and LiteLLM.

All proxies run on one processor, the engine and the load on another. Each round measures every
proxy once, so that other load on the machine affects all of them.
"""

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import uvloop

from benchmarks.proxy_engine import EVENTS
from benchmarks.proxy_load import chat, connections, run_load
from benchmarks.proxy_peers import Served, serving

TARGET_TTFT = 1.0
TARGET_RPS = 1.0
TARGET_LITELLM_RPS = 50.0
TARGET_CHUNK_CPU_US = 10.0
TARGET_STREAM_BYTES = 64 * 1024
TARGET_MEASURING = 0.25

ROUNDS = 15
AT_ONCE = 16
OPEN_STREAMS = 500
# LiteLLM takes about fifty times as long for each request.
ALONE = defaultdict(lambda: 40, litellm=10)
REQUESTS = defaultdict(lambda: 800, litellm=16)
# With the chunk that ends the stream.
CHUNKS = EVENTS + 1

Rounds = dict[str, list[float]]


class ProxyFigures:
    """The figures of every round, by proxy."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.served = served
        self.ttft_s: Rounds = defaultdict(list)
        self.rps: Rounds = defaultdict(list)
        self.chunk_cpu_s: Rounds = defaultdict(list)
        self.paced_cpu_s: Rounds = defaultdict(list)
        self.stream_bytes: dict[str, float] = {}

    async def measure_round(self) -> None:
        """Measure each proxy once, one after another."""
        for one in self.served:
            _, ttfts_s = await run_load(one.port, "prefilled", at_once=1, requests=ALONE[one.name])
            self.ttft_s[one.name].append(median(ttfts_s))
        for one in self.served:
            requests = REQUESTS[one.name]
            before_s = one.cpu_s()
            took_s, _ = await run_load(one.port, "burst", at_once=AT_ONCE, requests=requests)
            self.rps[one.name].append(requests / took_s)
            self.chunk_cpu_s[one.name].append((one.cpu_s() - before_s) / requests / CHUNKS)
        for one in self.served:
            before_s = one.cpu_s()
            await run_load(one.port, "paced", at_once=AT_ONCE, requests=AT_ONCE)
            self.paced_cpu_s[one.name].append((one.cpu_s() - before_s) / AT_ONCE / CHUNKS)

    async def measure_memory(self) -> None:
        """Measure the memory per stream with many open streams."""
        for one in self.served:
            async with connections(one.port, OPEN_STREAMS) as opened:
                before = one.rss_bytes()
                held = chat(one.port, "held")
                await asyncio.gather(*(connection.first_event(held) for connection in opened))
                self.stream_bytes[one.name] = (one.rss_bytes() - before) / OPEN_STREAMS

    def added_ttft_s(self, name: str) -> float:
        """Return the added time to the first event, the median over rounds."""
        rounds = zip(self.ttft_s[name], self.ttft_s["direct"], strict=True)
        return median(through - direct for through, direct in rounds)

    def rps_ratio(self, peer: str) -> float:
        """Return requests per second over a peer's, the median over rounds."""
        return median(a / b for a, b in zip(self.rps["agent"], self.rps[peer], strict=True))


async def _measure(served: Sequence[Served]) -> ProxyFigures:
    figures = ProxyFigures(served)
    for one in served:
        await run_load(one.port, "burst", at_once=AT_ONCE, requests=AT_ONCE * 4)
    await figures.measure_memory()
    for _ in range(ROUNDS):
        await figures.measure_round()
    return figures


def _report(figures: ProxyFigures) -> bool:
    for one in figures.served:
        print(_line(figures, one.name))
    return all((_latency(figures), _throughput(figures), _cost(figures)))


def _line(figures: ProxyFigures, name: str) -> str:
    return (
        f"proxy, {name}: adds {1e6 * figures.added_ttft_s(name):.0f} us to the first event, "
        f"{median(figures.rps[name]):.0f} streams/s at {AT_ONCE}, "
        f"{1e6 * median(figures.chunk_cpu_s[name]):.1f} us of processor time per chunk in "
        f"bursts and {1e6 * median(figures.paced_cpu_s[name]):.0f} with one every 2 ms, "
        f"{figures.stream_bytes[name] / 1024:.0f} KiB per open stream"
    )


def _latency(figures: ProxyFigures) -> bool:
    ours, router, litellm = map(figures.added_ttft_s, ("agent", "vllm-router", "litellm"))
    print(
        f"proxy, added time to the first event: {ours / router:.2f} of vllm-router's "
        f"(target at most {TARGET_TTFT}), {ours / litellm:.3f} of LiteLLM's"
    )
    return ours / router <= TARGET_TTFT


def _throughput(figures: ProxyFigures) -> bool:
    router, litellm = map(figures.rps_ratio, ("vllm-router", "litellm"))
    print(
        f"proxy, streams/s at {AT_ONCE}: {router:.2f} of vllm-router's "
        f"(target at least {TARGET_RPS}), "
        f"{litellm:.0f} of LiteLLM's (target at least {TARGET_LITELLM_RPS:.0f})"
    )
    return router >= TARGET_RPS and litellm >= TARGET_LITELLM_RPS


def _cost(figures: ProxyFigures) -> bool:
    chunk_us, relay_us = (
        1e6 * median(figures.chunk_cpu_s[name]) for name in ("agent", "agent, unmeasured")
    )
    paced_us, relay_paced_us = (
        1e6 * median(figures.paced_cpu_s[name]) for name in ("agent", "agent, unmeasured")
    )
    stream_bytes = figures.stream_bytes["agent"]
    cost = chunk_us / relay_us - 1
    print(
        f"proxy, processor time per chunk in bursts: {chunk_us:.1f} us "
        f"(target under {TARGET_CHUNK_CPU_US}), "
        f"memory per open stream: {stream_bytes / 1024:.0f} KiB "
        f"(target under {TARGET_STREAM_BYTES // 1024} KiB)"
    )
    print(
        f"proxy, processor time of measuring: {100 * cost:.0f} % of relaying in bursts "
        f"(target under {100 * TARGET_MEASURING:.0f} %), "
        f"{100 * (paced_us / relay_paced_us - 1):.0f} % with one chunk every 2 ms"
    )
    return (
        chunk_us < TARGET_CHUNK_CPU_US
        and stream_bytes < TARGET_STREAM_BYTES
        and cost < TARGET_MEASURING
    )


def run() -> bool:
    """Print the figures; return whether all targets are met."""
    cores = sorted(os.sched_getaffinity(0))
    proxies, others = {cores[0]}, {cores[-1]}
    os.sched_setaffinity(0, others)
    # Exit through the context managers, which stop the other processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with serving((proxies, others)) as served:
        return _report(uvloop.run(_measure(served)))
