"""Reading a metrics page with the library's own parser."""

from collections import defaultdict
from collections.abc import Mapping

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families


def families(page: str) -> list[Metric]:
    """Every family of a page."""
    return list(text_string_to_metric_families(page))


def totals(page: str) -> Mapping[str, float]:
    """The sum of each series over its labels; 0 for what is not there."""
    sums: defaultdict[str, float] = defaultdict(float)
    for family in families(page):
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def labelled(page: str, name: str, label: str) -> dict[str, float]:
    """The values of one series by one of its labels."""
    samples = (sample for family in families(page) for sample in family.samples)
    return {sample.labels[label]: sample.value for sample in samples if sample.name == name}
