"""The vectors of a rollup as rows of ClickHouse: each has a number and its place in the vector."""

from collections.abc import Sequence

import numpy as np

from agent.store.journal.noting import ROLLUP_DIFFERENCES
from agent.store.unreadable import DAMAGED, UNREADABLE
from agent.store.vectors import check, decoded, encoded

# Far more than any vector has: its place has 16 bits.
MOST_PLACES = 2**16


def encoded_from(places: Sequence[int], numbers: Sequence[int]) -> bytes | None:
    """The vector with these numbers at these places, as bytes.

    A number below 0 becomes 0: more may be subtracted than is left of what was added. Raises
    ValueError for places that no vector has.
    """
    at = np.array(places, dtype=np.int64)
    if not 0 <= at.min() <= at.max() < MOST_PLACES:
        raise ValueError(f"places from {at.min()} to {at.max()}")
    vector = np.zeros(int(at.max()) + 1, dtype=np.int64)
    vector[at] = numbers
    return encoded(np.maximum(vector, 0))


def rows_of(
    names: Sequence[str], vectors: Sequence[bytes | None], *, gone: bool
) -> tuple[list[str], list[int], list[int]]:
    """The vector's name, the place and the value of each number of these vectors.

    Values are negative where `gone`: they are subtracted.
    """
    figures: list[str] = []
    places: list[int] = []
    numbers: list[int] = []
    for name, part in zip(names, vectors, strict=True):
        if part is None:
            continue
        try:
            check(part, MOST_PLACES)
            first, values = decoded(part)
        except DAMAGED as error:
            UNREADABLE.add(ROLLUP_DIFFERENCES, {"figure": name, "bytes": part[:20]}, error)
            continue
        filled = np.flatnonzero(values)
        signed = values[filled].astype(np.int64) * (-1 if gone else 1)
        figures += [name] * len(filled)
        places += (filled + first).tolist()
        numbers += signed.tolist()
    return figures, places, numbers
