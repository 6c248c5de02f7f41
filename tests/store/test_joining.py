import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, event, text
from sqlalchemy.exc import SQLAlchemyError

from agent.analysis.joined_record import served_row
from agent.catalog.definitions import Verdict
from agent.errors import StoreUnavailable
from agent.records.engine import ServedRequest
from agent.records.objective import JudgedRequest, Settled, WriteResult
from agent.records.request import ProxyView, Status, Vantage
from agent.store.writing import RequestWriter
from tests.store.making import (
    WITHIN_S,
    counted_rollups,
    counted_rows,
    ended_request,
    fold,
    keys_of,
    rollup_bytes,
)
from tests.store.test_rollups import on_a_database
from tests.store.views import (
    DUE,
    RECEIVED_AT,
    WAIT_S,
    JoiningAgent,
    cut,
    empty,
    engine_view,
    judged,
    proxy_view,
    rows,
    states,
)

PROXY, ENGINE, JOINED = "proxy", "engine", "joined"
HOUR_S = 3600.0
ORDERS = {
    "proxy first": [[proxy_view(1)], [engine_view(1)]],
    "engine first": [[engine_view(1)], [proxy_view(1)]],
    "one batch": [[engine_view(1), proxy_view(1)]],
}


@pytest.fixture
def agent(sqlite: Engine) -> JoiningAgent:
    return JoiningAgent(sqlite)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_two_views_of_a_request_become_one_row_that_is_counted_once(
    sqlite: Engine, agent: JoiningAgent, order: list[list[JudgedRequest]]
) -> None:
    results = [agent.take(*batch) for batch in order]
    assert [len(written.new) for written in results] == [len(batch) for batch in order]
    assert [len(written.counted) for written in results] == [0] * (len(order) - 1) + [1]
    (row,) = rows(sqlite)
    proxy, engine = proxy_view(1).record, engine_view(1).record
    assert (row["vantage"], row["counted"], row["settles_at"]) == (JOINED, True, None)
    assert (row["span_id"], row["proxy_span_id"]) == (engine.span_id, proxy.span_id)
    assert (row["ttft_s"], row["engine_ttft_s"]) == (proxy.ttft_s, engine.ttft_s)
    assert row["holdback_s"] == pytest.approx(0.2)
    assert (row["queue_s"], row["tenant"], row["service_name"]) == (0.05, "acme", "vllm")
    # The engine's view alone would have met the objective.
    assert row["verdict"] == Verdict.MISSED
    (counted,) = results[-1].counted
    assert (counted.record.vantage, counted.judgement.verdict) == (Vantage.JOINED, Verdict.MISSED)
    assert [tally.requests for tally in counted_rollups(sqlite).values()] == [1] * 6
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@pytest.mark.parametrize("view", [proxy_view(1), engine_view(1)], ids=["proxy", "engine"])
def test_a_view_that_may_be_joined_is_stored_at_once_and_counted_after_the_wait(
    sqlite: Engine, agent: JoiningAgent, view: JudgedRequest
) -> None:
    written = agent.take(view)
    assert (written.new, written.counted) == ([view], [])
    (row,) = rows(sqlite)
    assert (row["counted"], row["settles_at"]) == (False, DUE)
    assert rollup_bytes(sqlite) == {}
    assert agent.settle(DUE - 0.001) == []
    (settled,) = agent.settle(DUE)
    assert settled.record == view.record._replace(vantage=settled.record.vantage)
    assert settled.judgement.verdict == view.judgement.verdict
    assert states(sqlite) == [(str(view.record.vantage), True, False)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    before = rollup_bytes(sqlite)
    assert agent.settle(DUE + 1) == []
    assert agent.take(view) == WriteResult([], [], [])
    assert rollup_bytes(sqlite) == before != {}


def test_an_engines_span_without_a_parent_waits_for_nothing(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    alone = engine_view(1, parent_span_id=None)
    assert agent.take(alone, proxy_view(2)).counted == [alone]
    assert states(sqlite) == [(ENGINE, True, False), (PROXY, False, True)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_without_joining_everything_is_counted_at_once(sqlite: Engine) -> None:
    views = [engine_view(1), proxy_view(2)]
    written = JoiningAgent(sqlite, wait_s=None).take(*views)
    assert (written.new, written.counted) == (views, views)
    assert states(sqlite) == [(ENGINE, True, False), (PROXY, True, False)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_views_that_an_earlier_run_left_waiting_are_joined_or_settled(sqlite: Engine) -> None:
    # It may have had another name.
    JoiningAgent(sqlite).take(proxy_view(1), proxy_view(2, agent="agent-1"), engine_view(3))
    sqlite.dispose()
    later = JoiningAgent(sqlite)
    (counted,) = later.take(engine_view(1)).counted
    assert (counted.record.vantage, counted.record.status) == (Vantage.JOINED, Status.OK)
    # The later run may have joining switched off.
    settled = JoiningAgent(sqlite, wait_s=None).settle(DUE)
    assert sorted(item.record.trace_id for item in settled) == [f"{n:032x}" for n in (2, 3)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def several(**given: Any) -> JudgedRequest:
    """The proxy's view of a stream of three choices without usage: it has no token counts."""
    view = ProxyView(choices=3, streamed=True)
    values = {"route": "/v1/chat/completions", "tpot_s": None, "proxied": view, **given}
    return proxy_view(1, **{"input_tokens": None, "output_tokens": None, **values})


# What vLLM told of a request with n = 3 whose choices ended after 5, 7 and 11 tokens.
CHOICES = [engine_view(1, child, output_tokens=n) for child, n in enumerate((5, 7, 11))]


@pytest.mark.parametrize(
    ("proxy", "tokens"),
    [(several(), 23), (several(input_tokens=100, output_tokens=20), 20)],
    ids=["no usage", "usage"],
)
@pytest.mark.parametrize("place", range(4))
def test_of_several_choices_one_is_joined_with_all_tokens_and_the_others_are_never_counted(
    sqlite: Engine, agent: JoiningAgent, place: int, proxy: JudgedRequest, tokens: int
) -> None:
    """The usage that the proxy saw wins over the sum of the spans."""
    order = [*CHOICES[:place], proxy, *CHOICES[place:]]
    (item,) = [item for view in order for item in agent.take(view).counted]
    assert (item.record.vantage, item.record.output_tokens) == (Vantage.JOINED, tokens)
    assert item.record.input_tokens == 100
    assert agent.settle(DUE) == []
    assert states(sqlite) == [(ENGINE, False, False)] * 2 + [(JOINED, True, False)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    assert agent.take(*order) == WriteResult([], [], [])


def test_the_tokens_of_several_prompts_are_summed_and_their_input_is_unknown(
    sqlite: Engine,
) -> None:
    agent = JoiningAgent(sqlite)
    (item,) = agent.take(several(route="/v1/completions"), *CHOICES).counted
    assert (item.record.output_tokens, item.record.input_tokens) == (23, None)


def test_tokens_stay_unknown_where_a_span_of_several_choices_is_missing(
    sqlite: Engine,
) -> None:
    agent = JoiningAgent(sqlite)
    assert agent.take(several(), *CHOICES[:2]).counted == []
    (item,) = agent.settle(DUE)
    assert (item.record.vantage, item.record.output_tokens) == (Vantage.JOINED, None)
    assert states(sqlite) == [(ENGINE, False, False), (JOINED, True, False)]
    # A span that comes later is a part, and changes nothing that was counted.
    assert agent.take(CHOICES[2]).counted == []
    agent.settle(DUE + WAIT_S)
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    assert states(sqlite) == [(ENGINE, False, False)] * 2 + [(JOINED, True, False)]


def test_spans_with_a_parent_that_is_no_proxys_are_separate_requests(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    """For example of an application that sends several requests to answer one of its own."""
    agent.take(*(engine_view(1, child) for child in range(3)))
    assert len(agent.settle(DUE)) == 3
    assert states(sqlite) == [(ENGINE, True, False)] * 3
    assert counted_rollups(sqlite) == counted_rows(sqlite)


LATE = {
    "proxy": ([engine_view(1), engine_view(1, 1)], [proxy_view(1)], [(ENGINE, False, False)]),
    "engine": ([proxy_view(1)], [engine_view(1)], []),
}


@pytest.mark.parametrize(("first", "late", "parts"), LATE.values(), ids=LATE)
def test_a_view_that_comes_too_late_corrects_what_was_counted(
    sqlite: Engine,
    agent: JoiningAgent,
    first: list[JudgedRequest],
    late: list[JudgedRequest],
    parts: list[Any],
) -> None:
    agent.take(*first)
    assert len(agent.settle(DUE)) == len(first)
    written = agent.take(*late)
    # Counters never go down, so these requests are not counted again.
    assert (written.new, written.counted) == (late, [])
    assert states(sqlite) == [*parts, (JOINED, True, False)]
    in_steps = rollup_bytes(sqlite)
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    empty(sqlite)
    agent.take(*first, *late)
    assert rollup_bytes(sqlite) == in_steps


def test_a_correction_of_expired_rollups_leaves_no_negative_counts(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    agent.take(proxy_view(1))
    agent.settle(DUE)
    fold(sqlite)
    with sqlite.begin() as connection:
        connection.execute(text("DELETE FROM rollups WHERE width_s = 10"))
    agent.take(engine_view(1))
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_views_of_other_traces_and_other_parents_are_not_joined(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    trace_id = proxy_view(1).record.trace_id
    other = engine_view(1, 1, parent_span_id="b" * 16)
    chained = proxy_view(3, trace_id=trace_id, parent_span_id=proxy_view(1).record.span_id)
    agent.take(proxy_view(1), engine_view(2), other, chained)
    assert len(agent.settle(DUE)) == 4
    assert [vantage for vantage, _, _ in states(sqlite)] == [ENGINE] * 2 + [PROXY] * 2


class Broken(SQLAlchemyError):
    """Stops a transaction in the middle."""


def break_at(sqlite: Engine, statement: int) -> Callable[[], None]:
    """Make the statement with this number fail; the result is a function that ends this."""
    left = [statement]

    def fail(*_context: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Broken

    event.listen(sqlite, "before_cursor_execute", fail)
    return lambda: event.remove(sqlite, "before_cursor_execute", fail)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_no_view_waits_for_longer_or_is_counted_twice_because_the_clock_was_set(
    sqlite: Engine, jump_s: float
) -> None:
    agent = JoiningAgent(sqlite)
    before = [proxy_view(number) for number in range(3)]
    after = [proxy_view(number, received_at=RECEIVED_AT + jump_s) for number in range(3, 6)]
    agent.take(*before)
    agent.take(*after)
    assert len(agent.settle(DUE + jump_s - 1)) == 3
    assert [row["counted"] for row in rows(sqlite)] == [True] * 3 + [False] * 3
    # A view that comes late is joined.
    agent.take(engine_view(0), engine_view(3, received_at=RECEIVED_AT + jump_s))
    assert len(agent.settle(DUE + jump_s)) == 2
    expected = [("joined", True, False)] * 2 + [("proxy", True, False)] * 4
    assert states(sqlite) == expected
    # Each in the minute of the request itself.
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_transaction_that_fails_at_any_statement_changes_nothing_and_can_be_repeated(
    sqlite: Engine, agent: JoiningAgent
) -> None:
    agent.take(proxy_view(1), proxy_view(2), engine_view(3), engine_view(3, 1))
    agent.settle(DUE)
    batch = [
        engine_view(1),
        engine_view(1, 1),
        engine_view(2),
        proxy_view(3),
        proxy_view(4),
        engine_view(4),
    ]
    before = rows(sqlite), rollup_bytes(sqlite)
    broken = 0
    while True:
        repair = break_at(sqlite, broken)
        try:
            agent.take(*batch)
        except StoreUnavailable:
            broken += 1
        else:
            break
        finally:
            repair()
        assert (rows(sqlite), rollup_bytes(sqlite)) == before
    assert broken >= 7
    assert len(rows(sqlite)) == 4 + 2
    assert counted_rollups(sqlite) == counted_rows(sqlite)


class HeldAgent:
    def __init__(self, agent: JoiningAgent) -> None:
        self._agent = agent
        self.busy = threading.Event()
        self.goes_on = threading.Event()
        self.batches: list[int] = []

    def write(self, judged: Sequence[JudgedRequest]) -> WriteResult:
        self.busy.set()
        self.goes_on.wait(WITHIN_S)
        self.batches.append(len(judged))
        return self._agent.write(judged)


def test_senders_of_one_commit_get_their_own_views_and_each_request_once(
    sqlite: Engine,
) -> None:
    agent = JoiningAgent(sqlite)
    agent.take(proxy_view(1))
    held = HeldAgent(agent)
    writer = RequestWriter(held.write, agent.settled)
    busy = writer.submit([engine_view(9, parent_span_id=None)])
    assert held.busy.wait(WITHIN_S)
    batches = (
        [engine_view(1)],
        [engine_view(2), engine_view(3)],
        [proxy_view(2), proxy_view(1)],
        [proxy_view(3), engine_view(4, parent_span_id=None)],
    )
    submitted = [writer.submit(batch) for batch in batches]
    settling = writer.settle(DUE)
    held.goes_on.set()
    results = [future.result(WITHIN_S) for future in submitted]
    settled = settling.result(WITHIN_S).counted
    writer.close()
    assert held.batches == [1, 7]
    assert len(busy.result().counted) == 1
    assert [keys_of(result.new) for result in results] == [
        keys_of(batches[0]),
        keys_of(batches[1]),
        keys_of([proxy_view(2)]),
        keys_of(batches[3]),
    ]
    # A view that was settled before its other view came is joined late and not reported again.
    counted = [item for result in results for item in result.counted]
    first = [item.record.trace_id for item in [*counted, *settled]]
    assert sorted(first) == [proxy_view(n).record.trace_id for n in (1, 2, 3, 4)]
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_settling_that_fails_is_reported_and_the_writer_keeps_working(
    sqlite: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [StoreUnavailable("the disk is full"), RuntimeError("unexpected")]

    def settle(now: float) -> Settled:
        raise errors.pop(0)

    writer = RequestWriter(JoiningAgent(sqlite).write, settle)
    with pytest.raises(StoreUnavailable, match="the disk is full"):
        writer.settle(DUE).result(WITHIN_S)
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(StoreUnavailable, match=r"could not be settled: RuntimeError"),
    ):
        writer.settle(DUE).result(WITHIN_S)
    assert any(record.exc_info for record in caplog.records)
    assert len(writer.submit([proxy_view(1)]).result(WITHIN_S).new) == 1
    writer.close()
    with pytest.raises(StoreUnavailable, match="stopping"):
        writer.settle(DUE)


VIEWS = [
    *(proxy_view(n) for n in range(4)),
    *(engine_view(n) for n in range(1, 5)),
    *(engine_view(3, child) for child in (1, 2)),
]


def without_choice(sqlite: Engine) -> list[list[Any]]:
    """The rows without what depends on the order of transactions and of choices."""
    differing = ("span_id", "request_id", "engine_request_id", "changed")
    same = [{name: row[name] for name in row if name not in differing} for row in rows(sqlite)]
    return sorted([sorted((k, str(v)) for k, v in row.items()) for row in same])


@pytest.mark.slow
@on_a_database
@given(data=st.data())
def test_views_in_any_order_and_batches_give_the_same_rows_and_rollups(
    sqlite: Engine, data: st.DataObject
) -> None:
    agent = JoiningAgent(sqlite)
    empty(sqlite)
    agent.take(*VIEWS)
    agent.settle(DUE)
    at_once = without_choice(sqlite), rollup_bytes(sqlite)

    again = data.draw(st.lists(st.sampled_from(VIEWS), max_size=8))
    order = data.draw(st.permutations(VIEWS + again))
    places = data.draw(st.lists(st.integers(0, len(order)), max_size=8))
    times = st.sampled_from([RECEIVED_AT, DUE - 1, DUE, DUE + WAIT_S])
    empty(sqlite)
    for batch in cut(order, places):
        agent.take(*batch)
        if data.draw(st.booleans()):
            agent.settle(data.draw(times))
        assert counted_rollups(sqlite) == counted_rows(sqlite)
    agent.settle(DUE)
    assert (without_choice(sqlite), rollup_bytes(sqlite)) == at_once


MEASURED = {
    "the span after": [[True], [False]],
    "the span before": [[False], [True]],
    "one batch": [[False, True]],
}


@pytest.mark.parametrize("order", MEASURED.values(), ids=MEASURED)
def test_the_span_of_a_request_that_was_joined_where_it_was_measured_is_not_counted(
    sqlite: Engine, agent: JoiningAgent, order: list[list[bool]]
) -> None:
    """The middleware in the engine's front sends both views; the engine's span is of the same."""
    proxy, engine = proxy_view(1).record, engine_view(1).record
    choice = ended_request(ended_at=proxy.ended_at)
    measured = judged(served_row(ServedRequest(proxy, (choice,))))
    for batch in order:
        agent.take(*[measured if is_measured else engine_view(1) for is_measured in batch])
    assert not any(row["settles_at"] for row in rows(sqlite)), "both have come"
    agent.settle(DUE)
    counted = [row for row in rows(sqlite) if row["counted"]]
    assert [row["vantage"] for row in counted] == [JOINED]
    assert counted[0]["proxy_span_id"] == proxy.span_id
    assert counted[0]["span_id"] != engine.span_id
    fold(sqlite)
    assert counted_rollups(sqlite) == counted_rows(sqlite)
