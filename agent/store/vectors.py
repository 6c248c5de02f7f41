"""Rows of whole numbers as bytes, and their sums: the one encoding of everything in a rollup.

The bytes hold every number from the first to the last that is not zero, each in as many bits as the
largest of them needs: 1, 2, 4, 8, 16, 32 or 64, little-endian. Ahead of them are that number of
bits and the place of the first number. Equal vectors give equal bytes.
"""

from struct import Struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.int64]

_HEAD = Struct("<BH")
_TYPES = {bits: np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32)} | {64: np.dtype("<i8")}
_WIDTHS = (1, 2, 4, *_TYPES)
_POWERS = {bits: (1 << np.arange(bits)).astype(np.uint8) for bits in (2, 4)}

# Numbers of less than a byte are stored as whole bytes: zeros may follow the last number.
_SPARE = 7

# A count above it is damaged: the sum of a thousand still fits into 64 bits.
_LARGEST = 2**53

# Encoded vectors wait in a list first: they take less memory than a sum of full length.
_MOST_WAITING = 64


def encoded(vector: Vector) -> bytes | None:
    """The vector as bytes; None where every number is zero."""
    filled = np.flatnonzero(vector)
    if not len(filled):
        return None
    first = int(filled[0])
    numbers = vector[first : int(filled[-1]) + 1]
    largest = int(numbers.max())
    bits = next(width for width in _WIDTHS if largest < 1 << width)
    return _HEAD.pack(bits, first) + _packed(numbers, bits)


def _packed(numbers: Vector, bits: int) -> bytes:
    if bits >= 8:
        return numbers.astype(_TYPES[bits]).tobytes()
    each = (numbers[:, np.newaxis] >> np.arange(bits)) & 1
    return np.packbits(each.astype(np.uint8), bitorder="little").tobytes()


def check(part: bytes, length: int) -> None:
    """Raise one of several errors for what is no encoded vector of counts of at most this length.

    Only its head is read, and numbers of 64 bits: one of them may be negative, or so large that a
    sum overflows.
    """
    bits, first = _HEAD.unpack_from(part)
    size_bytes = len(part) - _HEAD.size
    if bits not in _WIDTHS or size_bytes * 8 % bits:
        raise ValueError(f"{size_bytes} bytes of numbers of {bits} bits")
    if first + size_bytes * 8 // bits > length + _SPARE:
        raise ValueError(f"{size_bytes} bytes of {bits} bits from place {first} of {length}")
    if bits == 64:
        numbers = np.frombuffer(part, _TYPES[bits], -1, _HEAD.size)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() <= _LARGEST:
            raise ValueError(f"counts from {numbers.min()} to {numbers.max()}")


def decoded(part: bytes) -> tuple[int, NDArray[Any]]:
    """The place of the first number, and the numbers."""
    bits, first = _HEAD.unpack_from(part)
    if bits >= 8:
        return first, np.frombuffer(part, _TYPES[bits], -1, _HEAD.size)
    packed = np.frombuffer(part, np.uint8, -1, _HEAD.size)
    each = np.unpackbits(packed, bitorder="little")
    return first, each if bits == 1 else each.reshape(-1, bits) @ _POWERS[bits]


class VectorSum:
    """The sum of encoded vectors of one length. None counts as zeros."""

    __slots__ = ("_length", "_sum", "_waiting")

    def __init__(self, length: int) -> None:
        self._length = length
        self._sum: Vector | None = None
        self._waiting: list[bytes] = []

    def add(self, part: bytes | None, *, gone: bool = False) -> None:
        """Add an encoded vector, or subtract one that is gone.

        Where a gone one was never added, no number falls below zero.
        """
        if part is None:
            return
        if gone:
            first, numbers = decoded(part)
            left = self._settle()[first : first + len(numbers)]
            left -= np.minimum(left, numbers)
            return
        self._waiting.append(part)
        if len(self._waiting) == _MOST_WAITING:
            self._settle()

    @property
    def is_zero(self) -> bool:
        """Whether nothing was added."""
        return self._sum is None and not self._waiting

    def total(self) -> Vector:
        """The sum so far."""
        return self._added_up()[: self._length]

    def encoded(self) -> bytes | None:
        """The sum so far, encoded; that of a single vector is the vector itself."""
        if self._sum is None and len(self._waiting) < 2:
            return self._waiting[0] if self._waiting else None
        return encoded(self.total())

    def _settle(self) -> Vector:
        self._sum = self._added_up()
        self._waiting.clear()
        return self._sum

    def _added_up(self) -> Vector:
        spared = self._length + _SPARE
        total = np.zeros(spared, dtype=np.int64) if self._sum is None else self._sum.copy()
        for part in self._waiting:
            first, numbers = decoded(part)
            total[first : first + len(numbers)] += numbers
        return total
