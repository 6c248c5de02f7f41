"""Rows that cannot be read or counted when their wait is over: they stop no other row."""

import pytest
from sqlalchemy import Engine, text

from agent.errors import StoreUnavailable
from agent.store.transactions import Joining, request_settle
from tests.store.making import counted_rollups, counted_rows
from tests.store.views import DUE, JUDGE, WAIT_S, JoiningAgent, engine_view, proxy_view, states

JOINED, ENGINE, PROXY = "joined", "engine", "proxy"
# What each does to a row: neither its verdicts nor its status can be read.
BAD = ("verdicts = 'no JSON'", "status = 'no status'")


def spoil(sqlite: Engine, change: str, span_id: str | None) -> None:
    with sqlite.begin() as connection:
        changed = connection.execute(
            text(f"UPDATE requests SET {change} WHERE span_id = :span"), {"span": span_id}
        )
    assert changed.rowcount == 1


def settle(sqlite: Engine) -> tuple[int, list[int]]:
    """How many were settled, and the rows that were set aside."""
    set_aside: list[int] = []
    joining = Joining(judge=JUDGE, wait_s=WAIT_S)
    return len(request_settle(sqlite, joining, set_aside.append)(DUE)), set_aside


@pytest.mark.parametrize("change", BAD)
@pytest.mark.parametrize("bad", [0, 3, 6])
def test_a_bad_row_is_set_aside_and_the_others_are_counted(
    sqlite: Engine, change: str, bad: int
) -> None:
    views = [proxy_view(number) for number in range(7)]
    JoiningAgent(sqlite).take(*views)
    spoil(sqlite, change, views[bad].record.span_id)
    settled, set_aside = settle(sqlite)
    assert (settled, len(set_aside)) == (6, 1)
    assert states(sqlite) == sorted([(PROXY, True, False)] * 6 + [(PROXY, False, False)])
    # It is counted nowhere and stays in the table; it comes up no more.
    spoil(sqlite, "status = 'ok', verdicts = '{}'", views[bad].record.span_id)
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    assert settle(sqlite) == (0, [])


def _views_that_were_not_joined(sqlite: Engine) -> None:
    """Both views are stored and wait: settling joins them."""
    JoiningAgent(sqlite).take(proxy_view(1), proxy_view(2))
    with sqlite.begin() as connection:
        connection.execute(text("UPDATE requests SET proxy_span_id = 'x' || substr(span_id, 2)"))
    JoiningAgent(sqlite).take(engine_view(1), engine_view(2))
    with sqlite.begin() as connection:
        connection.execute(
            text("UPDATE requests SET proxy_span_id = span_id WHERE vantage = 'proxy'")
        )


def test_the_other_view_of_a_bad_row_is_counted_alone(sqlite: Engine) -> None:
    _views_that_were_not_joined(sqlite)
    spoil(sqlite, BAD[0], proxy_view(1).record.span_id)
    settled, set_aside = settle(sqlite)
    assert (settled, len(set_aside)) == (2, 1)
    expected = [(ENGINE, True, False), (JOINED, True, False), (PROXY, False, False)]
    assert states(sqlite) == expected


def test_without_a_database_nothing_is_set_aside(sqlite: Engine) -> None:
    JoiningAgent(sqlite).take(proxy_view(1))
    with sqlite.begin() as connection:
        connection.execute(text("ALTER TABLE rollup_changes RENAME TO elsewhere"))
    try:
        with pytest.raises(StoreUnavailable, match="waiting requests could not be settled"):
            settle(sqlite)
    finally:
        with sqlite.begin() as connection:
            connection.execute(text("ALTER TABLE elsewhere RENAME TO rollup_changes"))
    assert settle(sqlite) == (1, [])
