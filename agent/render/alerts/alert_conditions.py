"""Shapes of conditions that many alerts share. None of them holds where nothing happened."""

from collections.abc import Callable, Sequence

from agent.render.promql import TARGET_LABELS, Matcher, among, by, eq, upto

# Below this a share says little: one request of three is 33 % of the traffic.
MIN_COUNT = 5

# The series of a histogram by its ending, such as `_bucket`, and further matchers.
HistogramSeries = Callable[[str, tuple[Matcher, ...]], str]


def conditions(*parts: str) -> str:
    """All of these, each on lines of its own; the alert's value is that of the first."""
    return "\nand\n".join(parts)


def share_over(
    limit: object, labels: tuple[str, ...], window: str, *, part: str, whole: tuple[str, ...]
) -> str:
    """`part` is more than `limit` of the sum of the counters in `whole`, and at least MIN_COUNT."""
    total = " + ".join(by(labels, f"rate({series}[{window}])") for series in whole)
    return conditions(
        f"{by(labels, f'rate({part}[{window}])')}\n  / ({total} > 0)\n  > {limit}",
        f"{by(labels, f'increase({part}[{window}])')} >= {MIN_COUNT}",
    )


def over_bound(
    labels: tuple[str, ...],
    window: str,
    share: str,
    bound: float,
    series: HistogramSeries,
) -> str:
    """Fewer than `share` of a histogram's observations are within a bound, one of its edges.

    The value is the percentile, an estimate between edges; the condition is exact.
    """
    buckets = f"{series('_bucket', ())}[{window}]"
    inside = f"{series('_bucket', (upto(bound),))}[{window}]"
    total = f"{series('_count', ())}[{window}]"
    return conditions(
        f"histogram_quantile({share}, {by((*labels, 'le'), f'rate({buckets})')})",
        f"{by(labels, f'rate({inside})')}\n  / ({by(labels, f'rate({total})')} > 0)\n  < {share}",
        f"{by(labels, f'increase({total})')}\n  - {by(labels, f'increase({inside})')}\n"
        f"  >= {MIN_COUNT}",
    )


def firing(alerts: Sequence[str], *more: Matcher) -> str:
    """The series of these alerts while they fire."""
    name = eq("alertname", alerts[0]) if len(alerts) == 1 else among("alertname", alerts)
    matchers = (name, *more, eq("alertstate", "firing"))
    return f"ALERTS{{{','.join(matcher.text for matcher in matchers)}}}"


def fired(alerts: Sequence[str], labels: tuple[str, ...], window: str, *more: Matcher) -> str:
    """One of these alerts fired within the window."""
    return by(labels, f"max_over_time({firing(alerts, *more)}[{window}])", "max")


def while_firing(alert: str, labels: tuple[str, ...], condition: str) -> str:
    """The alert itself fires, and the condition holds: the alert goes on until that ends."""
    return f"(\n{conditions(by(labels, firing((alert,)), 'max'), condition)}\n)"


def target_down(series: str, window: str) -> str:
    """A scrape target fails that had this series within the window.

    A target that was removed from the configuration has no `up` and is no failure.
    """
    lately = by(TARGET_LABELS, f"max_over_time({series}[{window}])", "max")
    return f"up == 0\nand on ({', '.join(TARGET_LABELS)})\n{lately}"


def idle_with_work(labels: tuple[str, ...], requests: Sequence[str], steps: str) -> str:
    """An engine has requests, and its counter of steps stands still; the value is the requests."""
    work = " + ".join(by(labels, series) for series in requests)
    return conditions(f"{work} > 0", f"{by(labels, f'rate({steps})')} == 0")


def worst(expression: str, *labels: str) -> str:
    """The start of a template, up to its `end`, for the series with the highest value above 0.

    Each %q of the expression stands for the value of one of the alert's `labels`.
    """
    values = " ".join(f"$labels.{label}" for label in labels)
    return f"{{{{ range query (printf `topk(1, {expression} > 0)` {values}) }}}}"
