"""Rollups are the sums of rows, in any order; windows, steps and groups are read from them."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, text

from agent.analysis.quantiles import RELATIVE_ERROR, bins_of, quantile
from agent.analysis.tally import Tally
from agent.catalog.definitions import Verdict
from agent.records.minute import RequestCost
from agent.records.objective import JudgedRequest, Judgement
from agent.records.queries import OF_ROWS, Dimension, Selection, Window
from agent.records.request import ProxyView, Status, Vantage
from agent.store.minutes import MinuteStore
from agent.store.rollup_queries import cover
from agent.store.rollups import NARROW_S, WIDTHS_S, add_to_rollups
from agent.store.row_groups import MAX_GROUPS
from agent.store.store_queries import StoreQueries
from tests.store.making import (
    NOON,
    counted_rollups,
    counted_rows,
    fold,
    judgement,
    publish,
    request,
    rollup_bytes,
    store,
    store_in,
)


def total(tallies: Iterable[Tally]) -> Tally:
    summed = Tally()
    for tally in tallies:
        summed.add(tally)
    return summed


JUDGEMENTS = (
    judgement(Verdict.MET, chat=Verdict.MET),
    judgement(Verdict.MISSED, chat=Verdict.MISSED),
    # Equal to the one before, but a different object.
    judgement(Verdict.MISSED, chat=Verdict.MISSED),
    judgement(Verdict.UNDETERMINED, chat=Verdict.MET, batch=Verdict.UNDETERMINED),
    judgement(Verdict.MISSED, batch=Verdict.MET, chat=Verdict.MISSED),
    # No objective matches.
    Judgement(Verdict.UNDETERMINED, ()),
)
LATENCIES_S = st.none() | st.floats(0, 2e5)
TOKENS = st.none() | st.integers(0, 10**9)
NAMES = st.sampled_from([None, "llama", "Llama", "größe", "a,b", "🦙"])

FACTS = st.fixed_dictionaries(
    {
        "ended_at": st.floats(NOON - 130, NOON + 130),
        "status": st.sampled_from(Status),
        "vantage": st.sampled_from(Vantage),
        "agent": st.sampled_from(["agent-0", "agent-1", None]),
        "engine": st.sampled_from(["chat-0", None]),
        "model": NAMES,
        "tenant": NAMES,
        "input_tokens": TOKENS,
        "output_tokens": TOKENS,
        "ttft_s": LATENCIES_S,
        "tpot_s": LATENCIES_S,
        "e2e_s": LATENCIES_S,
        "queue_s": LATENCIES_S,
    }
)
SEEN = st.tuples(st.sampled_from(JUDGEMENTS), FACTS)
# Few numbers for many requests, so that many are sent again with other content.
BATCHES = st.lists(st.lists(st.tuples(st.integers(0, 12), SEEN), max_size=8), max_size=6)

on_a_database = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def _empty(engine: Engine) -> None:
    with engine.begin() as connection:
        for table in ("requests", "rollups", "rollup_series", "rollup_changes"):
            connection.execute(text(f"DELETE FROM {table}"))


@pytest.mark.slow
@on_a_database
@given(batches=BATCHES)
def test_rollups_equal_a_count_of_the_rows(
    sqlite: Engine, batches: list[list[tuple[int, Any]]]
) -> None:
    _empty(sqlite)
    for batch in batches:
        store(sqlite, [request(n, judged, **facts) for n, (judged, facts) in batch])
    assert counted_rollups(sqlite) == counted_rows(sqlite)


@pytest.mark.slow
@on_a_database
@given(seen=st.lists(SEEN, min_size=1, max_size=12), data=st.data())
def test_requests_in_any_order_and_repeated_give_the_same_rollup_bytes(
    sqlite: Engine, seen: list[Any], data: st.DataObject
) -> None:
    judged = [request(n, judged, **facts) for n, (judged, facts) in enumerate(seen)]
    again = data.draw(st.lists(st.sampled_from(judged), max_size=10))
    order = data.draw(st.permutations(judged + again))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(order)), max_size=5)))
    _empty(sqlite)
    for first, last in zip([0, *cuts], [*cuts, len(order)], strict=True):
        store(sqlite, order[first:last])
    in_pieces = rollup_bytes(sqlite)
    _empty(sqlite)
    store(sqlite, judged)
    assert in_pieces == rollup_bytes(sqlite)


EDGES = st.integers(-20000, 20000).map(lambda tens: NOON + NARROW_S * tens)
SOME_WIDTHS = st.sampled_from([WIDTHS_S[:n] for n in range(1, len(WIDTHS_S) + 1)])


@given(EDGES, EDGES, SOME_WIDTHS)
@example(NOON, NOON, WIDTHS_S)
def test_a_cover_contains_each_second_of_the_window_once(
    one: int, other: int, widths_s: Sequence[int]
) -> None:
    from_s, until_s = sorted((one, other))
    reached_s = from_s
    for part in cover(from_s, until_s, widths_s):
        assert part.from_s == reached_s < part.until_s
        reached_s = part.until_s
    assert reached_s == until_s


@given(EDGES, EDGES, SOME_WIDTHS)
def test_a_cover_uses_whole_rollups_of_the_widest_width_that_fits(
    one: int, other: int, widths_s: Sequence[int]
) -> None:
    from_s, until_s = sorted((one, other))
    parts = cover(from_s, until_s, widths_s)
    for part in parts:
        assert part.width_s in widths_s
        assert (part.from_s % part.width_s, part.until_s % part.width_s) == (0, 0)
    for width_s, wider_s in pairwise(widths_s):
        read_s = sum(s.until_s - s.from_s for s in parts if s.width_s == width_s)
        assert read_s < 2 * wider_s


def ended(times: Sequence[float]) -> list[JudgedRequest]:
    return [request(number, ended_at=time) for number, time in enumerate(times)]


def count(queries: StoreQueries, from_s: int, until: float, **chosen: str) -> int:
    return queries.tally(Window(from_s=from_s, until=until), Selection(**chosen)).requests


def test_a_window_includes_its_start_and_not_its_end(
    database: Engine, queries: StoreQueries
) -> None:
    just, lengths_s = 1e-6, (20, 60, 120, 3600)
    ends = [NOON + length_s for length_s in lengths_s]
    store_in(database, ended([NOON - just, NOON, *(end - d for end in ends for d in (just, 0))]))
    assert [count(queries, NOON, end) for end in (NOON, *ends)] == [0, 2, 4, 6, 8]


def test_a_window_that_ends_off_the_grid_includes_requests_until_its_end(
    database: Engine, queries: StoreQueries
) -> None:
    windows = [(NOON + 7200 * n, length_s) for n, length_s in enumerate((0.1, 9.9, 60.1, 125.0))]
    times = [at for from_s, length_s in windows for at in (from_s, from_s + length_s - 0.05)]
    store_in(database, ended(times))
    assert [count(queries, from_s, from_s + length_s) for from_s, length_s in windows] == [2] * 4


def test_a_request_near_an_edge_is_counted_by_the_rounded_time_of_its_row(sqlite: Engine) -> None:
    """Rows hold microseconds, so a quarter of one before noon is rounded to noon."""
    store(sqlite, ended([NOON - 2**-22]))
    assert counted_rollups(sqlite) == counted_rows(sqlite)
    starts = {starts_at for width_s, starts_at, *_ in counted_rollups(sqlite) if width_s <= 60}
    assert starts == {NOON}


@on_a_database
@given(
    times=st.lists(st.floats(NOON - 400, NOON + 400), max_size=12),
    from_step=st.integers(-5, 3),
    steps=st.integers(1, 6),
    step_s=st.sampled_from([10, 20, 60, 90, 120, 3600]),
    folded=st.booleans(),
)
def test_the_steps_of_a_window_add_up_to_the_window(
    sqlite: Engine, times: list[float], from_step: int, steps: int, step_s: int, folded: bool
) -> None:
    _empty(sqlite)
    store(sqlite, ended(times))
    from_s = (NOON // step_s + from_step) * step_s
    window = Window(from_s=from_s, until=from_s + steps * step_s)
    queries = StoreQueries(sqlite)
    if folded:
        fold(sqlite)
    by_step = queries.tallies_by_step(window, step_s, Selection())
    assert list(by_step) == [from_s + step_s * n for n in range(steps)]
    assert {start: tally.requests for start, tally in by_step.items()} == {
        start: sum(start <= round(at, 6) < start + step_s for at in times) for start in by_step
    }
    assert total(by_step.values()) == queries.tally(window, Selection())


@on_a_database
@given(
    times=st.lists(st.floats(NOON - 40_000, NOON + 40_000), max_size=12),
    now=st.floats(NOON - 3000, NOON + 3000),
    length_s=st.integers(1, 3000),
    step_s=st.sampled_from([10, 60, 90, 3600]),
    folded=st.booleans(),
)
@example(times=[NOON + 600], now=NOON + 0.5, length_s=6, step_s=10, folded=True)
def test_a_request_that_ends_later_is_in_the_window_after_the_one_that_ends_now(
    sqlite: Engine, times: list[float], now: float, length_s: int, step_s: int, *, folded: bool
) -> None:
    """A clock that was set back has dated some requests after now."""
    _empty(sqlite)
    store(sqlite, ended(times))
    if folded:
        fold(sqlite)
    queries = StoreQueries(sqlite)
    from_s = int(now) // step_s * step_s - step_s * length_s
    until_s = (int(now) // NARROW_S + 1) * NARROW_S
    window = Window(from_s=from_s, until=now, ends_now=True)
    later = Window(from_s=until_s, until=NOON + 100_000)
    inside = sum(from_s <= round(at, 6) < until_s for at in times)
    assert queries.tally(window, Selection()).requests == inside
    steps = queries.tallies_by_step(window, step_s, Selection())
    assert total(steps.values()).requests == inside
    by_engine = queries.tallies_by("engine", window, Selection())
    assert total(by_engine.values()).requests == inside
    after = queries.tally(later, Selection()).requests
    assert inside + after == sum(from_s <= round(at, 6) for at in times)


def test_a_month_until_now_is_read_from_the_days_of_all_lengths_together(
    database: Engine, queries: StoreQueries
) -> None:
    """With other rollups the query would read many times as many."""

    def write(file: Engine) -> None:
        for number, tokens in enumerate((100, 2000, None)):
            ended_at = NOON - 86400.0 * number
            store(file, [request(number, ended_at=ended_at, input_tokens=tokens)])
        fold(file)

    publish(database, write)
    with database.begin() as connection:
        lengths = "SELECT id FROM rollup_series WHERE input_length <> '*'"
        connection.execute(
            text(f"DELETE FROM rollups WHERE width_s < 86400 OR series IN ({lengths})")
        )
    today = NOON // 86400 * 86400
    window = Window(from_s=today - 30 * 86400, until=NOON + 60.5, ends_now=True)
    assert queries.tally(window, Selection()).requests == 3
    assert queries.tally(window, Selection(model="llama", objective="chat")).requests == 3


def test_figures_are_selected_by_engine_model_and_tenant(
    database: Engine, queries: StoreQueries
) -> None:
    store_in(
        database,
        [
            request(1, engine="chat-0", model="llama", tenant="acme"),
            request(2, engine="chat-1", model="llama", tenant="acme"),
            request(3, engine="chat-1", model="Llama", tenant=None),
            request(4, engine=None, model=None, tenant=None),
        ],
    )
    window = (NOON, NOON + 60)
    assert count(queries, *window) == 4
    assert count(queries, *window, engine="chat-1") == 2
    assert count(queries, *window, model="llama") == 2
    assert count(queries, *window, tenant="acme") == 2
    assert count(queries, *window, engine="chat-1", model="llama") == 1
    assert count(queries, *window, engine="chat") == 0


def of_every_length(file: Engine, long_ago: float) -> None:
    """Requests of five lengths, now and long ago; the last are not folded yet."""
    for number, tokens in enumerate((100, 2000, 2000, 10**6, None)):
        ttft_s = 0.1 * (number + 1)
        facts: dict[str, Any] = {
            **{"input_tokens": tokens, "ttft_s": ttft_s},
            "tenant": None if tokens is None else f"t{tokens}",
        }
        store(file, [request(number, ended_at=long_ago, **facts)])
        store(file, [request(100 + number, ended_at=NOON, **facts)])
        if number == 3:
            fold(file)


def test_percentiles_are_grouped_by_engine_model_tenant_and_input_length(
    database: Engine, queries: StoreQueries
) -> None:
    """Also over days, where a rollup of all input lengths is stored beside those of each length."""
    long_ago = NOON - 30 * 86400
    publish(database, lambda file: of_every_length(file, long_ago))
    window = Window(from_s=long_ago // 86400 * 86400, until=NOON + 10)
    by_length = queries.tallies_by("input_length", window, Selection())
    assert {length: tally.requests for length, tally in by_length.items()} == {
        "0-1k": 2,
        "1k-4k": 4,
        "64k+": 2,
        None: 2,
    }
    assert queries.tallies_by("input_length", window, Selection(engine="chat-0")) == by_length
    bins = {length: tally.bins["ttft_s"] for length, tally in by_length.items()}
    assert quantile(bins["1k-4k"], 1.0) == pytest.approx(0.3, rel=RELATIVE_ERROR)
    by_model = queries.tallies_by("model", window, Selection())
    assert {model: tally.bins for model, tally in by_model.items()} == {
        "llama": {"ttft_s": bins_of([0.1 * n for n in range(1, 6)] * 2)}
    }
    by_tenant = queries.tallies_by("tenant", window, Selection())
    assert {tenant: tally.requests for tenant, tally in by_tenant.items()} == {
        "t100": 2,
        "t2000": 4,
        "t1000000": 2,
        None: 2,
    }
    assert queries.tallies_by("engine", window, Selection(engine="none")) == {}
    assert total(by_length.values()) == queries.tally(window, Selection())


def test_removed_requests_are_not_in_any_tally_before_and_after_folding(sqlite: Engine) -> None:
    queries = StoreQueries(sqlite)
    window = Window(from_s=NOON, until=NOON + 60)
    store(sqlite, [request(1, ttft_s=0.5), request(2, ttft_s=0.5), request(3, tenant="acme")])
    fold(sqlite)
    with sqlite.begin() as connection:
        add_to_rollups(connection, [], [request(1, ttft_s=0.5), request(3, tenant="acme")])
    for _ in range(2):
        assert queries.tally(window, Selection()).requests == 1
        ((model, tally),) = queries.tallies_by("model", window, Selection()).items()
        assert (model, tally.bins) == ("llama", {"ttft_s": bins_of([0.5])})
        assert queries.tallies_by("tenant", window, Selection()).keys() == {None}
        fold(sqlite)


OBJECTIVES = ("chat", "chat-2", "Chat", "c_at", "ch", "chat.2", "2", "a,b", "a", 'quo"te', "größe")


def test_figures_of_an_objective_are_of_the_requests_that_it_matches(
    database: Engine, queries: StoreQueries
) -> None:
    both = judgement(Verdict.MISSED, first=Verdict.MET, chat=Verdict.MISSED, last=Verdict.MET)
    alone = [judgement(Verdict.MET, **{name: Verdict.MET}) for name in OBJECTIVES]
    store_in(database, [request(n, judged) for n, judged in enumerate([*alone, both])])
    counts = {name: count(queries, NOON, NOON + 60, objective=name) for name in OBJECTIVES}
    assert counts == {name: 1 + (name == "chat") for name in OBJECTIVES}
    for name in ("c%", "%", "_hat", "cha", "hat", "", ",", "b", '"', "[", "chat,first"):
        assert count(queries, NOON, NOON + 60, objective=name) == 0, name


MINUTE_UNTIL_NOW = Window(from_s=int(NOON), until=NOON + 60, ends_now=True)
GROUPS = MAX_GROUPS + 200
# These have two requests each, the others one.
BUSY = range(GROUPS - 10, GROUPS)
PRICE_USD = 0.25


@pytest.mark.parametrize("by", sorted(OF_ROWS))
def test_the_busiest_groups_have_figures_of_their_own_and_the_rest_is_one(
    database: Engine, by: Dimension
) -> None:
    named = [*range(GROUPS), *BUSY]

    def write(file: Engine) -> None:
        store(
            file,
            [
                request(n, vantage=Vantage.PROXY, proxied=proxied(by, name))
                for n, name in enumerate(named, start=1)
            ],
        )
        store(file, [request(len(named) + 1)])
        costs = [
            RequestCost(row=row, vantage=Vantage.PROXY.value, complete=True, cost_usd=PRICE_USD)
            for row in range(1, len(named) + 1)
        ]
        MinuteStore(file, "agent-0").write((), costs, NOON)

    publish(database, write)
    queries = StoreQueries(database)

    tallies = queries.tallies_by(by, MINUTE_UNTIL_NOW, Selection())
    requests = {name: tally.requests for name, tally in tallies.items()}
    busy = {str(name) for name in BUSY}
    assert {requests.pop(name) for name in busy} == {2}
    assert (requests.pop("other"), requests.pop(None)) == (GROUPS - MAX_GROUPS, 1)
    assert Counter(requests.values()) == {1: MAX_GROUPS - len(BUSY)}

    groups = queries.costs_by(by, MINUTE_UNTIL_NOW, Selection())
    assert groups.keys() == tallies.keys()
    assert groups["other"].cost_usd == (GROUPS - MAX_GROUPS) * PRICE_USD
    assert {groups[name].cost_usd for name in busy} == {2 * PRICE_USD}
    assert groups[None].cost_usd is None


def proxied(by: Dimension, name: int) -> ProxyView:
    if by == "priority":
        return ProxyView(priority=name)
    names: dict[str, Any] = {"end_user" if by == "user" else by: str(name)}
    return ProxyView(**names)
