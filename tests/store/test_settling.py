"""Rows that wait, late figures of stored rows, and rows that another one replaces."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from agent.errors import StoreUnavailable
from agent.records.objective import JudgedRequest, Settled, WriteResult
from agent.records.request import ProxyView, Status
from agent.store.connection import open_engine
from agent.store.joining import FINAL_AFTER_S
from agent.store.transactions import Joining, request_amend, request_settle
from tests.store.making import counted_rollups, counted_rows, ended_request, stored_keys
from tests.store.views import (
    DUE,
    JUDGE,
    RECEIVED_AT,
    WAIT_S,
    JoiningAgent,
    engine_view,
    proxy_view,
    rows,
    states,
)

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
    set_aside: list[int] = []
    joining = Joining(judge=JUDGE, wait_s=WAIT_S)
    return len(request_settle(sqlite, joining, set_aside.append)(DUE).counted), set_aside


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


ENDED = ended_request(request_id="chatcmpl-1-0", preemptions=3, cached_tokens=64, ttft_s=0.1)


@pytest.fixture
def agent(sqlite: Engine) -> JoiningAgent:
    return JoiningAgent(sqlite)


def key(view: Any) -> tuple[str, str]:
    return view.record.trace_id, view.record.span_id


def amend(sqlite: Engine, *views: Any, superseded: Any = ()) -> None:
    request_amend(sqlite, JUDGE)(
        {key(view): ENDED for view in views}, [key(view) for view in superseded]
    )


def test_a_counted_row_gets_figures_and_is_counted_anew(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    view = engine_view(1, parent_span_id=None)
    agent.take(view)
    before = counted_rollups(sqlite)
    amend(sqlite, view)
    (row,) = rows(sqlite)
    assert (row["preemptions"], row["cached_tokens"], row["queue_s"]) == (3, 64, 0.25)
    assert (row["finish_reason"], row["counted"], row["settles_at"]) == ("length", True, None)
    # The queue time is in rollups.
    assert counted_rollups(sqlite) == counted_rows(sqlite) != before


def test_a_row_that_waits_goes_on_waiting(sqlite: Engine, agent: JoiningAgent) -> None:
    proxy = proxy_view(
        1,
        status=Status.CANCELLED,
        input_tokens=None,
        output_tokens=None,
        proxied=ProxyView(response_id="chatcmpl-1-0", choices=1),
    )
    agent.take(proxy)
    amend(sqlite, proxy)
    (row,) = rows(sqlite)
    assert (row["preemptions"], row["input_tokens"], row["counted"]) == (3, 100, False)
    assert (row["settles_at"], row["engine_ttft_s"]) == (DUE, 0.1)
    agent.settle(DUE)
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    assert rows(sqlite)[0]["counted"] is True


def test_a_row_that_was_joined_meanwhile_is_found_by_the_proxys_span(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    proxy, engine = proxy_view(1), engine_view(1)
    agent.take(proxy, engine)
    amend(sqlite, proxy)
    (row,) = rows(sqlite)
    assert (row["vantage"], row["preemptions"], row["ttft_s"]) == ("joined", 3, 0.3)
    assert row["engine_ttft_s"] == 0.1
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_joined_row_keeps_what_the_plugin_told_of_either_view(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    proxy, engine = proxy_view(1), engine_view(1)
    agent.take(proxy)
    amend(sqlite, proxy)
    agent.take(engine)
    (row,) = rows(sqlite)
    assert (row["vantage"], row["preemptions"], row["cached_tokens"]) == ("joined", 3, 64)


def test_a_replaced_row_is_taken_out_of_the_rollups(sqlite: Engine, agent: JoiningAgent) -> None:
    first, second = (engine_view(n, parent_span_id=None) for n in (1, 2))
    agent.take(first, second)
    amend(sqlite, superseded=[first])
    assert stored_keys(sqlite) == [key(second)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_rows_that_are_gone_are_none_of_its_business(sqlite: Engine) -> None:
    amend(sqlite, engine_view(1), superseded=[engine_view(2)])
    assert rows(sqlite) == []


def test_a_database_that_is_away_is_a_refusal(sqlite: Engine) -> None:
    away = open_engine("sqlite:////nowhere/at/all.db")
    with pytest.raises(StoreUnavailable, match="figures of engines' plugins"):
        amend(away, engine_view(1))
    away.dispose()


# When each view or the plugin's figures come, in seconds after the first view was received.
COME = st.floats(0, FINAL_AFTER_S - 20)
# The engine's view alone is undetermined; the user's view and an error of the plugin miss.
REQUESTS = st.lists(
    st.fixed_dictionaries({}, optional={"engine": COME, "proxy": COME, "figures": COME}).filter(
        lambda comes: "engine" in comes or "proxy" in comes
    ),
    min_size=1,
    max_size=5,
)
FAILED = ENDED._replace(finish_reason="error")


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(comes=REQUESTS, settles=st.lists(st.floats(0, 2 * FINAL_AFTER_S), max_size=8))
def test_each_request_is_counted_once_with_the_verdict_of_the_summary_in_any_order_of_what_comes(
    sqlite: Engine, comes: list[dict[str, float]], settles: list[float]
) -> None:
    """Each settling is of an agent that has started again."""
    with sqlite.begin() as connection:
        for table in ("requests", "rollups", "rollup_series", "rollup_changes"):
            connection.execute(text(f"DELETE FROM {table}"))
    steps = [(at, n, what) for n, each in enumerate(comes) for what, at in each.items()]
    steps += [(at, -1, "settle") for at in (*settles, 2 * FINAL_AFTER_S, 3 * FINAL_AFTER_S)]
    counted: list[JudgedRequest] = []
    final: list[JudgedRequest] = []

    def add(result: WriteResult | Settled) -> None:
        counted.extend(result.counted)
        final.extend(result.final)

    stored: dict[int, JudgedRequest] = {}
    for at, number, what in sorted(steps):
        came_at = RECEIVED_AT + at
        if what == "settle":
            add(JoiningAgent(sqlite).settled(came_at))
        elif what == "figures":
            if number in stored:
                view = stored[number]
                request_amend(sqlite, JUDGE)({key(view): FAILED}, [])
        else:
            stored[number] = view = (
                engine_view(number, received_at=came_at, ttft_s=None)
                if what == "engine"
                else proxy_view(number, received_at=came_at)
            )
            add(JoiningAgent(sqlite).take(view))
    assert len({item.record.trace_id for item in counted}) == len(counted) == len(comes)
    by_trace = {item.record.trace_id: item.judgement.verdict for item in final}
    assert len(by_trace) == len(final) == len(comes)
    assert by_trace == {row["trace_id"]: row["verdict"] for row in rows(sqlite)}
    assert counted_rollups(sqlite) == counted_rows(sqlite)
