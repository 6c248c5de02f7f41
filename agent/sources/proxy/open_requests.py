"""Counts the open requests of each engine, over all workers of the proxy."""

import mmap
import os
from collections.abc import Iterator, Mapping, Sequence

_COUNT_BYTES = 8


class OpenRequests(Mapping[str, int]):
    """The open requests by engine, over all workers, in memory that they share.

    Made before the workers are forked; each writes its own row alone. `descriptor` is the memory of
    an earlier run, whose engines these are.
    """

    def __init__(
        self, engines: Sequence[str], workers: int = 1, descriptor: int | None = None
    ) -> None:
        self._indexes = {name: index for index, name in enumerate(engines)}
        if descriptor is None:
            descriptor = os.memfd_create("open-requests")
            os.ftruncate(descriptor, _COUNT_BYTES * max(1, workers * len(self._indexes)))
        self.descriptor = descriptor
        self._counts = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        self._row = 0

    def begin(self, worker: int) -> int:
        """Count as this worker, from zero; returns how many the worker before it left open."""
        self._row = worker * len(self._indexes)
        own = slice(self._row, self._row + len(self._indexes))
        left = sum(self._counts[own])
        for index in range(own.start, own.stop):
            self._counts[index] = 0
        return left

    def add(self, engine: str, change: int) -> None:
        """Change the count of this worker."""
        self._counts[self._row + self._indexes[engine]] += change

    def __getitem__(self, engine: str) -> int:
        return sum(self._counts[self._indexes[engine] :: len(self._indexes)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._indexes)

    def __len__(self) -> int:
        return len(self._indexes)
