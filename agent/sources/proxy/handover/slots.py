"""The records of a worker's requests, in memory that outlives the worker."""

import mmap
from collections.abc import Mapping
from typing import NamedTuple

SLOT_BYTES = 1024
# In all workers together: 16 MiB, of which only what was ever used takes memory.
MAX_SLOTS = 16_384

# Numbers before the lengths of the slots: whether a worker has begun, and the records without slot.
_BEGUN, _WITHOUT, _LENGTHS = range(3)
_NUMBER_BYTES = 4


class LeftSlots(NamedTuple):
    """What a worker left: the records by slot, and how many of ended requests had none."""

    records: Mapping[int, bytes]
    without: int


class RequestSlots:
    """One slot for each request that is open or not stored yet, as far as there are free ones.

    Made before the worker is forked. A worker that is killed leaves its slots to the next one. The
    length of a slot is 0 while it is free or being written, so a half-written slot counts as free.
    """

    def __init__(self, slots: int = MAX_SLOTS) -> None:
        self._first = _NUMBER_BYTES * (_LENGTHS + slots)
        self._bytes = memoryview(mmap.mmap(-1, self._first + SLOT_BYTES * slots))
        self._numbers = self._bytes[: self._first].cast("I")
        # The lowest ones first, as each page that was ever written takes memory.
        self._free = [*reversed(range(slots))]

    def begin(self) -> LeftSlots | None:
        """Begin as the only writer; returns what the worker before left, None if this is the first.

        What it left stays in its slots.
        """
        slots = range(len(self._numbers) - _LENGTHS)
        used = {slot: bytes(self._slot(slot)) for slot in slots if self._numbers[_LENGTHS + slot]}
        self._free = [slot for slot in reversed(slots) if slot not in used]
        without, self._numbers[_WITHOUT] = self._numbers[_WITHOUT], 0
        begun, self._numbers[_BEGUN] = self._numbers[_BEGUN], 1
        return LeftSlots(used, without) if begun else None

    def hold(self, record: bytes) -> int | None:
        """Put a record into a free slot; None if there is none, or the record is too large."""
        if not self._free or len(record) > SLOT_BYTES:
            return None
        slot = self._free.pop()
        self._write(slot, record)
        return slot

    def replace(self, slot: int, record: bytes) -> int | None:
        """Replace the record of a slot; None for one that is too large, which frees the slot."""
        if len(record) > SLOT_BYTES:
            self.free(slot)
            return None
        self._write(slot, record)
        return slot

    def free(self, slot: int) -> None:
        """Forget the record of a slot."""
        self._numbers[_LENGTHS + slot] = 0
        self._free.append(slot)

    def count_without(self, change: int) -> None:
        """Change the number of ended requests whose record has no slot."""
        self._numbers[_WITHOUT] += change

    def _write(self, slot: int, record: bytes) -> None:
        self._numbers[_LENGTHS + slot] = 0
        at = self._first + SLOT_BYTES * slot
        self._bytes[at : at + len(record)] = record
        self._numbers[_LENGTHS + slot] = len(record)

    def _slot(self, slot: int) -> memoryview:
        at = self._first + SLOT_BYTES * slot
        return self._bytes[at : at + self._numbers[_LENGTHS + slot]]
