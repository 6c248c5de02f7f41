"""The GPUs of the demo's engines, read from the simulators in place of NVML."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import requests

from agent.catalog import gpu_facts
from agent.http_client import http_session
from agent.records.gpu import FactKey, GpuSample, GpuSamples

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 2.0


class SimulatedGpus:
    """Reads the GPU of each simulator at its URL; one that does not answer has no sample."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._session = http_session()

    def read(self, now: float) -> GpuSamples:
        """Read all GPUs once; `now` is Unix time."""
        samples: list[GpuSample] = []
        for index, url in enumerate(self._urls):
            try:
                response = self._session.get(f"{url}/simulator/gpu", timeout=_TIMEOUT_S)
                samples.append(gpu_sample(response.json(), index, now))
            except (requests.RequestException, ValueError) as error:
                _LOG.debug("the simulator at %s gives no GPU: %s", url, error)
        return GpuSamples(tuple(samples))

    def close(self) -> None:
        """Close its connections."""
        self._session.close()


def gpu_sample(figures: Mapping[str, Any], index: int, at: float) -> GpuSample:
    """The sample of a simulated GPU."""
    ratios = {
        gpu_facts.UTILIZATION: "busy",
        gpu_facts.GRAPHICS_ACTIVE: "busy",
        gpu_facts.SM_ACTIVE: "busy",
        gpu_facts.TENSOR_ACTIVE: "tensor",
        gpu_facts.DRAM_ACTIVE: "dram",
        gpu_facts.MEMORY_TOTAL: "memory_bytes",
        gpu_facts.MEMORY_USED: "memory_used_bytes",
        gpu_facts.POWER: "watts",
        gpu_facts.POWER_LIMIT: "limit_watts",
        gpu_facts.ENERGY: "joules",
    }
    facts: dict[FactKey, float] = {(fact.name, ()): figures[key] for fact, key in ratios.items()}
    facts |= {
        (gpu_facts.UP.name, ()): 1.0,
        (gpu_facts.MEMORY_FREE.name, ()): figures["memory_bytes"] - figures["memory_used_bytes"],
        (gpu_facts.TEMPERATURE.name, ("gpu",)): figures["celsius"],
        (gpu_facts.CLOCK.name, ("sm",)): figures["clock_hertz"],
        (gpu_facts.CLOCK_MAX.name, ("sm",)): figures["clock_hertz"],
    }
    return GpuSample(gpu=figures["uuid"], index=index, name=figures["name"], at=at, facts=facts)
