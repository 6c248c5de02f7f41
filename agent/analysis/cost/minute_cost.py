"""The shares of an engine's minute (requests, idle, unknown, unseen) and its bill split by them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from agent.analysis.cost.weights import Method, Weights, weights_for
from agent.analysis.efficiency.busy_time import time_parts
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import (
    RequestActivity,
    RequestKey,
    request_activities,
)
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.work import (
    RequestWork,
    count_steps,
    requests_work,
    seen_work,
    unseen_tokens,
    unseen_work,
)
from agent.records.request import RequestRecord


class RequestShare(NamedTuple):
    """One request's share of a minute. `wasted` means that it was aborted or failed."""

    computed: float
    cached: float
    decode: float
    wasted: bool

    @property
    def whole(self) -> float:
        """All of it."""
        return self.computed + self.cached + self.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteShares:
    """Shares of a minute: `idle`, `unknown`, `unseen` and those of the requests add up to 1.

    `unseen` was work for requests without a row: given up, refused or still running. The tokens are
    those that the requests had in this minute.
    """

    idle: float
    unknown: float
    unseen: float
    requests: Mapping[RequestKey, RequestShare]
    computed_tokens: float
    cached_tokens: float
    output_tokens: float
    method: Method


def minute_shares(
    observed: EngineObservation, rows: Iterable[RequestRecord], serving: Serving
) -> MinuteShares:
    """The shares by the rows that are known now.

    `rows` has one record for each request that overlaps an interval of `observed`.
    """
    active = request_activities(rows, observed.growth.cached_share)
    works = requests_work(active, serving, observed.time)
    split = _split(observed, active, works, serving)
    parts = time_parts(observed, active)
    busy = parts.busy_s / parts.length_s
    # Busy time without any known token: unseen where the engine counts tokens, else unknown.
    tokenless = 0.0 if split.whole else busy
    counts = observed.growth.output_tokens is not None
    return MinuteShares(
        idle=parts.idle_s / parts.length_s,
        unknown=parts.unknown_s / parts.length_s + (0.0 if counts else tokenless),
        unseen=split.share(split.unseen) * busy + (tokenless if counts else 0.0),
        requests=_request_shares(works, split, busy),
        computed_tokens=fsum(work.computed.tokens for work in works),
        cached_tokens=fsum(work.cached_tokens for work in works),
        output_tokens=fsum(work.output_tokens for work in works),
        method=split.weights.method,
    )


class _Split(NamedTuple):
    """The weight of all work of the minute, and of the part without a row."""

    weights: Weights
    whole: float
    unseen: float

    def share(self, weight: float) -> float:
        """A weight as a share of the whole."""
        return weight / self.whole if self.whole else 0.0


def _split(
    observed: EngineObservation,
    active: Sequence[RequestActivity],
    works: Sequence[RequestWork],
    serving: Serving,
) -> _Split:
    seen = seen_work(works)
    unseen = unseen_work(seen, unseen_tokens(observed, active), serving)
    prefill, decode = seen.prefill.plus(unseen.prefill), seen.decode.plus(unseen.decode)
    steps = count_steps(observed, works, decode.tokens)
    weights = weights_for(serving, prefill, decode, steps)
    lost = weights.prefill(unseen.prefill) + weights.decode(unseen.decode)
    return _Split(weights, weights.prefill(seen.prefill) + weights.decode(seen.decode) + lost, lost)


def _request_shares(
    works: Sequence[RequestWork], split: _Split, busy: float
) -> dict[RequestKey, RequestShare]:
    shares: dict[RequestKey, RequestShare] = {}
    for work in works:
        share = RequestShare(
            split.share(split.weights.prefill(work.computed)) * busy,
            split.share(split.weights.prefill(work.cached)) * busy,
            split.share(split.weights.decode(work.decode)) * busy,
            work.activity.wasted,
        )
        key = work.activity.key
        shares[key] = _both(shares[key], share) if key in shares else share
    return shares


def _both(one: RequestShare, other: RequestShare) -> RequestShare:
    """Two rows with one key. The request is wasted only if both rows are."""
    return RequestShare(
        one.computed + other.computed,
        one.cached + other.cached,
        one.decode + other.decode,
        one.wasted and other.wasted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCost:
    """The parts of a bill, in the unit of the bill.

    `idle`, `unknown`, `unseen`, `computed`, `cached` and `decode` add up to the bill; the last
    three add up to the requests. `computed` and `cached` are prefill. `aborted` is the part of
    requests that did not end well, and `aborted_prefill` its part in prefill.
    """

    idle: float
    unknown: float
    unseen: float
    aborted: float
    aborted_prefill: float
    computed: float
    cached: float
    decode: float
    requests: Mapping[RequestKey, float]


def minute_cost(bill: float | None, shares: MinuteShares) -> MinuteCost | None:
    """The bill split by the shares; None without a bill."""
    if bill is None:
        return None
    requests = shares.requests
    wasted = [share for share in requests.values() if share.wasted]
    return MinuteCost(
        idle=bill * shares.idle,
        unknown=bill * shares.unknown,
        unseen=bill * shares.unseen,
        aborted=bill * fsum(share.whole for share in wasted),
        aborted_prefill=bill * fsum(share.computed + share.cached for share in wasted),
        computed=bill * fsum(share.computed for share in requests.values()),
        cached=bill * fsum(share.cached for share in requests.values()),
        decode=bill * fsum(share.decode for share in requests.values()),
        requests={key: bill * share.whole for key, share in requests.items()},
    )
