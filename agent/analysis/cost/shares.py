"""A window of an engine in shares that add up to one: whose it was, and nobody's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

from agent.analysis.cost.weights import Method, Weights, weights_for
from agent.analysis.efficiency.busy_time import time_parts
from agent.analysis.efficiency.observation import Observation
from agent.analysis.efficiency.request_activity import (
    RequestActivity,
    RequestKey,
    request_activities,
)
from agent.analysis.efficiency.serving import Serving
from agent.analysis.efficiency.time_range import TimeRange
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
    """One request's share of a window; `wasted` says that nobody had use for it."""

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
    """Shares of a window. `idle`, `unknown`, `unseen` and the requests together are 1.

    `unseen` was work for requests without a row: given up, refused, or still running. The tokens
    are those of the requests in the window.
    """

    window: TimeRange
    idle: float
    unknown: float
    unseen: float
    requests: Mapping[RequestKey, RequestShare]
    computed_tokens: float
    cached_tokens: float
    output_tokens: float
    method: Method


def minute_shares(
    observed: Observation, rows: Iterable[RequestRecord], serving: Serving
) -> MinuteShares:
    """Who had how much of the window.

    `rows` are one for each request that overlaps `observed.reach`. When more rows are known the
    same call gives the new shares; it keeps nothing.
    """
    active = request_activities(rows, observed.growth.cached_share)
    loads = requests_work(active, serving, observed.window)
    split = _split(observed, active, loads, serving)
    parts = time_parts(observed, active)
    busy = parts.busy_s / parts.length_s
    # Work of which nobody told a token is some request's where the engine counts tokens.
    mute = 0.0 if split.whole else busy
    counts = observed.growth.output_tokens is not None
    return MinuteShares(
        window=observed.window,
        idle=parts.idle_s / parts.length_s,
        unknown=parts.unknown_s / parts.length_s + (0.0 if counts else mute),
        unseen=split.share(split.unseen) * busy + (mute if counts else 0.0),
        requests=_request_shares(loads, split, busy),
        computed_tokens=fsum(load.computed.tokens for load in loads),
        cached_tokens=fsum(load.cached_tokens for load in loads),
        output_tokens=fsum(load.output_tokens for load in loads),
        method=split.weights.method,
    )


class _Split(NamedTuple):
    """What the window's work weighs in all, and that part of it that no row tells of."""

    weights: Weights
    whole: float
    unseen: float

    def share(self, weight: float) -> float:
        """The share of all work that so much of it is."""
        return weight / self.whole if self.whole else 0.0


def _split(
    observed: Observation,
    active: Sequence[RequestActivity],
    loads: Sequence[RequestWork],
    serving: Serving,
) -> _Split:
    seen = seen_work(loads)
    unseen = unseen_work(seen, unseen_tokens(observed, active), serving)
    prefill, decode = seen.prefill.plus(unseen.prefill), seen.decode.plus(unseen.decode)
    steps = count_steps(observed, loads, decode.tokens)
    weights = weights_for(serving, prefill, decode, steps)
    lost = weights.prefill(unseen.prefill) + weights.decode(unseen.decode)
    return _Split(weights, weights.prefill(seen.prefill) + weights.decode(seen.decode) + lost, lost)


def _request_shares(
    loads: Sequence[RequestWork], split: _Split, busy: float
) -> dict[RequestKey, RequestShare]:
    shares: dict[RequestKey, RequestShare] = {}
    for load in loads:
        share = RequestShare(
            split.share(split.weights.prefill(load.computed)) * busy,
            split.share(split.weights.prefill(load.cached)) * busy,
            split.share(split.weights.decode(load.decode)) * busy,
            load.activity.wasted,
        )
        key = load.activity.key
        shares[key] = _both(shares[key], share) if key in shares else share
    return shares


def _both(one: RequestShare, other: RequestShare) -> RequestShare:
    """Two rows with one key; a request that was of use in one of them was not all wasted."""
    return RequestShare(
        one.computed + other.computed,
        one.cached + other.cached,
        one.decode + other.decode,
        one.wasted and other.wasted,
    )
