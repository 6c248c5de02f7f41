"""An inventory of GPUs that takes the parts of a read one by one."""

from collections.abc import Sequence

from agent.pipeline.gpu_inventory import GpuInventory
from agent.records.gpu import GpuSample, GpuSamples, XidError

NOW = 60.0


class Inventory(GpuInventory):
    """A GpuInventory with short calls for tests."""

    def read(
        self, *samples: GpuSample, failures: Sequence[str] = (), now: float = NOW
    ) -> list[str]:
        """Take in a read without Xids; returns the failures to count."""
        return self.update(GpuSamples(samples, (), tuple(failures)), now)

    def xid(self, seen: XidError) -> None:
        """Take in a read of one Xid."""
        self.update(GpuSamples(xids=(seen,)), NOW)
