"""Latency, throughput and processor time of the whole agent, beside vllm-router and LiteLLM.

The time to the first event is measured with one client in two ways. "Back-to-back" it asks again at
once, and the engine sends all other events right after the first. "With pauses" it asks 3 ms later,
and the other events come 2 ms after the first.

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
TARGET_RPS = {"pinned": 2.9, "not pinned": 2.2}
TARGET_CPU = 0.55
TARGET_EVENT_CPU = 1.0
TARGET_LITELLM_RPS = 50.0
TARGET_STREAM_BYTES = 64 * 1024
TARGET_GAP_S = 0.001

AGENT, ROUTER, LITELLM, DIRECT = "agent", "vllm-router", "litellm", "direct"
SPELLINGS = ("compact", "loose")
# The prompt and the pause after each response, by the name of the load.
LOADS = {"back-to-back": ("prefilled", 0.0), "with pauses": ("apart", 0.003)}
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
        self.ttft_s: dict[str, Rounds] = {load: defaultdict(list) for load in LOADS}
        self.rps: dict[str, Rounds] = {spelling: defaultdict(list) for spelling in SPELLINGS}
        self.cpu_s: dict[str, Rounds] = {spelling: defaultdict(list) for spelling in SPELLINGS}
        self.stream_bytes: dict[str, float] = {}

    async def measure_round(self) -> None:
        """Measure each proxy once, one after another."""
        for load in LOADS:
            for one in self.served:
                await self._alone(one, load)
        for spelling in SPELLINGS:
            for one in self.served:
                await self._burst(one, spelling)

    async def _alone(self, one: Served, load: str) -> None:
        prompt, pause_s = LOADS[load]
        _, ttfts_s = await run_load(
            one.port, prompt, at_once=1, requests=ALONE[one.name], pause_s=pause_s
        )
        self.ttft_s[load][one.name].append(median(ttfts_s))

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

    def added_ttft_s(self, name: str, load: str) -> float:
        """Return the added time to the first event, the median over rounds."""
        rounds = zip(self.ttft_s[load][name], self.ttft_s[load][DIRECT], strict=True)
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


def _report(figures: ProxyFigures, how: str) -> bool:
    for one in figures.served:
        print(_line(figures, one.name))
    latencies = [_latency(figures, how, load) for load in LOADS]
    throughputs = [_throughput(figures, how, spelling) for spelling in SPELLINGS]
    return all([*latencies, *throughputs, _memory(figures)])


def _line(figures: ProxyFigures, name: str) -> str:
    added = [f"{1e3 * figures.added_ttft_s(name, load):.3f} ms {load}" for load in LOADS]
    rps = " and ".join(f"{median(figures.rps[each][name]):.0f}" for each in SPELLINGS)
    cpu = " and ".join(f"{1e3 * median(figures.cpu_s[each][name]):.2f}" for each in SPELLINGS)
    return (
        f"proxy, {name}: adds {' and '.join(added)} to the first event, "
        f"{rps} streams/s at {AT_ONCE}, {cpu} ms of processor time per stream (compact and loose "
        f"events), {figures.stream_bytes[name] / 1024:.0f} KiB per open stream"
    )


def _latency(figures: ProxyFigures, how: str, load: str) -> bool:
    ours, router, litellm = (figures.added_ttft_s(each, load) for each in (AGENT, ROUTER, LITELLM))
    print(
        f"proxy, {how}, {load}, added time to the first event: {1e3 * ours:.3f} ms, "
        f"{ours / router:.2f} of vllm-router's {1e3 * router:.3f} ms "
        f"(target at most {TARGET_TTFT}), {ours / litellm:.3f} of LiteLLM's"
    )
    return ours / router <= TARGET_TTFT


def _memory(figures: ProxyFigures) -> bool:
    stream_bytes = figures.stream_bytes[AGENT]
    print(
        f"proxy, memory per open stream: {stream_bytes / 1024:.0f} KiB "
        f"(target under {TARGET_STREAM_BYTES // 1024} KiB)"
    )
    return stream_bytes < TARGET_STREAM_BYTES


def _throughput(figures: ProxyFigures, how: str, spelling: str) -> bool:
    router, litellm = (figures.rps_ratio(peer, spelling) for peer in (ROUTER, LITELLM))
    cpu, target_rps = figures.cpu_ratio(ROUTER, spelling), TARGET_RPS[how]
    print(
        f"proxy, {how}, {spelling} events, streams/s at {AT_ONCE}: {router:.2f} of vllm-router's "
        f"(target at least {target_rps}), {litellm:.0f} of LiteLLM's "
        f"(target at least {TARGET_LITELLM_RPS:.0f}); "
        f"processor time per stream: {cpu:.2f} of vllm-router's (target at most {TARGET_CPU})"
    )
    return router >= target_rps and litellm >= TARGET_LITELLM_RPS and cpu <= TARGET_CPU


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


def _report_gaps(figures: tuple[Rounds, Rounds], how: str) -> bool:
    gaps_s, cpu_s = figures
    for name in gaps_s:
        print(
            f"proxy, {name}, {DECODING} streams at 50 events/s: 99 % of gaps within "
            f"{1e3 * median(gaps_s[name]):.1f} ms, "
            f"{1e6 * median(cpu_s[name]):.1f} us of processor time per event"
        )
    added_s = median(a - b for a, b in zip(gaps_s[AGENT], gaps_s[DIRECT], strict=True))
    event_cpu = _ratio(cpu_s, ROUTER)
    print(
        f"proxy, {how}, added to the 99th percentile of gaps: {1e3 * added_s:.2f} ms "
        f"(target at most {1e3 * TARGET_GAP_S:.0f} ms); processor time per event: "
        f"{event_cpu:.2f} of vllm-router's (target at most {TARGET_EVENT_CPU})"
    )
    return added_s <= TARGET_GAP_S and event_cpu <= TARGET_EVENT_CPU


def run() -> bool:
    """Print the figures; return whether all targets are met."""
    cores = sorted(os.sched_getaffinity(0))
    # Exit through the context managers, which stop the other processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    pinned = _placed("pinned", {cores[0]}, {cores[-1]})
    return all([pinned, _placed("not pinned", set(cores), set(cores))])


def _placed(how: str, proxies: set[int], others: set[int]) -> bool:
    print(f"proxy, {how}, with a load average of {os.getloadavg()[0]:.1f} before:")
    os.sched_setaffinity(0, others)
    with serving(proxies, others) as served:
        figures = _report(uvloop.run(_measure(served)), how)
        return _report_gaps(uvloop.run(_measure_gaps(served)), how) and figures
