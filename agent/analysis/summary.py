"""Rates, attainment and percentiles of a window, from its tally."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.analysis.quantiles import quantile
from agent.analysis.tally import ALL_OBJECTIVES, Tally, VerdictCounts
from agent.catalog.definitions import Verdict
from agent.catalog.time_units import MINUTE_S
from agent.records.request import BY_CLIENT, FAILED, Status

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
# A stream as slow as a share of 0.95 of all others has their speed of 0.05.
_SPEEDS = {"p50": 0.5, "p5": 0.95, "p1": 0.99}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attained:
    """The verdicts of one objective."""

    objective: str
    met: int
    missed: int
    undetermined: int
    attainment: float | None
    """met / (met + missed)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """The requests that one vantage saw, and those of them that failed."""

    requests: int
    failed: int | None
    """an engine's spans leave out most failures, so theirs are at least these"""
    error_ratio: float | None
    """of the proxy: null for the engine"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a window. Rates are per second for which there is data; unknown is None.

    Attainment is that of the chosen objective, or of the only one that judged these requests; it is
    None if several did, as `by_objective` has each. `failures` are by who saw the request: the
    proxy, or the engine alone. A percentile lies within `quantiles.RELATIVE_ERROR` of the value of
    a real request. `stream_tokens_per_s` is how fast a user's stream runs after its first token,
    1 / TPOT: 95 % of the streams are at least as fast as `p5`.
    """

    requests: int
    met: int
    missed: int
    undetermined: int
    attainment: float | None
    by_objective: Sequence[Attained]
    violations_per_min: float | None
    goodput_rps: float | None
    goodput_tokens_per_s: float | None
    throughput_rps: float | None
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    error_ratio: float | None
    failures: Mapping[str, Failures]
    ttft_ms: Mapping[str, float | None]
    tpot_ms: Mapping[str, float | None]
    e2e_ms: Mapping[str, float | None]
    queue_ms: Mapping[str, float | None]
    stream_tokens_per_s: Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class TrafficLimit:
    """A limit on the traffic as a whole. It has no part in the verdict on a request."""

    name: str
    limit: float
    seen: float | None
    holds: bool | None


def check_traffic_limits(
    summary: Summary, max_error_ratio: float | None, min_output_tokens_per_s: float | None
) -> tuple[TrafficLimit, ...]:
    """Whether the limits on the whole traffic hold in a window; limits are inclusive."""
    limits = (
        ("max_error_ratio", max_error_ratio, summary.error_ratio, operator.le),
        (
            "min_output_tokens_per_s",
            min_output_tokens_per_s,
            summary.output_tokens_per_s,
            operator.ge,
        ),
    )
    return tuple(
        TrafficLimit(name, limit, seen, None if seen is None else holds(seen, limit))
        for name, limit, seen, holds in limits
        if limit is not None
    )


def summarise(tally: Tally, covered_s: float, objective: str = ALL_OBJECTIVES) -> Summary:
    """The figures of the requests of `covered_s`, judged by one objective or by all together.

    Throughput counts requests without an error, goodput those that met their objectives.
    """
    by_objective = [_attained(tally, name) for name in _judging(tally, objective)]
    met = _counts(tally, objective, Verdict.MET)
    missed = _counts(tally, objective, Verdict.MISSED).requests
    undetermined = _counts(tally, objective, Verdict.UNDETERMINED).requests
    return Summary(
        requests=tally.requests,
        met=met.requests,
        missed=missed,
        undetermined=undetermined,
        attainment=by_objective[0].attainment if len(by_objective) == 1 else None,
        by_objective=by_objective,
        violations_per_min=_ratio(missed, covered_s / MINUTE_S),
        goodput_rps=_ratio(met.requests, covered_s),
        goodput_tokens_per_s=_goodput_tokens(tally, met, covered_s),
        throughput_rps=_ratio(tally.statuses.get(Status.OK, 0), covered_s),
        input_tokens_per_s=_rate(tally, tally.input_tokens, tally.input_tokens_known, covered_s),
        output_tokens_per_s=_rate(tally, tally.output_tokens, tally.output_tokens_known, covered_s),
        error_ratio=_error_ratio(tally),
        failures={"proxy": _seen_at_proxy(tally), "engine": _seen_at_engine(tally)},
        ttft_ms=_percentiles(tally, "ttft_s"),
        tpot_ms=_percentiles(tally, "tpot_s"),
        e2e_ms=_percentiles(tally, "e2e_s"),
        queue_ms=_percentiles(tally, "queue_s"),
        stream_tokens_per_s=_speeds(tally),
    )


def _counts(tally: Tally, objective: str, verdict: Verdict) -> VerdictCounts:
    return tally.verdicts.get((objective, verdict), VerdictCounts())


def _judging(tally: Tally, chosen: str) -> list[str]:
    """The chosen objective, or every one that judged some of these requests."""
    if chosen != ALL_OBJECTIVES:
        return [chosen]
    return sorted({name for name, _ in tally.verdicts} - {ALL_OBJECTIVES})


def _attained(tally: Tally, objective: str) -> Attained:
    met, missed, undetermined = (
        _counts(tally, objective, verdict).requests
        for verdict in (Verdict.MET, Verdict.MISSED, Verdict.UNDETERMINED)
    )
    return Attained(
        objective=objective,
        met=met,
        missed=missed,
        undetermined=undetermined,
        attainment=_ratio(met, met + missed),
    )


def _ratio(part: int, whole: float) -> float | None:
    return part / whole if whole else None


def _rate(tally: Tally, tokens: int, known: int, covered_s: float) -> float | None:
    if tally.requests and not known:
        return None
    return _ratio(tokens, covered_s)


def _goodput_tokens(tally: Tally, met: VerdictCounts, covered_s: float) -> float | None:
    """None also if requests met the objective but none of them has a token count."""
    all_known = tally.output_tokens_known == tally.requests
    if met.requests and not met.output_tokens and not all_known:
        return None
    return _rate(tally, met.output_tokens, tally.output_tokens_known, covered_s)


def _error_ratio(tally: Tally) -> float | None:
    """Failed requests over all but cancelled and invalid ones; None unless the proxy saw them all.

    An engine's spans leave out most failures.
    """
    if tally.seen_at_proxy < tally.requests or not tally.requests:
        return None
    ended = tally.requests - sum(tally.statuses.get(status, 0) for status in BY_CLIENT)
    return _ratio(ended - tally.statuses.get(Status.OK, 0), ended)


def _seen_at_proxy(tally: Tally) -> Failures:
    """Unknown if some requests were counted by an agent that kept no failures by vantage."""
    known = tally.proxy_counted == tally.seen_at_proxy
    return Failures(
        requests=tally.seen_at_proxy,
        failed=tally.proxy_failed if known else None,
        error_ratio=_ratio(tally.proxy_failed, tally.proxy_ended) if known else None,
    )


def _seen_at_engine(tally: Tally) -> Failures:
    known = tally.proxy_counted == tally.seen_at_proxy
    failed = sum(tally.statuses.get(status, 0) for status in FAILED)
    return Failures(
        requests=tally.requests - tally.seen_at_proxy,
        failed=failed - tally.proxy_failed if known else None,
        error_ratio=None,
    )


def _percentiles(tally: Tally, measure: str) -> dict[str, float | None]:
    bins = tally.bins.get(measure, {})
    values_s = {name: quantile(bins, q) for name, q in QUANTILES.items()}
    return {name: None if value is None else value * 1000 for name, value in values_s.items()}


def _speeds(tally: Tally) -> dict[str, float | None]:
    """A percentile of speed is the reciprocal of the opposite one of TPOT."""
    bins = tally.bins.get("tpot_s", {})
    tpot_s = {name: quantile(bins, q) for name, q in _SPEEDS.items()}
    return {name: 1 / value if value else None for name, value in tpot_s.items()}
