"""Processor time and memory of booking a busy minute: use and cost of 90,000 requests."""

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from agent.pipeline.deployment import ConfiguredGpu
from agent.records.model import Parallelism
from agent.records.objective import JudgedRequest
from agent.store.connection import open_engine
from agent.store.migrating import upgrade
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.sources.model_config.published import published

TARGET_CPU_US = 200.0
TARGET_MEMORY_MB = 250.0

REQUESTS_PER_S = 1500
# With a new minute the one before is computed again: some requests ran in both.
MINUTES = 3


def run() -> bool:
    """Print the figures; return whether the targets are met."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{Path(folder) / 'minutes.db'}")
        upgrade(engine)
        figures = _last_computed(Minutes(engine, PRICE, **_KNOWN))
        engine.dispose()
    cpu_us, memory_mb = figures
    print(
        f"minutes, {60 * REQUESTS_PER_S:,} requests computed and as many again: {cpu_us:.0f} µs of "
        f"processor time per request (target under {TARGET_CPU_US:.0f}), "
        f"{memory_mb:.0f} MB of memory at most (target under {TARGET_MEMORY_MB:.0f})"
    )
    return cpu_us < TARGET_CPU_US and memory_mb < TARGET_MEMORY_MB


_KNOWN = {
    "model": published("llama-3.1-8b"),
    "configured_gpu": ConfiguredGpu(peak_flops_per_s=989e12, bandwidth_bytes_per_s=3.35e12),
    "parallelism": Parallelism(),
}


def _last_computed(minutes: Minutes) -> tuple[float, float]:
    """Microseconds for each new request of the last minute, and MB of memory that booking added."""
    chance = random.Random(1)
    for second in range(60 * MINUTES):
        minutes.take(*_second(second, chance))
    minutes.read(range(0, 60 * MINUTES + 31, 5), running=1.0, steps=30.0, output=150e3, input=450e3)
    Path("/proc/self/clear_refs").write_text("5")
    before_mb = _memory_mb("VmRSS")
    for number in range(1, MINUTES + 1):
        began = time.process_time()
        minutes.compute(60.0 * number + 31)
        cpu_s = time.process_time() - began
    return cpu_s / (60 * REQUESTS_PER_S) * 1e6, _memory_mb("VmHWM") - before_mb


def _second(second: int, chance: random.Random) -> Iterator[JudgedRequest]:
    """Requests of any length up to 4 s; the engine timed the phases of half of them."""
    for place in range(REQUESTS_PER_S):
        number = second * REQUESTS_PER_S + place
        untimed = {} if place % 2 else {"prefill_s": None, "decode_s": None}
        yield timed_request(
            number,
            second + place / REQUESTS_PER_S,
            chance.uniform(0.05, 4.0),
            input_tokens=chance.randrange(20, 600),
            cached_tokens=chance.randrange(20),
            output_tokens=chance.randrange(1, 200),
            **untimed,
        )


def _memory_mb(name: str) -> float:
    """VmRSS or VmHWM of this process, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith(f"{name}:"))
    return int(line.split()[1]) / 1000
