"""Reads single values from an exposition."""

from prometheus_client.parser import text_string_to_metric_families


def total(page: str, name: str, **labels: str) -> float:
    """The sum of the samples with this name and at least these labels; KeyError where none is."""
    # A page has thousands of lines, and is read many times until something has happened.
    lines = [line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    values = [
        sample.value
        for family in text_string_to_metric_families("\n".join(lines) + "\n")
        for sample in family.samples
        if labels.items() <= sample.labels.items()
    ]
    if not values:
        raise KeyError(f"{name} {labels}")
    return sum(values)
