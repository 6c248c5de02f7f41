"""Parses expositions with the parser of prometheus_client."""

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(exposition: str) -> list[Metric]:
    """All metric families."""
    return list(text_string_to_metric_families(exposition))


def totals(exposition: str) -> Mapping[str, float]:
    """The sum of each series over its labels; 0 for a missing series."""
    sums: defaultdict[str, float] = defaultdict(float)
    for family in families(exposition):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def labelled(exposition: str, name: str, label: str) -> dict[str, float]:
    """The values of one series by one of its labels."""
    samples = (sample for family in families(exposition) for sample in family.samples)
    return {sample.labels[label]: sample.value for sample in samples if sample.name == name}
