"""Latency, throughput and processor time of the whole agent, beside vllm-router and LiteLLM.

The agent runs as users run it, with its store, and so do the others. In one half of the rounds all
proxies run on one processor, the engine and the load on another; in the other half nobody is
pinned. Each round measures every proxy once, so that other load on the machine affects all of them.
"""

import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from statistics import median, quantiles

import uvloop

from benchmarks.proxy_engine import DECODED_EVENTS
from benchmarks.proxy_load import chat, connections, run_gaps, run_load
from benchmarks.proxy_peers import Served, serving

TARGET_TTFT = 1.0
TARGET_RPS = 1.2
TARGET_CPU = 1.2
TARGET_LITELLM_RPS = 50.0
TARGET_STREAM_BYTES = 64 * 1024
TARGET_GAP_S = 0.002

AGENT, ROUTER, LITELLM, DIRECT = "agent", "vllm-router", "litellm", "direct"
SPELLINGS = ("compact", "loose")
ROUNDS = int(os.environ.get("BENCH_ROUNDS", "8"))
GAP_ROUNDS = 3
AT_ONCE = 16
OPEN_STREAMS = 500
DECODING = 256
# LiteLLM takes about fifty times as long for each request.
ALONE = defaultdict(lambda: 40, litellm=10)
REQUESTS = defaultdict(lambda: 800, litellm=16)
# The agent commits its records within this time, which belongs to their processor time.
COMMITTED_S = 0.5

Rounds = dict[str, list[float]]


class ProxyFigures:
    """The figures of every round, by proxy, and by spelling of the events."""

    def __init__(self, served: Sequence[Served]) -> None:
        self.served = served
        self.ttft_s: Rounds = defaultdict(list)
        self.rps: dict[str, Rounds] = {spelling: defaultdict(list) for spelling in SPELLINGS}
        self.cpu_s: dict[str, Rounds] = {spelling: defaultdict(list) for spelling in SPELLINGS}
        self.stream_bytes: dict[str, float] = {}

    async def measure_round(self) -> None:
        """Measure each proxy once, one after another."""
        for one in self.served:
            _, ttfts_s = await run_load(one.port, "prefilled", at_once=1, requests=ALONE[one.name])
            self.ttft_s[one.name].append(median(ttfts_s))
        for spelling in SPELLINGS:
            for one in self.served:
                await self._burst(one, spelling)

    async def _burst(self, one: Served, spelling: str) -> None:
        requests, before_s = REQUESTS[one.name], one.cpu_s()
        took_s, _ = await run_load(one.port, spelling, at_once=AT_ONCE, requests=requests)
        await asyncio.sleep(COMMITTED_S)
        self.rps[spelling][one.name].append(requests / took_s)
        self.cpu_s[spelling][one.name].append((one.cpu_s() - before_s) / requests)

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
        rounds = zip(self.ttft_s[name], self.ttft_s[DIRECT], strict=True)
        return median(through - direct for through, direct in rounds)

    def rps_ratio(self, peer: str, spelling: str) -> float:
        """Return the agent's streams per second over a peer's, the median over rounds."""
        return _ratio(self.rps[spelling], peer)

    def cpu_ratio(self, peer: str, spelling: str) -> float:
        """Return the agent's processor time per stream over a peer's, the median over rounds."""
        return _ratio(self.cpu_s[spelling], peer)


def _ratio(rounds: Rounds, peer: str) -> float:
    return median(a / b for a, b in zip(rounds[AGENT], rounds[peer], strict=True))


async def _measure(served: Sequence[Served]) -> ProxyFigures:
    figures = ProxyFigures(served)
    for one in served:
        await run_load(one.port, "compact", at_once=AT_ONCE, requests=AT_ONCE * 4)
    await figures.measure_memory()
    for _ in range(ROUNDS):
        await figures.measure_round()
    return figures


def _report(figures: ProxyFigures) -> bool:
    for one in figures.served:
        print(_line(figures, one.name))
    return all([_latency(figures), *(_throughput(figures, each) for each in SPELLINGS)])


def _line(figures: ProxyFigures, name: str) -> str:
    rps = " and ".join(f"{median(figures.rps[each][name]):.0f}" for each in SPELLINGS)
    cpu = " and ".join(f"{1e3 * median(figures.cpu_s[each][name]):.2f}" for each in SPELLINGS)
    return (
        f"proxy, {name}: adds {1e3 * figures.added_ttft_s(name):.2f} ms to the first event, "
        f"{rps} streams/s at {AT_ONCE}, {cpu} ms of processor time per stream (compact and loose "
        f"events), {figures.stream_bytes[name] / 1024:.0f} KiB per open stream"
    )


def _latency(figures: ProxyFigures) -> bool:
    ours, router, litellm = map(figures.added_ttft_s, (AGENT, ROUTER, LITELLM))
    stream_bytes = figures.stream_bytes[AGENT]
    print(
        f"proxy, added time to the first event: {ours / router:.2f} of vllm-router's "
        f"(target at most {TARGET_TTFT}), {ours / litellm:.3f} of LiteLLM's; "
        f"memory per open stream: {stream_bytes / 1024:.0f} KiB "
        f"(target under {TARGET_STREAM_BYTES // 1024} KiB)"
    )
    return ours / router <= TARGET_TTFT and stream_bytes < TARGET_STREAM_BYTES


def _throughput(figures: ProxyFigures, spelling: str) -> bool:
    router, litellm = (figures.rps_ratio(peer, spelling) for peer in (ROUTER, LITELLM))
    cpu = figures.cpu_ratio(ROUTER, spelling)
    print(
        f"proxy, {spelling} events, streams/s at {AT_ONCE}: {router:.2f} of vllm-router's "
        f"(target at least {TARGET_RPS}), {litellm:.0f} of LiteLLM's "
        f"(target at least {TARGET_LITELLM_RPS:.0f}); "
        f"processor time per stream: {cpu:.2f} of vllm-router's (target at most {TARGET_CPU})"
    )
    return router >= TARGET_RPS and litellm >= TARGET_LITELLM_RPS and cpu <= TARGET_CPU


async def _measure_gaps(served: Sequence[Served]) -> tuple[Rounds, Rounds]:
    """Return the 99th percentile of the gaps, and the processor time per event, by proxy."""
    gaps_s: Rounds = defaultdict(list)
    cpu_s: Rounds = defaultdict(list)
    for _ in range(GAP_ROUNDS):
        for one in served:
            if one.name == LITELLM:
                # It cannot pass so many events on one processor.
                continue
            before_s = one.cpu_s()
            found_s = await run_gaps(one.port, "decoded", DECODING)
            gaps_s[one.name].append(quantiles(found_s, n=100)[-1])
            cpu_s[one.name].append((one.cpu_s() - before_s) / DECODING / DECODED_EVENTS)
    return gaps_s, cpu_s


def _report_gaps(figures: tuple[Rounds, Rounds]) -> bool:
    gaps_s, cpu_s = figures
    for name in gaps_s:
        print(
            f"proxy, {name}, {DECODING} streams at 50 events/s: 99 % of gaps within "
            f"{1e3 * median(gaps_s[name]):.1f} ms, "
            f"{1e6 * median(cpu_s[name]):.1f} us of processor time per event"
        )
    added_s = median(a - b for a, b in zip(gaps_s[AGENT], gaps_s[DIRECT], strict=True))
    print(
        f"proxy, added to the 99th percentile of gaps: {1e3 * added_s:.2f} ms "
        f"(target under {1e3 * TARGET_GAP_S:.0f} ms); processor time per event: "
        f"{_ratio(cpu_s, ROUTER):.2f} of vllm-router's"
    )
    return added_s < TARGET_GAP_S


def run() -> bool:
    """Print the figures; return whether all targets are met."""
    cores = sorted(os.sched_getaffinity(0))
    # Exit through the context managers, which stop the other processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    apart = _placed("pinned apart", {cores[0]}, {cores[-1]})
    return all([apart, _placed("nobody pinned", set(cores), set(cores))])


def _placed(how: str, proxies: set[int], others: set[int]) -> bool:
    print(f"proxy, {how}:")
    os.sched_setaffinity(0, others)
    with serving(proxies, others) as served:
        figures = _report(uvloop.run(_measure(served)))
        return _report_gaps(uvloop.run(_measure_gaps(served))) and figures
