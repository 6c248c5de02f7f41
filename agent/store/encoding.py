"""The figures of a rollup as bytes: short, quick to add up, and equal where the figures are equal.

Bins are written in the shortest of three ways, in this order where two are equally short:

    values   each value's distance to the one before, a byte each
    sparse   each bin's distance to the one before, a byte each, then the counts
    dense    the counts of all bins from the first to the last

Ahead stand the form (0 for values, else 16 for sparse or 32 for dense, plus the bytes of a count)
and the first bin, counted from the lowest; all numbers are little-endian.

Counts are a row of numbers of variable length (LEB128): requests, those seen at the proxy, input
and output tokens with how many requests told them, requests by status, and for all objectives
together and each by itself, requests and output tokens by verdict.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise
from struct import Struct, pack, unpack

from agent.analysis.quantiles import LOWEST_BIN, BinRun
from agent.analysis.tally import ALL_OBJECTIVES, Tally, VerdictCounts

VALUES = 0
SPARSE = 16
DENSE = 32

HEAD = Struct("<BH")

# Bytes of a count, and how `struct` calls it.
CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}

_LONGEST_STEP = 255

# Their order is that of the stored numbers and never changes; new ones go to the end.
_STATUSES = ("ok", "error", "timeout", "cancelled", "throttled")
_VERDICTS = ("met", "missed", "undetermined")


def encoded_run(run: BinRun) -> bytes:
    """Counted bins as bytes; equal counts give equal bytes."""
    counts = run.counts
    width = _width(max(counts))
    dense_size = len(counts) * width
    filled = [place for place, count in enumerate(counts) if count]
    gaps = _gaps(filled)
    values_size = sum(counts) - 1
    sparse_size = (len(filled) if max(gaps) <= _LONGEST_STEP else dense_size) * (1 + width)
    first = run.first - LOWEST_BIN
    if values_size <= min(sparse_size, dense_size) and max(gaps) <= _LONGEST_STEP:
        return HEAD.pack(VALUES, first) + _value_steps(gaps, [counts[place] for place in filled])
    if sparse_size <= dense_size and max(gaps) <= _LONGEST_STEP:
        body = bytes(gaps) + packed([counts[place] for place in filled], width)
        return HEAD.pack(SPARSE + width, first) + body
    return HEAD.pack(DENSE + width, first) + packed(counts, width)


def _gaps(filled: Sequence[int]) -> list[int]:
    return [0, *(after - before for before, after in pairwise(filled))]


def _value_steps(gaps: Sequence[int], counts: Sequence[int]) -> bytes:
    """A step to each value: none to the first, and none where one equals the one before."""
    steps = b"".join([bytes((gap,)) + bytes(n - 1) for gap, n in zip(gaps, counts, strict=True)])
    return steps[1:]


def _width(largest: int) -> int:
    return next(width for width in CODES if largest < 1 << 8 * width)


def packed(counts: Sequence[int], width: int) -> bytes:
    """The counts with so many bytes each."""
    return bytes(counts) if width == 1 else pack(f"<{len(counts)}{CODES[width]}", *counts)


def unpacked(body: bytes, width: int) -> Sequence[int]:
    """The counts that were written with so many bytes each."""
    return body if width == 1 else unpack(f"<{len(body) // width}{CODES[width]}", body)


def decoded_run(encoded: bytes) -> BinRun:
    """The counted bins that `encoded_run` wrote."""
    form, first = HEAD.unpack_from(encoded)
    body = encoded[HEAD.size :]
    if form > DENSE:
        return BinRun(first + LOWEST_BIN, unpacked(body, form - DENSE))
    steps, counts = sparse_parts(form, body)
    places = list(accumulate(steps))
    dense = [0] * (places[-1] + 1)
    for place, count in zip(places, counts, strict=True):
        dense[place] += count
    return BinRun(first + LOWEST_BIN, dense)


def sparse_parts(form: int, body: bytes) -> tuple[bytes, Sequence[int]]:
    """Steps from bin to bin, the first of them 0, and how many values each adds."""
    if form == VALUES:
        return b"\0" + body, (1,) * (len(body) + 1)
    width = form - SPARSE
    bins = len(body) // (1 + width)
    return body[:bins], unpacked(body[bins:], width)


def encoded_counts(tally: Tally, objectives: str) -> bytes:
    """The counts of a tally whose requests were all judged by these objectives."""
    numbers = [
        tally.requests,
        tally.seen_at_proxy,
        tally.input_tokens,
        tally.input_tokens_known,
        tally.output_tokens,
        tally.output_tokens_known,
        *(tally.statuses.get(status, 0) for status in _STATUSES),
    ]
    for key in _verdict_keys(objectives):
        counts = tally.verdicts.get(key)
        numbers += (0, 0) if counts is None else (counts.requests, counts.output_tokens)
    return _leb128(numbers)


def decoded_counts(encoded: bytes, objectives: str) -> Tally:
    """The tally, without its bins, that `encoded_counts` wrote for these objectives."""
    return tally_of_numbers(numbers_of(encoded), objectives)


def tally_of_numbers(numbers: Sequence[int], objectives: str) -> Tally:
    """The tally of counts in their stored order, or of sums of such, without its bins."""
    statuses = zip(_STATUSES, numbers[6:11], strict=True)
    verdicts = zip(_verdict_keys(objectives), numbers[11::2], numbers[12::2], strict=True)
    return Tally(
        requests=numbers[0],
        seen_at_proxy=numbers[1],
        input_tokens=numbers[2],
        input_tokens_known=numbers[3],
        output_tokens=numbers[4],
        output_tokens_known=numbers[5],
        statuses={status: count for status, count in statuses if count},
        verdicts={key: VerdictCounts(n, tokens) for key, n, tokens in verdicts if n},
    )


@cache
def _verdict_keys(objectives: str) -> tuple[tuple[str, str], ...]:
    names = [ALL_OBJECTIVES, *objectives.split(",")] if objectives else [ALL_OBJECTIVES]
    return tuple((name, verdict) for name in names for verdict in _VERDICTS)


def _leb128(numbers: Sequence[int]) -> bytes:
    encoded = bytearray()
    for number in numbers:
        left = number
        while left > 127:
            encoded.append(left & 127 | 128)
            left >>= 7
        encoded.append(left)
    return bytes(encoded)


def numbers_of(encoded: bytes) -> list[int]:
    """The counts that `encoded_counts` wrote, in their stored order."""
    numbers = []
    number = shift = 0
    for byte in encoded:
        if byte > 127:
            number |= (byte & 127) << shift
            shift += 7
        else:
            numbers.append(number | byte << shift)
            number = shift = 0
    return numbers
