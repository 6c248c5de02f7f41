"""Reads single values from an exposition."""

from prometheus_client.parser import text_string_to_metric_families


def total(page: str, name: str, **labels: str) -> float:
    """The sum of the samples with this name and at least these labels; KeyError where none is."""
    values = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    if not values:
        raise KeyError(f"{name} {labels}")
    return sum(values)
