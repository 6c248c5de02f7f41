"""Adding up the figures of thousands of rollups, without taking them apart one by one.

Counts of neighbouring bins, read as one large number, add up by one addition: each count is a digit
of that number. Digits are spread over two numbers, every other one in each, so that each has twice
its width and sums do not run over.
"""

import operator
from collections import Counter
from itertools import accumulate, compress

from agent.analysis.quantiles import HIGHEST_BIN, LOWEST_BIN, Bins
from agent.analysis.tally import Tally
from agent.store.encoding import (
    CODES,
    DENSE,
    HEAD,
    SPARSE,
    VALUES,
    numbers_of,
    packed,
    sparse_parts,
    tally_of_numbers,
    unpacked,
)

_PLACES = HIGHEST_BIN - LOWEST_BIN + 1


def _every_other(width: int) -> int:
    """A mask of every other digit, from the lowest on."""
    one = b"\xff" * width + b"\0" * width
    return int.from_bytes(one * (_PLACES // 2 + 1), "little")


_MASKS = {width: _every_other(width) for width in CODES if width < max(CODES)}


class _Digits:
    """Sums of counts of one width."""

    __slots__ = ("_added", "_even", "_mask", "_odd", "_width", "counted")

    def __init__(self, width: int) -> None:
        self._width = width
        self._mask = _MASKS[width]
        self._even = self._odd = self._added = 0
        self.counted: Counter[int] = Counter()

    def add(self, first: int, body: bytes) -> None:
        bits = 8 * self._width
        number = int.from_bytes(body, "little") << first * bits
        self._even += number & self._mask
        self._odd += number >> bits & self._mask
        self._added += 1
        # So many of the largest counts fill a digit of twice the width, and no more.
        if self._added == (1 << bits) + 1:
            self.settle()

    def settle(self) -> None:
        """Bring what was added to `counted`, by bin."""
        wide = 2 * self._width
        for first, number in ((0, self._even), (1, self._odd)):
            size = -(-number.bit_length() // (8 * wide)) * wide
            counts = unpacked(number.to_bytes(size, "little"), wide)
            bins = range(LOWEST_BIN + first, LOWEST_BIN + first + 2 * len(counts), 2)
            self.counted.update(
                dict(zip(compress(bins, counts), filter(None, counts), strict=True))
            )
        self._even = self._odd = self._added = 0


def _filled_up(form: int, body: bytes, width: int) -> bytes:
    """Sparse counts as dense ones: they are added up far faster."""
    steps, counts = sparse_parts(form, body)
    places = list(accumulate(steps))
    dense = [0] * (places[-1] + 1)
    for place, count in zip(places, counts, strict=True):
        dense[place] = count
    return packed(dense, width)


class BinSum:
    """The sum of encoded bins."""

    __slots__ = ("_digits", "_sparse")

    def __init__(self) -> None:
        self._sparse: Counter[int] = Counter()
        self._digits: dict[int, _Digits] = {}

    def add(self, encoded: bytes) -> None:
        """Count these bins in. The order never matters."""
        form, first = HEAD.unpack_from(encoded)
        body = encoded[HEAD.size :]
        if form == VALUES:
            self._sparse.update(accumulate(body, initial=first + LOWEST_BIN))
        elif form < DENSE:
            width = form - SPARSE
            self._add_dense(width, first, _filled_up(form, body, width))
        else:
            self._add_dense(form - DENSE, first, body)

    def _add_dense(self, width: int, first: int, body: bytes) -> None:
        if width not in _MASKS:
            self._sparse.update(dict(enumerate(unpacked(body, width), first + LOWEST_BIN)))
            return
        if width not in self._digits:
            self._digits[width] = _Digits(width)
        self._digits[width].add(first, body)

    def bins(self) -> Bins:
        """The counts by bin, without the empty ones."""
        counted = Counter(self._sparse)
        for digits in self._digits.values():
            digits.settle()
            counted.update(digits.counted)
        return {index: count for index, count in counted.items() if count}


class CountSum:
    """The sum of encoded counts; which there are depends on the objectives that judged."""

    __slots__ = ("_numbers",)

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}

    def add(self, encoded: bytes, objectives: str) -> None:
        """Count these in. The order never matters."""
        numbers = numbers_of(encoded)
        before = self._numbers.get(objectives)
        self._numbers[objectives] = (
            numbers if before is None else list(map(operator.add, before, numbers))
        )

    def tally(self) -> Tally:
        """The counts of all, without bins."""
        told = Tally()
        for objectives, numbers in self._numbers.items():
            told.add(tally_of_numbers(numbers, objectives))
        return told
