"""A source over the scripted driver, and the result of its last read."""

from collections import deque
from dataclasses import dataclass, field

from agent.records.gpu import GpuSample, GpuSamples, XidError
from agent.sources.nvml.source import NvmlSource
from tests.real_parts.waiting import eventually
from tests.sources.nvml.fake_driver import FakeDriver, gpu_uuid

ARRIVES_WITHIN_S = 20.0


@dataclass
class ScriptedNvml:
    """Each poll is a second after the last, by the source's clocks."""

    driver: FakeDriver
    timeout_s: float = ARRIVES_WITHIN_S
    last: GpuSamples = field(default_factory=GpuSamples)
    xids: deque[XidError] = field(default_factory=deque)
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.source = NvmlSource(
            clock=lambda: self.now,
            monotonic=lambda: self.now,
            timeout_s=self.timeout_s,
            event_wait_ms=20,
        )

    @property
    def samples(self) -> list[GpuSample]:
        """The samples of the last poll."""
        return list(self.last.samples)

    @property
    def failures(self) -> list[str]:
        """The failures of the last poll."""
        return list(self.last.failures)

    def poll(self, *script: str, after_s: float = 1.0) -> None:
        """Run the script, then read once."""
        self.driver.do(*script)
        self.now += after_s
        self.last = self.source.read(self.now)
        self.xids += self.last.xids

    def close(self) -> None:
        """Close the source, and wait for the calls that a driver still holds."""
        self.driver.do("release")
        self.source.close()
        self.source._worker._thread.join(ARRIVES_WITHIN_S)

    def of(self, index: int = 0) -> GpuSample:
        """The sample of one GPU from the last poll."""
        (found,) = [sample for sample in self.samples if sample.gpu == gpu_uuid(index)]
        return found

    def fact(self, name: str, *labels: str, index: int = 0) -> float | None:
        """A fact of one GPU from the last poll."""
        return self.of(index).fact(name, *labels)

    def next_xid(self) -> XidError:
        """The next Xid that a read returns; waits for it."""

        def arrived() -> bool:
            self.xids += self.source.read(self.now).xids
            return bool(self.xids)

        eventually(arrived, within_s=ARRIVES_WITHIN_S, what="an Xid")
        return self.xids.popleft()
