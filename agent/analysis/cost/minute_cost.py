"""What a window's bill was for."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum

from agent.analysis.cost.shares import MinuteShares
from agent.analysis.cost.weights import Method
from agent.analysis.efficiency.request_activity import RequestKey


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """What one token of a request cost, in the unit of the bill; None where there was none."""

    computed_input: float | None
    cached_input: float | None
    output: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MinuteCost:
    """A bill, split; everything in the unit of the bill.

    `idle`, `unknown`, `unseen`, `prefill` and `decode` together are the bill, and the requests
    together are `prefill` and `decode`. `aborted` is the part of the requests that ended otherwise
    than well, and `aborted_prefill` what of that was prefill. `computed` and `cached` are the two
    parts of `prefill`.
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

    @property
    def prefill(self) -> float:
        """What the prompts of requests cost."""
        return self.computed + self.cached

    @property
    def wasted(self) -> float:
        """What nobody had use for, as far as that is known."""
        return self.unseen + self.aborted

    @property
    def token_prices(self) -> TokenPrices:
        """The price of each kind of token; times the tokens these are the cost of the requests."""
        return TokenPrices(
            computed_input=_each(self.computed, self.computed_tokens),
            cached_input=_each(self.cached, self.cached_tokens),
            output=_each(self.decode, self.output_tokens),
        )


def minute_cost(bill: float | None, shares: MinuteShares) -> MinuteCost | None:
    """The bill split by the shares; None without a bill."""
    if bill is None:
        return None
    requests = shares.requests
    return MinuteCost(
        bill=bill,
        idle=bill * shares.idle,
        unknown=bill * shares.unknown,
        unseen=bill * shares.unseen,
        aborted=bill * fsum(share.whole for share in requests.values() if share.wasted),
        aborted_prefill=bill
        * fsum(share.computed + share.cached for share in requests.values() if share.wasted),
        computed=bill * fsum(share.computed for share in requests.values()),
        cached=bill * fsum(share.cached for share in requests.values()),
        decode=bill * fsum(share.decode for share in requests.values()),
        requests={key: bill * share.whole for key, share in requests.items()},
        computed_tokens=shares.computed_tokens,
        cached_tokens=shares.cached_tokens,
        output_tokens=shares.output_tokens,
        method=shares.method,
    )


def _each(cost: float, tokens: float) -> float | None:
    return cost / tokens if tokens > 0 else None
