"""A watch over the scripted driver, and all that it told its sinks."""

import queue
from dataclasses import dataclass, field

from agent.records.gpu import GpuSample, XidSeen
from agent.sources.nvml.watch import NvmlSinks, NvmlWatch
from tests.sources.nvml.fake_driver import FakeDriver, gpu_uuid

ARRIVES_WITHIN_S = 20.0


@dataclass
class Watched:
    """Each poll is a second after the last, for the watch's clocks."""

    driver: FakeDriver
    timeout_s: float = ARRIVES_WITHIN_S
    samples: list[GpuSample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    xids: "queue.SimpleQueue[XidSeen]" = field(default_factory=queue.SimpleQueue)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.watch = NvmlWatch(
            sinks=NvmlSinks(self.samples.append, self.xids.put, self.failures.append),
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            timeout_s=self.timeout_s,
            event_wait_ms=20,
        )

    def poll(self, *script: str, after_s: float = 1.0) -> None:
        """Obey the script, then poll once; afterwards only what this poll told is there."""
        self.driver.do(*script)
        self.samples.clear()
        self.failures.clear()
        self.now += after_s
        self.watch.poll(self.now)

    def close(self) -> None:
        """Close the watch, and wait for what it may leave to the driver."""
        self.driver.do("release")
        self.watch.close()
        self.watch._worker._thread.join(ARRIVES_WITHIN_S)

    def of(self, index: int = 0) -> GpuSample:
        """The sample of one GPU from the last poll."""
        (found,) = [sample for sample in self.samples if sample.gpu == gpu_uuid(index)]
        return found

    def fact(self, name: str, *labels: str, index: int = 0) -> float | None:
        """A fact of one GPU from the last poll."""
        return self.of(index).fact(name, *labels)

    def next_xid(self) -> XidSeen:
        """The next Xid that arrives."""
        return self.xids.get(timeout=ARRIVES_WITHIN_S)
