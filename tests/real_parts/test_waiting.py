"""A wait ends with what it waited for, or says what it read last."""

import pytest

from tests.real_parts.waiting import eventually


def test_a_wait_goes_on_while_what_it_reads_for_is_not_there_yet() -> None:
    pages: list[dict[str, int]] = [{}, {"requests": 0}, {"requests": 7}]
    assert eventually(lambda: pages.pop(0)["requests"], within_s=60.0, what="requests") == 7
    assert pages == []


def test_the_deadline_names_the_last_error_or_value() -> None:
    rows: dict[str, int] = {}
    with pytest.raises(AssertionError, match=r"a row: not within -1 s; last: KeyError\('row'\)"):
        eventually(lambda: rows["row"], within_s=-1, what="a row")
    with pytest.raises(AssertionError, match=r"rows: not within -1 s; last: \{\}"):
        eventually(lambda: rows, within_s=-1, what="rows")
