"""The cost of an engine's minute, split by segments in which the same requests are at work."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum
from typing import NamedTuple

import numpy as np

from agent.analysis.cost.weights import (
    OUTPUT_TOKEN_WEIGHT,
    PROMPT_LOADS,
    Loads,
    Method,
    Phases,
    PrefillSeconds,
    Prices,
    Pricing,
    phases,
    prefill_seconds,
)
from agent.analysis.efficiency.busy_time import TimeParts, interval_parts
from agent.analysis.efficiency.engine_observation import EngineObservation
from agent.analysis.efficiency.request_activity import Activities
from agent.analysis.efficiency.work import (
    RequestWorks,
    Serving,
    TokenWork,
    TokenWorks,
    UnseenTokens,
    seen_work,
    unseen_work,
)
from agent.catalog import engine_facts as fact
from agent.records.columns import Array, Integers
from agent.records.minute import Cost

# Differences of shared-out counts and of times below this are rounding errors.
_ROUNDING = 1e-6


class IntervalTimes(NamedTuple):
    """Busy seconds of each interval, and how long work takes in it.

    `rates` are the tokens that a stream decodes in a second, 0 if no row decodes.
    """

    busy_s: Array
    rates: Array
    prefill_s: PrefillSeconds


def unseen_loads(
    observed: EngineObservation,
    works: RequestWorks,
    serving: Serving,
    times: IntervalTimes,
) -> Array:
    """Loads of unseen work in each interval, spread over its busy seconds."""
    seen = seen_work(works)
    tokens = unseen_by_interval(observed, works.active)
    loads = np.zeros((len(Loads._fields), len(tokens)))
    for index, (interval, unseen) in enumerate(zip(observed.intervals, tokens, strict=True)):
        busy_s, rate = float(times.busy_s[index]), float(times.rates[index])
        if busy_s > _ROUNDING and any(unseen):
            work = unseen_work(seen, unseen, serving)
            counted = interval.increase.steps or 0.0
            steps = counted / busy_s if counted >= 1 else 0.0
            decode = _decode(work.decode, busy_s, rate or steps)
            (prefill_s,) = times.prefill_s(TokenWorks.of([work.prefill])).tolist()
            if serving.roof is None:
                # Prompts that the engine timed may have shared that time with unseen ones.
                share = _token_share(work.prefill.tokens, interval.increase.output_tokens or 0.0)
                prefill_s = min(prefill_s, busy_s * share)
            loads[:, index] = *_prefill(work.prefill, busy_s, prefill_s), *decode
    return loads


def _token_share(prompt: float, output: float) -> float:
    """The share of prompt tokens in time, if nothing is known but tokens."""
    weighed = prompt + OUTPUT_TOKEN_WEIGHT * output
    return prompt / weighed if weighed > 0 else 0.0


def _prefill(work: TokenWork, busy_s: float, prefill_s: float) -> Iterator[float]:
    """Nothing shows how many prompts there were."""
    yield 0.0
    yield from (each / busy_s for each in (*work, 0.0, prefill_s))


def _decode(work: TokenWork, busy_s: float, rate: float) -> Iterator[float]:
    """One stream if nothing shows how many there were."""
    tokens = work.tokens / busy_s
    streams = tokens / rate if rate else min(tokens, 1.0)
    step = work.times(streams / work.tokens) if work.tokens else work
    yield from (streams, tokens, step.flops, step.kv_bytes)


def unseen_by_interval(observed: EngineObservation, active: Activities) -> list[UnseenTokens]:
    """The unseen tokens of each interval; they add up to those of the observed time.

    Tokens of a row are taken to come evenly, so that an interval may have more of them or fewer
    than the engine counted. Only what is more in all intervals together is unseen.
    """
    computed, output, first = [], [], []
    of_input = observed.as_counted(active, fact.INPUT_TOKENS)
    of_output = observed.as_counted(active, fact.OUTPUT_TOKENS)
    for interval in observed.intervals:
        inside = interval.time.within(observed.time)
        increase = interval.increase.times(interval.time.share_in(observed.time))
        prompts = of_input.input_counted_in(inside).sum()
        computed.append((increase.computed_tokens or 0.0) - float(prompts))
        output.append((increase.output_tokens or 0.0) - float(of_output.output_in(inside).sum()))
        first.append((increase.first_tokens or 0.0) - float(active.first_in(inside).sum()))
    found = zip(_surplus(computed), _surplus(output), _surplus(first), strict=True)
    counted = observed.increase.first_tokens is not None
    return [UnseenTokens(*each[:2], each[2] if counted else None) for each in found]


def _surplus(balances: Sequence[float]) -> list[float]:
    total, more = fsum(balances), fsum(each for each in balances if each > 0)
    if total <= _ROUNDING:
        return [0.0] * len(balances)
    return [each * total / more if each > _ROUNDING else 0.0 for each in balances]


# Loads of one size differ by less than this many powers of two.
_SIZE_BITS = 16
_NO_LOAD = np.iinfo(np.int32).min


@dataclass(frozen=True, slots=True, eq=False)
class BusySplit:
    """Whose the busy seconds are: of each request in order, and of unseen ones.

    `requests` has a row for computed tokens, for cached ones and for decode.
    `unknown` are those without known work while the engine counted no tokens.
    """

    requests: Array
    unseen: float
    unknown: float
    method: Method


class _Segments(NamedTuple):
    """Times between the starts and ends of phases: ends, lengths, intervals, and loads of rows.

    `first` and `last` are the edges at which each phase begins and ends.
    """

    edges: Array
    lengths: Array
    intervals: Integers
    loads: Array
    first: Integers
    last: Integers

    @property
    def parts(self) -> list[slice]:
        """The segments of each interval: prices of all at once take much memory."""
        ends = np.searchsorted(self.intervals, np.arange(self.intervals.max(initial=-1) + 2))
        return [slice(*each) for each in pairwise(ends.tolist())]


def busy_split(
    observed: EngineObservation,
    parts: Sequence[TimeParts],
    works: RequestWorks,
    serving: Serving,
) -> BusySplit:
    """Split the busy seconds; `parts` are those of each interval, `works` are whole requests.

    In a segment, the requests at work pay its time by their work in it. Unseen work is spread over
    the busy time of its interval, and alone has what no request with a row worked in.
    """
    pricing, prefill_s = Pricing(serving), prefill_seconds(works, serving)
    found = phases(works, prefill_s)
    busy = np.array([part.busy_s for part in parts])
    segments = _segments(observed, found)
    worked = np.concatenate([_weighs(pricing, segments.loads[:, part]) for part in segments.parts])
    covered = np.bincount(segments.intervals, segments.lengths * worked, len(parts))
    shrunk = np.divide(busy, covered, out=np.ones_like(busy), where=covered > busy)
    seconds = segments.lengths * worked * shrunk[segments.intervals]
    times = IntervalTimes(busy, _stream_rates(segments, len(parts)), prefill_s)
    unseen = unseen_loads(observed, works, serving, times)
    prices, of_unseen = _paid(pricing, segments, unseen, seconds)
    of_requests = _requests(prices, segments, found)
    # Sums of many small differences; the seconds themselves are exact.
    exact = _ratio(float(seconds.sum()), float(of_requests.sum()) + of_unseen)
    alone = np.maximum(busy - covered, 0.0)
    counted = [interval.increase.output_tokens is not None for interval in observed.intervals]
    return BusySplit(
        requests=_by_owner(of_requests * exact, found.owners, works.active.rows.size),
        unseen=of_unseen * exact + float(alone[counted].sum()),
        unknown=float(alone[np.logical_not(counted)].sum()),
        method=pricing.method,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _segments(observed: EngineObservation, found: Phases) -> _Segments:
    time = observed.time
    begins, ends = np.clip(found.begins, *time), np.clip(found.ends, *time)
    bounds = np.array([interval.time.within(time).from_at for interval in observed.intervals])
    edges = np.unique(np.concatenate([begins, ends, bounds, [time.until]]))
    first, last = np.searchsorted(edges, begins), np.searchsorted(edges, ends)
    loads = np.stack([_load_between(edges.size, each, first, last) for each in found.loads])
    intervals = np.searchsorted(bounds, edges[:-1], side="right") - 1
    return _Segments(edges, np.diff(edges), intervals, loads, first, last)


def _load_between(edges: int, load: Array, first: Integers, last: Integers) -> Array:
    """The load of all phases between each two edges, from the first to the last of each phase."""
    found = np.zeros(edges - 1)
    sizes = np.where(load > 0, np.frexp(load)[1] // _SIZE_BITS, _NO_LOAD)
    for size in np.unique(sizes[load > 0]):
        some = sizes == size
        found += _of_one_size(edges, load[some], first[some], last[some])
    return found


def _of_one_size(edges: int, load: Array, first: Integers, last: Integers) -> Array:
    """The same of loads that differ little: a much larger one would leave its rounding errors."""
    begun, ended = np.bincount(first, minlength=edges), np.bincount(last, minlength=edges)
    more, less = np.bincount(first, load, edges), np.bincount(last, load, edges)
    # Sums of floats leave a rest after all phases with a load have ended; counts are exact.
    any_left = np.cumsum(begun - ended)[:-1] > 0
    return np.where(any_left, np.maximum(np.cumsum(more - less)[:-1], 0.0), 0.0)


def _apart(segments: _Segments, seconds: Array, count: int) -> Array:
    """How much of unseen prompts is in each segment: few share a step with a prompt of a row.

    1 if rows compute prompts in most of the interval.
    """
    apart = Loads.of(segments.loads).prompts == 0
    of_interval = np.bincount(segments.intervals, seconds, count)
    capacity = np.bincount(segments.intervals, seconds * apart, count)
    scale = np.divide(of_interval, capacity, out=np.ones(count), where=capacity > of_interval / 2)
    return np.where((scale > 1.0)[segments.intervals], apart * scale[segments.intervals], 1.0)


def _stream_rates(segments: _Segments, count: int) -> Array:
    """Tokens that a stream decodes in a second, by interval; 0 if none does."""
    loads = Loads.of(segments.loads)
    tokens, streams_s = (
        np.bincount(segments.intervals, each * segments.lengths, count)
        for each in (loads.stream_tokens, loads.streams)
    )
    return np.divide(tokens, streams_s, out=np.zeros(count), where=streams_s > 0)


def _weighs(pricing: Pricing, loads: Array) -> Array:
    """1 for each segment whose loads have any work, else 0."""
    each = Loads.of(loads)
    return (pricing.prices(each).of(each) > 0).astype(float)


def _paid(
    pricing: Pricing, segments: _Segments, unseen: Array, seconds: Array
) -> tuple[Prices, float]:
    """What a unit of each load pays in each segment, and what unseen work pays in all of them."""
    paid, of_unseen = np.zeros((len(Prices._fields), seconds.size)), []
    apart = _apart(segments, seconds, unseen.shape[1])
    for interval, part in enumerate(segments.parts):
        beside = np.repeat(unseen[:, [interval]], part.stop - part.start, axis=1)
        beside[:PROMPT_LOADS] *= apart[part]
        prices = pricing.prices(Loads.of(segments.loads[:, part] + beside))
        paid[:, part] = np.stack(prices) * seconds[part]
        of_unseen.append(float((prices.of(Loads.of(beside)) * seconds[part]).sum()))
    return Prices(*paid), fsum(of_unseen)


def _requests(prices: Prices, segments: _Segments, found: Phases) -> Array:
    """Seconds of each phase: computed, cached and decode."""
    paid = []
    for price in prices:
        until = np.concatenate([[0.0], np.cumsum(price)])
        paid.append(until[segments.last] - until[segments.first])
    of, loads = Prices(*paid), Loads.of(found.loads)
    cached = of.prompt_flop * found.cached_flops + of.prompt_byte * found.cached_bytes
    computed = np.maximum(of.of_prompts(loads) - cached, 0.0)
    return np.stack([computed, cached, of.of_streams(loads)])


def _by_owner(seconds: Array, owners: Integers, count: int) -> Array:
    return np.stack([np.bincount(owners, each, count) for each in seconds])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinuteCost:
    """The cost of a minute, and the part of each request with work in it, by the ids of `rows`."""

    cost: Cost
    rows: Integers
    parts: Array
    method: Method

    def times(self, factor: float) -> "MinuteCost":
        """The same parts of another bill."""
        return MinuteCost(
            cost=self.cost.times(factor),
            rows=self.rows,
            parts=self.parts * factor,
            method=self.method,
        )


def minute_cost(observed: EngineObservation, works: RequestWorks, serving: Serving) -> MinuteCost:
    """Who pays for a bill of 1, by the rows that are known now.

    `works` are whole, of all requests that overlap an interval of `observed`.
    """
    parts = interval_parts(observed, works.active)
    split = busy_split(observed, parts, works, serving)
    wasted = split.requests[:, works.active.wasted]
    computed, cached, decode = split.requests.sum(axis=1).tolist()
    seconds = Cost(
        idle=fsum(part.idle_s for part in parts),
        unknown=fsum(part.unknown_s for part in parts) + split.unknown,
        unseen=split.unseen,
        aborted=float(wasted.sum()),
        aborted_prefill=float(wasted[:2].sum()),
        computed=computed,
        cached=cached,
        decode=decode,
    )
    paying = works.have_part_in(observed.time)
    found = MinuteCost(
        cost=seconds,
        rows=works.active.rows[paying],
        parts=split.requests.sum(axis=0)[paying],
        method=split.method,
    )
    return found.times(1.0 / observed.time.length_s)
