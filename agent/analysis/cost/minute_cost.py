"""A minute's bill, split by its shares."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.shares import MinuteShares
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.request_activity import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCost:
    """The parts of a bill, in the unit of the bill.

    `idle`, `unknown`, `unseen`, `computed`, `cached` and `decode` add up to the bill; the last
    three add up to the requests. `computed` and `cached` are prefill. `aborted` is the part of
    requests that did not end well, and `aborted_prefill` its part in prefill.
    """

    bill: float
    idle: float
    unknown: float
    unseen: float
    aborted: float
    aborted_prefill: float
    computed: float
    cached: float
    decode: float
    requests: Mapping[RequestKey, float]
    computed_tokens: float
    cached_tokens: float
    output_tokens: float
    method: Method


def minute_cost(bill: float | None, shares: MinuteShares) -> MinuteCost | None:
    """The bill split by the shares; None without a bill."""
    if bill is None:
        return None
    requests = shares.requests
    wasted = [share for share in requests.values() if share.wasted]
    return MinuteCost(
        bill=bill,
        idle=bill * shares.idle,
        unknown=bill * shares.unknown,
        unseen=bill * shares.unseen,
        aborted=bill * fsum(share.whole for share in wasted),
        aborted_prefill=bill * fsum(share.computed + share.cached for share in wasted),
        computed=bill * fsum(share.computed for share in requests.values()),
        cached=bill * fsum(share.cached for share in requests.values()),
        decode=bill * fsum(share.decode for share in requests.values()),
        requests={key: bill * share.whole for key, share in requests.items()},
        computed_tokens=shares.computed_tokens,
        cached_tokens=shares.cached_tokens,
        output_tokens=shares.output_tokens,
        method=shares.method,
    )
