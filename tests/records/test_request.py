"""The words of a request record, as the database and the API spell them."""

from enum import StrEnum

import pytest

from agent.records.request import Status, Vantage


def test_the_ways_in_which_a_request_ends() -> None:
    assert set(Status) == {"ok", "error", "timeout", "cancelled", "throttled"}


def test_the_places_where_latencies_are_taken() -> None:
    assert set(Vantage) == {"engine", "proxy", "joined"}


@pytest.mark.parametrize("words", [Status, Vantage])
def test_a_word_and_its_text_are_one_key(words: type[StrEnum]) -> None:
    for word in words:
        assert {word: 1}[word.value] == 1  # type: ignore[index]
        assert {word.value: 1}[word] == 1
