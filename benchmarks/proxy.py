"""What the proxy adds to a stream, beside what vllm-router and LiteLLM add.

All proxies are held to one processor, the engine and the load to another, and all stand before the
same engine. Rounds go round the proxies, so that whatever else the machine does meets all of them.
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
from benchmarks.proxy_load import ask, chat, connections
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
# LiteLLM takes about fifty times as long for each.
ALONE = defaultdict(lambda: 40, litellm=10)
REQUESTS = defaultdict(lambda: 800, litellm=16)
# The last one is the end of the stream.
CHUNKS = EVENTS + 1

Figures = dict[str, list[float]]


class Measured:
    """The figures of every round, by proxy."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.served = served
        self.ttft_s: Figures = defaultdict(list)
        self.rps: Figures = defaultdict(list)
        self.chunk_cpu_s: Figures = defaultdict(list)
        self.paced_cpu_s: Figures = defaultdict(list)
        self.stream_bytes: dict[str, float] = {}

    async def round(self) -> None:
        """Measure each once, on its own."""
        for one in self.served:
            _, ttfts_s = await ask(one.port, "prefilled", at_once=1, requests=ALONE[one.name])
            self.ttft_s[one.name].append(median(ttfts_s))
        for one in self.served:
            requests = REQUESTS[one.name]
            before_s = one.cpu_s()
            took_s, _ = await ask(one.port, "burst", at_once=AT_ONCE, requests=requests)
            self.rps[one.name].append(requests / took_s)
            self.chunk_cpu_s[one.name].append((one.cpu_s() - before_s) / requests / CHUNKS)
        for one in self.served:
            before_s = one.cpu_s()
            await ask(one.port, "paced", at_once=AT_ONCE, requests=AT_ONCE)
            self.paced_cpu_s[one.name].append((one.cpu_s() - before_s) / AT_ONCE / CHUNKS)

    async def memory(self) -> None:
        """Hold many streams open, and see what each takes."""
        for one in self.served:
            async with connections(one.port, OPEN_STREAMS) as opened:
                before = one.rss_bytes()
                held = chat(one.port, "held")
                await asyncio.gather(*(connection.first_event(held) for connection in opened))
                self.stream_bytes[one.name] = (one.rss_bytes() - before) / OPEN_STREAMS

    def added_ttft_s(self, name: str) -> float:
        """How much later the first event comes than without a proxy: the median over rounds."""
        rounds = zip(self.ttft_s[name], self.ttft_s["direct"], strict=True)
        return median(through - direct for through, direct in rounds)

    def rps_ratio(self, peer: str) -> float:
        """Requests per second as a multiple of a peer's: the median over rounds."""
        return median(a / b for a, b in zip(self.rps["agent"], self.rps[peer], strict=True))


async def _measure(served: Sequence[Served]) -> Measured:
    measured = Measured(served)
    for one in served:
        await ask(one.port, "burst", at_once=AT_ONCE, requests=AT_ONCE * 4)
    await measured.memory()
    for _ in range(ROUNDS):
        await measured.round()
    return measured


def _report(measured: Measured) -> bool:
    for one in measured.served:
        print(_line(measured, one.name))
    return all((_latency(measured), _throughput(measured), _cost(measured)))


def _line(measured: Measured, name: str) -> str:
    return (
        f"proxy, {name}: adds {1e6 * measured.added_ttft_s(name):.0f} us to the first event, "
        f"{median(measured.rps[name]):.0f} streams/s at {AT_ONCE}, "
        f"{1e6 * median(measured.chunk_cpu_s[name]):.1f} us of processor per chunk in "
        f"bursts and {1e6 * median(measured.paced_cpu_s[name]):.0f} at one every 2 ms, "
        f"{measured.stream_bytes[name] / 1024:.0f} KiB per open stream"
    )


def _latency(measured: Measured) -> bool:
    ours, router, litellm = map(measured.added_ttft_s, ("agent", "vllm-router", "litellm"))
    print(
        f"proxy, added time to the first event: {ours / router:.2f} of vllm-router's "
        f"(target {TARGET_TTFT}), {ours / litellm:.3f} of LiteLLM's"
    )
    return ours / router <= TARGET_TTFT


def _throughput(measured: Measured) -> bool:
    router, litellm = map(measured.rps_ratio, ("vllm-router", "litellm"))
    print(
        f"proxy, streams/s at {AT_ONCE}: {router:.2f} of vllm-router's (target {TARGET_RPS}), "
        f"{litellm:.0f} of LiteLLM's (target {TARGET_LITELLM_RPS:.0f})"
    )
    return router >= TARGET_RPS and litellm >= TARGET_LITELLM_RPS


def _cost(measured: Measured) -> bool:
    chunk_us, relay_us = (
        1e6 * median(measured.chunk_cpu_s[name]) for name in ("agent", "agent, unmeasured")
    )
    paced_us, relay_paced_us = (
        1e6 * median(measured.paced_cpu_s[name]) for name in ("agent", "agent, unmeasured")
    )
    stream_bytes = measured.stream_bytes["agent"]
    cost = chunk_us / relay_us - 1
    print(
        f"proxy, processor per chunk in bursts: {chunk_us:.1f} us (target {TARGET_CHUNK_CPU_US}), "
        f"memory per open stream: {stream_bytes / 1024:.0f} KiB "
        f"(target {TARGET_STREAM_BYTES // 1024})"
    )
    print(
        f"proxy, measuring: {100 * cost:.0f} % of the cost of relaying in bursts "
        f"(target {100 * TARGET_MEASURING:.0f}), {100 * (paced_us / relay_paced_us - 1):.0f} % at "
        "one every 2 ms"
    )
    return (
        chunk_us < TARGET_CHUNK_CPU_US
        and stream_bytes < TARGET_STREAM_BYTES
        and cost < TARGET_MEASURING
    )


def run() -> bool:
    """Print the figures; whether all targets hold."""
    cores = sorted(os.sched_getaffinity(0))
    proxies, others = {cores[0]}, {cores[-1]}
    os.sched_setaffinity(0, others)
    # So that the processes are stopped with this one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with serving((proxies, others)) as served:
        return _report(uvloop.run(_measure(served)))
