"""The shares of an engine's minute (requests, idle, unknown, unseen) and its bill split by them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from agent.analysis.cost.busy_split import BusySplit, busy_split
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.busy_time import interval_parts
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import RequestKey, request_activities
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.work import RequestWork, whole_works
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
    whole, length_s = whole_works(active, serving), observed.time.length_s
    parts = interval_parts(observed, active)
    split = busy_split(observed, parts, whole, serving)
    works = [work.part_in(observed.time) for work in whole]
    unknown_s = fsum(part.unknown_s for part in parts) + split.unknown
    return MinuteShares(
        idle=fsum(part.idle_s for part in parts) / length_s,
        unknown=unknown_s / length_s,
        unseen=split.unseen / length_s,
        requests=_request_shares(works, split, length_s),
        computed_tokens=fsum(work.computed.tokens for work in works if work),
        cached_tokens=fsum(work.cached_tokens for work in works if work),
        output_tokens=fsum(work.output_tokens for work in works if work),
        method=split.method,
    )


def _request_shares(
    works: Sequence[RequestWork | None], split: BusySplit, length_s: float
) -> dict[RequestKey, RequestShare]:
    """By the key of each request with work in the minute, which is None for the others."""
    shares: dict[RequestKey, RequestShare] = {}
    for work, seconds in zip(works, split.requests, strict=True):
        if work is not None:
            computed, cached, decode = (each / length_s for each in seconds)
            share = RequestShare(computed, cached, decode, work.activity.wasted)
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
