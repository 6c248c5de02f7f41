from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent.analysis.tally import tally_of
from agent.store.rollups import FIGURES, figures_of, objectives_text
from agent.store.unreadable import DAMAGED
from agent.store.vectors import Vector, VectorSum, check, encoded
from tests.store.making import decoded, request
from tests.store.test_rollups import FACTS, JUDGEMENTS

LENGTH = 2340
PLACES = st.integers(0, LENGTH - 1)
COUNTS = st.one_of(
    *(st.integers(1, largest) for largest in (1, 3, 15, 255, 65_535, 2**32 - 1, 2**60))
)


def near(start: int) -> st.SearchStrategy[dict[int, int]]:
    last = min(start + 40, LENGTH - 1)
    return st.dictionaries(st.integers(start, last), COUNTS, min_size=1, max_size=40)


NUMBERS = st.dictionaries(PLACES, COUNTS, min_size=1, max_size=20) | PLACES.flatmap(near)


def vector(numbers: Mapping[int, int]) -> Vector:
    made = np.zeros(LENGTH, dtype=np.int64)
    for place, number in numbers.items():
        made[place] = number
    return made


def summed(parts: Sequence[bytes | None]) -> Vector:
    vector_sum = VectorSum(LENGTH)
    for part in parts:
        vector_sum.add(part)
    return vector_sum.total()


@given(NUMBERS)
@example({0: 1, LENGTH - 1: 1})
@example({LENGTH - 1: 1})
@example({0: 2**63 - 1})
def test_a_vector_is_decoded_from_its_bytes(numbers: dict[int, int]) -> None:
    assert np.array_equal(summed([encoded(vector(numbers))]), vector(numbers))


@pytest.mark.parametrize(
    ("numbers", "size"),
    [
        # A header of three bytes, then each number in as many bits as the largest needs.
        ({0: 1}, 3 + 1),
        ({2000: 1, 2007: 1}, 3 + 1),
        ({2000: 1, 2008: 1}, 3 + 2),
        ({0: 3, 7: 1}, 3 + 2),
        ({0: 4, 7: 1}, 3 + 4),
        ({0: 16, 49: 1}, 3 + 50),
        ({place: 255 for place in range(50)}, 3 + 50),
        ({place: 256 for place in range(50)}, 3 + 2 * 50),
        ({place: 65_536 for place in range(50)}, 3 + 4 * 50),
        ({0: 2**32}, 3 + 8),
    ],
)
def test_a_vector_takes_few_bytes(numbers: dict[int, int], size: int) -> None:
    assert len(encoded(vector(numbers)) or b"") == size


def test_zeros_take_no_bytes() -> None:
    assert encoded(vector({})) is None
    assert np.array_equal(summed([None]), vector({}))


@given(st.lists(NUMBERS, max_size=8), st.randoms())
def test_a_sum_is_the_same_in_any_order(parts: list[dict[int, int]], random: Any) -> None:
    whole = sum((vector(numbers) for numbers in parts), vector({}))
    random.shuffle(parts)
    assert np.array_equal(summed([encoded(vector(numbers)) for numbers in parts]), whole)


@pytest.mark.parametrize("number", [1, 254, 255, 2**32 - 1])
def test_a_sum_of_many_vectors_does_not_overflow(number: int) -> None:
    part = vector({place: number for place in range(100, 200)})
    assert np.array_equal(summed([encoded(part)] * 1000), 1000 * part)


def test_a_sum_can_be_read_before_more_is_added() -> None:
    part = vector({place: 7 for place in range(20)})
    vector_sum = VectorSum(LENGTH)
    vector_sum.add(encoded(part))
    first = vector_sum.total()
    vector_sum.add(encoded(part))
    assert np.array_equal(first, part)
    assert np.array_equal(vector_sum.total(), 2 * part)


@given(NUMBERS, NUMBERS)
def test_subtracting_a_vector_undoes_its_addition_and_never_goes_below_zero(
    first: dict[int, int], gone: dict[int, int]
) -> None:
    vector_sum = VectorSum(LENGTH)
    vector_sum.add(encoded(vector(first)))
    vector_sum.add(encoded(vector(gone)))
    vector_sum.add(encoded(vector(gone)), gone=True)
    assert np.array_equal(vector_sum.total(), vector(first))
    vector_sum.add(encoded(2 * vector(first)), gone=True)
    assert not vector_sum.total().any()


def text_of(judged: Any) -> str:
    return objectives_text(tuple(name for name, _ in judged.by_objective))


@given(st.sampled_from(JUDGEMENTS), st.lists(FACTS, max_size=10))
def test_a_tally_is_decoded_from_its_columns(judged: Any, seen: Sequence[Any]) -> None:
    tally = tally_of([request(n, judged, **facts) for n, facts in enumerate(seen)])
    columns = figures_of(tally, text_of(judged))
    assert decoded(text_of(judged), [columns[name] for name in FIGURES]) == tally


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"\x08\x00",
        b"\x09\x00\x00x",
        b"\x10\x00\x00x",
        b"\x08\xff\xffx",
        b"\x40\x00\x00" + (2**64 - 5).to_bytes(8, "little"),
        b"\x40\x00\x00" + (2**62).to_bytes(8, "little"),
    ],
    ids=["empty", "cut", "bits", "odd length", "place", "negative", "huge"],
)
def test_bytes_that_are_no_counts_are_refused(damaged: bytes) -> None:
    with pytest.raises(DAMAGED):
        check(damaged, 100)


def test_every_encoded_vector_passes_the_check() -> None:
    for largest in (1, 3, 15, 255, 2**16, 2**40):
        part = encoded(np.array([0, largest, 0, 1, 0], dtype=np.int64))
        assert part is not None
        check(part, 5)
