"""The records of a worker's requests, in memory that outlives the worker."""

import mmap
import os
import sys
import zlib
from collections.abc import Mapping
from typing import NamedTuple, Self

from agent.sources.proxy.handover.messages import RECORD_FIELDS

SLOT_BYTES = 1024
# In all workers together: 16 MiB, of which only what was ever used takes memory.
MAX_SLOTS = 16_384

# Numbers before the lengths of the slots: the version of this layout, a checksum of the fields of
# a record, whether a worker has begun, and the records without slot.
_LAYOUT, _FIELDS, _BEGUN, _WITHOUT, _LENGTHS = range(5)
_NUMBER_BYTES = 4
_LAYOUT_VERSION = 1
_FIELDS_CHECKSUM = zlib.crc32(" ".join(RECORD_FIELDS).encode())


class LeftSlots(NamedTuple):
    """What a worker left: the records by slot, and how many of ended requests had none.

    `other_fields` says that another version of the program wrote the records.
    """

    records: Mapping[int, bytes]
    without: int
    other_fields: bool = False


class RequestSlots:
    """One slot for each request that is open or not stored yet, as far as there are free ones.

    Made before the worker is forked. A worker that is killed leaves its slots to the next one, or
    by their descriptor to a process of a later supervisor. The
    length of a slot is 0 while it is free or being written, so a half-written slot counts as free.
    """

    def __init__(self, slots: int = MAX_SLOTS) -> None:
        descriptor = os.memfd_create("request-slots")
        os.ftruncate(descriptor, _NUMBER_BYTES * _LENGTHS + (_NUMBER_BYTES + SLOT_BYTES) * slots)
        self._map(descriptor, slots)
        self._numbers[_LAYOUT], self._numbers[_FIELDS] = _LAYOUT_VERSION, _FIELDS_CHECKSUM

    @classmethod
    def left(cls, descriptor: int) -> Self:
        """Return the slots of an earlier run. Raises ValueError for another layout."""
        version = int.from_bytes(os.pread(descriptor, _NUMBER_BYTES, 0), sys.byteorder)
        if version != _LAYOUT_VERSION:
            raise ValueError(f"layout {version}; this version reads layout {_LAYOUT_VERSION}")
        slots, size_bytes = cls.__new__(cls), os.fstat(descriptor).st_size
        each_bytes = _NUMBER_BYTES + SLOT_BYTES
        slots._map(descriptor, (size_bytes - _NUMBER_BYTES * _LENGTHS) // each_bytes)
        return slots

    def _map(self, descriptor: int, slots: int) -> None:
        self.descriptor = descriptor
        self._first = _NUMBER_BYTES * (_LENGTHS + slots)
        self._bytes = memoryview(mmap.mmap(descriptor, 0))
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
        other_fields = self._numbers[_FIELDS] != _FIELDS_CHECKSUM
        return LeftSlots(used, without, other_fields) if begun else None

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

    def release(self) -> None:
        """Give the memory back, which other processes still have open. No slot is used again."""
        os.ftruncate(self.descriptor, 0)

    def _write(self, slot: int, record: bytes) -> None:
        self._numbers[_LENGTHS + slot] = 0
        at = self._first + SLOT_BYTES * slot
        self._bytes[at : at + len(record)] = record
        self._numbers[_LENGTHS + slot] = len(record)

    def _slot(self, slot: int) -> memoryview:
        at = self._first + SLOT_BYTES * slot
        return self._bytes[at : at + self._numbers[_LENGTHS + slot]]
