"""The metrics of GPUs on the exposition."""

from collections.abc import Iterable, Iterator

from agent.catalog.gpu_facts import GPU_FACTS
from agent.catalog.metric import Metric
from agent.outputs.prometheus.families import Family, family_of
from agent.records.gpu import Facts, GpuSample


def gpu_families(samples: Iterable[GpuSample]) -> Iterator[Family]:
    """Every fact of these samples, with the UUID as `gpu`; a MIG instance has its own UUID."""
    facts: list[tuple[str, Facts]] = []
    for sample in samples:
        facts.append((sample.gpu, sample.facts))
        facts += [(instance.uuid, instance.facts) for instance in sample.mig_instances]
    for fact in GPU_FACTS:
        family = family_of(fact, ("gpu", *fact.labels), _values(fact, facts))
        if family.samples:
            yield family


def _values(
    fact: Metric, facts: Iterable[tuple[str, Facts]]
) -> Iterator[tuple[tuple[str, ...], float]]:
    for gpu, values in facts:
        for (name, labels), value in values.items():
            if name == fact.name:
                yield (gpu, *labels), value
