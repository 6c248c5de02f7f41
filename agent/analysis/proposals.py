"""Objectives that are proposed from what was seen: limits at a percentile, rounded up."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor, log10
from typing import NamedTuple

from agent.analysis.tally import EDGES_TOKENS

# Fewer say little about a percentile above the 95th.
MIN_REQUESTS = 100

LIMITS = ("ttft", "tpot")
_SHOWN = (0.5, 0.95, 0.99)


class SeenRequest(NamedTuple):
    """A request that ended, and not by its client's decision. Unknown latencies are None."""

    model: str | None
    input_tokens: int | None
    failed: bool
    ttft_s: float | None
    tpot_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedLimit:
    """A limit in milliseconds, and the share of the requests that were within it.

    `at_least`: the share is a lower bound. `seen_ms` are the percentiles that were seen, upper
    bounds if `at_least`; None above the highest bucket.
    """

    name: str
    limit_ms: float
    attainment: float
    seen_ms: Mapping[str, float | None]
    at_least: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An objective, and the share of `requests` that would have met it.

    `requests` ended without their client's doing; `failed` are those of them that failed, and meet
    no objective. `model` None is every model.
    """

    model: str | None
    requests: int
    failed: int
    limits: tuple[ProposedLimit, ...]
    attainment: float
    at_least: bool = False
    min_input_tokens: int | None = None
    max_input_tokens: int | None = None


class Proposals(NamedTuple):
    """Proposals by model, and the number of requests of models that have too few."""

    items: list[Proposal]
    too_few: Mapping[str | None, int]


def propose(seen: Iterable[SeenRequest], target: float, *, most: int, by_length: bool) -> Proposals:
    """At most so many proposals, of the models with the most requests first.

    Input lengths have proposals of their own if every length of the model is known, and there is
    room for all.
    """
    by_model: dict[str | None, list[SeenRequest]] = {}
    for one in seen:
        by_model.setdefault(one.model, []).append(one)
    models = sorted(by_model, key=lambda model: -len(by_model[model]))
    found = {model: _of_model(by_model[model], target, by_length=by_length) for model in models}
    if sum(map(len, found.values())) > most:
        found = {model: _of_model(by_model[model], target, by_length=False) for model in models}
    items = [each for model in models for each in found[model]]
    return Proposals(
        items[:most], {model: len(by_model[model]) for model in models if not found[model]}
    )


def share_for(target: float) -> float:
    """The percentile of each limit such that the target holds for all of them together."""
    return 1 - (1 - target) / len(LIMITS)


def _of_model(requests: Sequence[SeenRequest], target: float, *, by_length: bool) -> list[Proposal]:
    groups = list(_groups(requests)) if by_length else [(None, None, requests)]
    found = [_of_group(group, target, low, high) for low, high, group in groups]
    return [each for each in found if each is not None]


_Group = tuple[int | None, int | None, Sequence[SeenRequest]]


def _groups(requests: Sequence[SeenRequest]) -> Iterator[_Group]:
    """Requests by input length, with the least and the most tokens; groups of too few are joined.

    The shortest group has no least length, and the longest no most.
    """
    if any(one.input_tokens is None for one in requests):
        yield None, None, requests
        return
    ordered = sorted(requests, key=_input_tokens)
    low, begin = None, 0
    for edge in EDGES_TOKENS:
        end = bisect_left(ordered, edge, key=_input_tokens)
        if min(end - begin, len(ordered) - end) >= MIN_REQUESTS:
            yield low, edge - 1, ordered[begin:end]
            low, begin = edge, end
    yield low, None, ordered[begin:]


def _input_tokens(request: SeenRequest) -> int:
    return request.input_tokens or 0


def _of_group(
    requests: Sequence[SeenRequest], target: float, low: int | None, high: int | None
) -> Proposal | None:
    """None if too few requests have a latency."""
    judged = [one for one in requests if one.failed or one.ttft_s is not None]
    limits = [each for each in (_limit(name, judged, target) for name in LIMITS) if each]
    if not limits:
        return None
    met = sum(_meets(one, limits) for one in judged)
    return Proposal(
        model=requests[0].model,
        requests=len(judged),
        failed=sum(one.failed for one in judged),
        limits=tuple(limits),
        attainment=met / len(judged),
        min_input_tokens=low,
        max_input_tokens=high,
    )


_VALUE: Mapping[str, Callable[[SeenRequest], float | None]] = {
    "ttft": lambda one: one.ttft_s,
    "tpot": lambda one: one.tpot_s,
}


def _limit(name: str, judged: Sequence[SeenRequest], target: float) -> ProposedLimit | None:
    found = sorted(
        1000 * value
        for one in judged
        if not one.failed and (value := _VALUE[name](one)) is not None
    )
    if len(found) < MIN_REQUESTS:
        return None
    limit_ms = rounded_up(_percentile(found, share_for(target)))
    return ProposedLimit(
        name=name,
        limit_ms=limit_ms,
        attainment=bisect_right(found, limit_ms) / len(found),
        seen_ms={f"p{100 * share:.0f}": _percentile(found, share) for share in _SHOWN},
    )


def _percentile(values: Sequence[float], share: float) -> float:
    """The value at the nearest rank of sorted values."""
    return values[max(ceil(share * len(values) - 1e-9), 1) - 1]


def _meets(one: SeenRequest, limits: Iterable[ProposedLimit]) -> bool:
    """As verdicts do: a request of one token has no TPOT, and no limit on it."""
    values = ((_VALUE[limit.name](one), limit.limit_ms) for limit in limits)
    return not one.failed and all(
        value is None or 1000 * value <= limit_ms for value, limit_ms in values
    )


def rounded_up(value_ms: float) -> float:
    """Two digits, rounded up, as a person would write a limit; at least 1."""
    if value_ms <= 1:
        return 1.0
    step = 10.0 ** (floor(log10(value_ms)) - 1)
    # 230.00000000000003 of 0.23 s is 230.
    return round(ceil(value_ms / step - 1e-9) * step, 3)


# The percentiles that are known of engines' histograms, the lowest first.
_BOUNDED = {"p95": 0.95, "p99": 0.99}


def propose_from_bounds(
    model: str | None,
    latencies: Mapping[str, Mapping[str, float | None]],
    completed: int,
    failed: int,
    target: float,
) -> Proposal | None:
    """A proposal from upper bounds of percentiles in milliseconds, by latency.

    None without a bound, or with too few completed requests. The percentiles are of those alone: a
    failed one meets no limit.

    The target may be too high for the percentiles that are known: then `attainment` is below it.
    """
    limits = [
        each
        for name in LIMITS
        if name in latencies and (each := _bounded_limit(name, latencies[name], target))
    ]
    if not limits or completed < MIN_REQUESTS:
        return None
    *_, together = accumulate((each.attainment for each in limits), lambda a, b: a + b - 1)
    return Proposal(
        model=model,
        requests=completed + failed,
        failed=failed,
        limits=tuple(limits),
        attainment=together * completed / (completed + failed),
        at_least=True,
    )


def _bounded_limit(
    name: str, upper_ms: Mapping[str, float | None], target: float
) -> ProposedLimit | None:
    known = {each: share for each, share in _BOUNDED.items() if upper_ms.get(each) is not None}
    enough = [each for each, share in known.items() if share >= share_for(target)]
    chosen = next(iter(enough or [*known][::-1]), None)
    limit_ms = None if chosen is None else upper_ms[chosen]
    if chosen is None or limit_ms is None:
        return None
    return ProposedLimit(
        name=name,
        limit_ms=limit_ms,
        attainment=known[chosen],
        seen_ms=upper_ms,
        at_least=True,
    )
