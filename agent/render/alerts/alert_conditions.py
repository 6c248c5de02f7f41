"""Shapes of conditions that many alerts share. All are silent where nothing happened."""

from agent.render.promql import by

# One request of three is no third of the traffic.
MIN_COUNT = 5


def conditions(*parts: str) -> str:
    """All of these, each on lines of its own; the alert's value is that of the first."""
    return "\nand\n".join(parts)


def share_over(
    limit: str, labels: tuple[str, ...], window: str, *, part: str, whole: tuple[str, ...]
) -> str:
    """`part` is more than `limit` of the sum of the counters in `whole`, and not of a handful."""
    total = " + ".join(by(labels, f"rate({series}[{window}])") for series in whole)
    return conditions(
        f"{by(labels, f'rate({part}[{window}])')}\n  / ({total} > 0)\n  > {limit}",
        f"{by(labels, f'increase({part}[{window}])')} >= {MIN_COUNT}",
    )


def over_bound(
    labels: tuple[str, ...], window: str, *, share: str, within: str, all_: str, buckets: str
) -> str:
    """Fewer than `share` of a histogram's observations are `within` a bound, one of its edges.

    The value is the percentile, which lies between edges and is an estimate; the condition is not.
    """
    inside, total = f"{within}[{window}]", f"{all_}[{window}]"
    return conditions(
        f"histogram_quantile({share}, {by((*labels, 'le'), f'rate({buckets}[{window}])')})",
        f"{by(labels, f'rate({inside})')}\n  / ({by(labels, f'rate({total})')} > 0)\n  < {share}",
        f"{by(labels, f'increase({total})')}\n  - {by(labels, f'increase({inside})')}\n"
        f"  >= {MIN_COUNT}",
    )


def while_told(alert: str, labels: tuple[str, ...], condition: str) -> str:
    """The alert itself fires already, and the condition holds: what began once has not ended."""
    told = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    return f"(\n{conditions(by(labels, told, 'max'), condition)}\n)"


def worst(expression: str, *labels: str) -> str:
    """A template that goes on, up to its `end`, with the series that has most of a figure above 0.

    Each %q of the expression stands for the value of one of the alert's `labels`.
    """
    values = " ".join(f"$labels.{label}" for label in labels)
    return f"{{{{ range query (printf `topk(1, {expression} > 0)` {values}) }}}}"
