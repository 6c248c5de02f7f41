"""The enums of a request record, as the database and the API spell them."""

from enum import StrEnum

import pytest

from agent.records.request import Status, Vantage


def test_the_values_of_status() -> None:
    assert set(Status) == {"ok", "error", "timeout", "cancelled", "throttled", "invalid"}


def test_the_values_of_vantage() -> None:
    assert set(Vantage) == {"engine", "proxy", "joined"}


@pytest.mark.parametrize("enum", [Status, Vantage])
def test_a_member_and_its_text_are_the_same_key(enum: type[StrEnum]) -> None:
    for member in enum:
        assert {member: 1}[member.value] == 1  # type: ignore[index]
        assert {member.value: 1}[member] == 1
