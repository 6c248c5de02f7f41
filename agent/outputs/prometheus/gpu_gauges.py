"""What the GPUs said last, for the metrics page."""

import threading
from collections.abc import Iterator

from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Metric
from agent.outputs.prometheus.families import Family, family_of
from agent.records.gpu import Facts, GpuSample


class GpuBoard:
    """Holds the newest sample of each GPU; safe to use from several threads."""

    def __init__(self) -> None:
        self._samples: dict[str, GpuSample] = {}
        self._lock = threading.Lock()

    def sample(self, sample: GpuSample) -> None:
        """Show this reading from now on."""
        with self._lock:
            self._samples[sample.gpu] = sample

    def forget(self, gpu: str) -> None:
        """Show nothing more of a GPU, by its UUID."""
        with self._lock:
            self._samples.pop(gpu, None)

    def newest(self) -> list[GpuSample]:
        """The last reading of each GPU."""
        with self._lock:
            return list(self._samples.values())

    def families(self) -> Iterator[Family]:
        """Every fact that a GPU tells; a MIG instance stands with its own UUID as the GPU."""
        samples = self.newest()
        told: list[tuple[str, Facts]] = [(sample.gpu, sample.facts) for sample in samples]
        told += [
            (instance.uuid, instance.facts)
            for sample in samples
            for instance in sample.mig_instances
        ]
        for fact in GPU_FACTS:
            family = family_of(fact, ("gpu", *fact.labels), _values(fact, told))
            if family.samples:
                yield family


def _values(fact: Metric, told: list[tuple[str, Facts]]) -> Iterator[tuple[tuple[str, ...], float]]:
    for gpu, facts in told:
        for (name, labels), value in facts.items():
            if name == fact.name:
                yield (gpu, *labels), value
