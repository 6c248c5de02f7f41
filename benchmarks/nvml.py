"""What polling eight GPUs every second costs the agent, and what each kind of call costs."""

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

from agent.pipeline.gpu_inventory import GpuInventory
from agent.sources.nvml.source import NvmlSource
from tests.sources.nvml.fake_driver import FakeDriver, build

TARGET_SHARE = 0.01
INTERVAL_S = 1.0
GPUS = 8
PROCESSES = 4
POLLS = 200
IDLE_S = 2.0


class CallTimes:
    """The seconds that each call of the binding took, by the name of its function."""

    def __init__(self) -> None:
        self.taken_s: dict[str, list[float]] = defaultdict(list)
        self._inside = threading.local()

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the calls made meanwhile, except those that wait for events."""
        originals = {
            name: value
            for name, value in vars(pynvml).items()
            if name.startswith("nvml") and callable(value) and not name.startswith("nvmlEvent")
        }
        for name, call in originals.items():
            if not isinstance(call, type):
                setattr(pynvml, name, self._measured(name, call))
        try:
            yield
        finally:
            for name, call in originals.items():
                setattr(pynvml, name, call)

    def _measured(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def measured(*arguments: Any) -> Any:
            # Some of the binding's functions call others.
            if getattr(self._inside, "one", False):
                return call(*arguments)
            self._inside.one = True
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.taken_s[name].append(time.perf_counter() - began)
                self._inside.one = False

        return measured

    def lines(self) -> Iterator[str]:
        """One line per call, the one that took most in total first."""
        for name, taken_s in sorted(self.taken_s.items(), key=lambda item: -sum(item[1])):
            yield (
                f"  {name:<44} {len(taken_s):>7} calls, median {1e6 * median(taken_s):>8.1f} us, "
                f"p99 {1e6 * high(taken_s):>8.1f} us, longest {1e6 * max(taken_s):>8.1f} us"
            )


def median(values: list[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def high(values: list[float]) -> float:
    """The 99th percentile, by nearest rank."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def run() -> bool:
    """Print the share of a core; whether the target holds."""
    with tempfile.TemporaryDirectory() as folder:
        driver = FakeDriver(build(Path(folder)))
    driver.install()
    driver.do(f"gpus {GPUS}")
    driver.do(*(f"process -1 compute {pid} 1000000" for pid in range(1, PROCESSES + 1)))
    poll_s, listening = _cpu_shares()
    share = poll_s / INTERVAL_S + listening
    print(
        f"nvml, {GPUS} GPUs every {INTERVAL_S:.0f} s: {100 * share:.2f} % of a core, "
        f"{1000 * poll_s:.2f} ms a poll, {100 * listening:.3f} % to listen for Xid errors "
        f"(target {100 * TARGET_SHARE:.0f} %)"
    )
    times = CallTimes()
    with times.measuring():
        _cpu_shares()
    print("cost of each call against a library that returns at once:")
    print(*times.lines(), sep="\n")
    return share < TARGET_SHARE


class _Clock:
    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


def _cpu_shares() -> tuple[float, float]:
    """CPU seconds of one poll, and the share of a core between polls, over all threads."""
    clock = _Clock()
    source = NvmlSource(monotonic=clock.now)
    inventory = GpuInventory({"chat": ()})
    inventory.update(source.read(clock.now()), clock.now())
    began = time.process_time()
    for _ in range(POLLS):
        # By the source's clock a second passes, so that it reads what is due then.
        clock.at += INTERVAL_S
        inventory.update(source.read(clock.now()), clock.now())
    poll_s = (time.process_time() - began) / POLLS
    began = time.process_time()
    time.sleep(IDLE_S)
    listening = (time.process_time() - began) / IDLE_S
    source.close()
    return poll_s, listening
