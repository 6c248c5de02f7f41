"""The enums of a request, as keys."""

from enum import StrEnum

import pytest

from agent.catalog.definitions import Verdict
from agent.records.request import Status, Vantage


@pytest.mark.parametrize("enum", [Status, Vantage, Verdict])
def test_a_member_and_its_text_are_the_same_key(enum: type[StrEnum]) -> None:
    for member in enum:
        assert {member: 1}[member.value] == {member.value: 1}[member] == 1  # type: ignore[index]
