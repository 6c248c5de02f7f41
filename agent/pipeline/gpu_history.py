"""The readings of GPUs of the last minutes, as far as efficiency and energy need them."""

import threading
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import replace

from agent.catalog.gpu_facts import (
    CLOCK,
    CLOCK_MAX,
    DRAM_ACTIVE,
    ENERGY,
    TENSOR_ACTIVE,
    UTILIZATION,
)
from agent.records.gpu import GpuSample

KEEP_S = 300.0
_NEEDED = frozenset(
    fact.name for fact in (CLOCK, CLOCK_MAX, DRAM_ACTIVE, ENERGY, TENSOR_ACTIVE, UTILIZATION)
)


class GpuHistory:
    """Keeps readings for some minutes; safe to use from several threads."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, deque[GpuSample]] = defaultdict(deque)
        self._lock = threading.Lock()

    def sample(self, sample: GpuSample) -> None:
        """A GPU was read. What is held of later moments was told by a clock that was set back."""
        facts = {key: value for key, value in sample.facts.items() if key[0] in _NEEDED}
        small = replace(sample, facts=facts, processes=None, mig_instances=())
        with self._lock:
            kept = self._samples[sample.gpu]
            while kept and kept[-1].at > sample.at:
                kept.pop()
            kept.append(small)
            while kept[0].at < sample.at - KEEP_S:
                kept.popleft()

    def of(self, gpus: Collection[str]) -> list[GpuSample]:
        """What is kept of these GPUs, by UUID."""
        with self._lock:
            return [sample for gpu in gpus for sample in self._samples.get(gpu, ())]


def each_once(recent: Sequence[GpuSample], stored: Sequence[GpuSample]) -> list[GpuSample]:
    """All of these readings, without those stored ones that are recent ones too."""
    known = {_which(sample) for sample in recent}
    return [*recent, *(sample for sample in stored if _which(sample) not in known)]


def _which(sample: GpuSample) -> tuple[str, int]:
    """A database keeps moments to the microsecond, and a GPU is read less often than this."""
    return sample.gpu, round(sample.at * 100)
