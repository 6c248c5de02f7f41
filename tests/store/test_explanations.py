"""Explanations of missed requests: found, stored once, replaced, taken back, expired."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from sqlalchemy import Connection, Engine, text

from agent.catalog.causes import Cause
from agent.catalog.definitions import Verdict
from agent.errors import StoreUnavailable
from agent.records.minute import RequestCost
from agent.records.objective import CauseShare, JudgedRequest
from agent.records.request import Status
from agent.store import explanations
from agent.store.connection import for_writing, in_transaction
from agent.store.explanations import MAX_CHARACTERS, MAX_SENTENCES, ExplanationStore
from agent.store.folding import rebuild_rollups
from agent.store.minutes import MinuteStore
from agent.store.retention import Retention
from agent.store.tables import cause_rollups, rollup_series
from tests.store.explaining import (
    causes_of_rows,
    explain,
    explained,
    missed,
    share,
    summed_causes,
)
from tests.store.making import NOON, counted_rollups, counted_rows, fold, judgement, request, store
from tests.store.test_folding import rows_in
from tests.store.test_rollups import on_a_database
from tests.store.test_settling import spoil
from tests.store.views import DUE, JoiningAgent, empty, engine_view, proxy_view, rows

DAY_S = 86400
KV, BURST, LONG = Cause.KV_PRESSURE, Cause.BURST, Cause.LONG_PROMPT


def unexplained(engine: Engine, until: float = NOON + 600, **given: Any) -> list[JudgedRequest]:
    return ExplanationStore(engine, "agent-0").unexplained(NOON - 3600, until, **given)


def numbers(judged: Sequence[JudgedRequest]) -> list[int]:
    return [int(item.record.trace_id, 16) for item in judged]


def test_missed_requests_are_found_with_their_whole_record(sqlite: Engine) -> None:
    late = missed(1, ttft_s=2.5, tenant="acme", input_tokens=14_000, finish_reason="stop")
    store(sqlite, [late])
    (found,) = unexplained(sqlite)
    assert found.record == late.record
    assert found.judgement.by_objective == (("chat", Verdict.MISSED),)


def test_only_counted_missed_requests_of_this_agent_and_time_are_found(sqlite: Engine) -> None:
    store(
        sqlite,
        [
            missed(1),
            request(2),
            missed(3, agent="agent-1"),
            missed(4, ended_at=NOON - 4000),
            missed(5, ended_at=NOON + 600),
            missed(6, status=Status.ERROR),
            request(7, judgement(Verdict.UNDETERMINED)),
        ],
    )
    # A view that waits for the other one.
    JoiningAgent(sqlite).take(proxy_view(8))
    assert numbers(unexplained(sqlite)) == [1, 6]


def test_the_requests_that_ended_first_are_found_first_and_no_more_than_the_limit(
    sqlite: Engine,
) -> None:
    store(sqlite, [missed(n, ended_at=NOON + 10 * (7 * n % 5)) for n in range(5)])
    assert numbers(unexplained(sqlite, limit=3)) == [0, 3, 1]


def test_the_first_cause_and_all_shares_are_stored_in_the_row(sqlite: Engine) -> None:
    store(sqlite, [missed(1)])
    shares = (share(KV, 1.5), share(BURST, 0.5), share(LONG, None, "failure"))
    item = explained(missed(1), *shares)
    assert explain(sqlite, item, at=NOON + 60) == [item]
    (row,) = rows(sqlite)
    assert (row["cause"], row["explained_at"]) == ("kv_pressure", NOON + 60)
    assert json.loads(row["explanation"]) == {
        "sources": ["span", "samples"],
        "shares": [
            {
                "objective": "chat",
                "limit": each.limit,
                "cause": each.cause,
                "excess_s": each.excess_s,
                "evidence": list(each.evidence),
            }
            for each in shares
        ],
    }


def test_the_same_explanation_counts_once(sqlite: Engine) -> None:
    store(sqlite, [missed(1), missed(2)])
    item, other = explained(missed(1), share(KV, 0.1)), explained(missed(2), share(KV, 0.2))
    assert explain(sqlite, item, other, item) == [item, other]
    before = summed_causes(sqlite)
    assert explain(sqlite, item, at=NOON + 90) == []
    assert summed_causes(sqlite) == before == causes_of_rows(sqlite)
    assert before[10, NOON, "", "chat", "ttft", "kv_pressure"] == [2, 2, 0.3]


def test_a_later_explanation_replaces_the_earlier_one(sqlite: Engine) -> None:
    store(sqlite, [missed(1)])
    explain(sqlite, explained(missed(1), share(KV, 1.5), share(BURST, 0.5)))
    again = explained(missed(1), share(LONG, 2.0))
    assert explain(sqlite, again, at=NOON + 90) == []
    assert {place[-1] for place in summed_causes(sqlite)} == {"long_prompt"}
    assert summed_causes(sqlite) == causes_of_rows(sqlite)
    (row,) = rows(sqlite)
    assert (row["cause"], row["explained_at"]) == ("long_prompt", NOON + 60)


def test_a_request_without_a_response_has_no_seconds(sqlite: Engine) -> None:
    store(sqlite, [missed(1), missed(2)])
    for number in (1, 2):
        item = explained(missed(number), share(Cause.ENGINE_FAILURE, None, "failure"))
        assert explain(sqlite, item) == [item]
    place = (10, NOON, "", "chat", "failure", "engine_failure")
    assert summed_causes(sqlite)[place] == [2, 2, None]


SHARES = st.lists(
    st.builds(
        share,
        st.sampled_from([KV, BURST, LONG]),
        st.sampled_from([0.001, 0.25, 3.5]),
        st.sampled_from(["ttft", "e2e"]),
        st.sampled_from(["chat", "long"]),
    ),
    min_size=1,
    max_size=5,
    unique_by=lambda each: (each.objective, each.limit, each.cause),
)
EXPLAINED = st.tuples(st.integers(0, 3), SHARES)


def _top(shares: Sequence[CauseShare]) -> Cause:
    """As the contract has it: of the objective that was exceeded most, the longest cause."""
    of: dict[str, list[CauseShare]] = {}
    for each in shares:
        of.setdefault(each.objective, []).append(each)
    worst = max(of.values(), key=lambda them: sum(each.excess_s or 0.0 for each in them))
    seconds = [
        sum(each.excess_s or 0.0 for each in worst if each.cause == one.cause) for one in worst
    ]
    return worst[seconds.index(max(seconds))].cause


@pytest.mark.slow
@on_a_database
@given(batches=st.lists(st.lists(EXPLAINED, max_size=4), max_size=4))
def test_rollups_of_causes_equal_a_count_of_the_rows(
    sqlite: Engine, batches: list[list[tuple[int, list[CauseShare]]]]
) -> None:
    empty(sqlite)
    seen = [missed(n, ended_at=NOON + 45 * n, tenant=f"tenant-{n % 2}") for n in range(4)]
    store(sqlite, seen)
    for batch in batches:
        items = [explained(seen[n], *shares, top=_top(shares)) for n, shares in batch]
        explain(sqlite, *items)
    assert summed_causes(sqlite) == causes_of_rows(sqlite)
    before = summed_causes(sqlite)
    with for_writing(sqlite).begin() as connection:
        rebuild_rollups(connection, "agent-0", NOON // DAY_S * DAY_S, (NOON // DAY_S + 1) * DAY_S)
    assert summed_causes(sqlite) == before


@pytest.mark.parametrize(
    ("first", "late"),
    [(proxy_view(1), engine_view(1)), (engine_view(1, ttft_s=0.3), proxy_view(1))],
    ids=["the engine's", "the proxy's"],
)
def test_a_view_that_comes_late_takes_the_explanation_back(
    sqlite: Engine, first: JudgedRequest, late: JudgedRequest
) -> None:
    """The first view was counted, explained and priced; joined, the request is another one."""
    agent = JoiningAgent(sqlite)
    agent.take(first)
    agent.settle(DUE)
    (alone,) = unexplained(sqlite)
    assert explain(sqlite, explained(alone, share(BURST, 0.1)))
    cost = RequestCost(1, str(first.record.vantage), complete=True, cost_usd=0.5)
    MinuteStore(sqlite, "agent-0").write((), [cost], NOON)
    assert rows(sqlite)[0]["priced_at"] == NOON
    assert summed_causes(sqlite) != {}
    agent.take(late)
    assert summed_causes(sqlite) == {}
    (row,) = rows(sqlite)
    assert (row["vantage"], row["cause"], row["explanation"]) == ("joined", None, None)
    assert row["priced_at"] is None
    (both,) = unexplained(sqlite)
    assert both.record.queue_s is not None
    # It was in the counters before.
    assert explain(sqlite, explained(both, share(KV, 0.1)), at=NOON + 99) == []
    assert summed_causes(sqlite) == causes_of_rows(sqlite) != {}
    assert rows(sqlite)[0]["explained_at"] == NOON + 60
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_a_span_that_becomes_a_part_of_a_request_loses_its_explanation(sqlite: Engine) -> None:
    agent = JoiningAgent(sqlite)
    agent.take(engine_view(1, 1, ttft_s=0.3), engine_view(1, 2, ttft_s=0.3))
    agent.settle(DUE)
    for judged in unexplained(sqlite):
        assert explain(sqlite, explained(judged, share(BURST, 0.1)))
    agent.take(proxy_view(1))
    assert summed_causes(sqlite) == {}
    assert [row["cause"] for row in rows(sqlite)] == [None, None]
    assert sorted(row["counted"] for row in rows(sqlite)) == [False, True]


def test_an_explanation_of_a_request_that_was_joined_meanwhile_is_left_out(
    sqlite: Engine,
) -> None:
    agent = JoiningAgent(sqlite)
    agent.take(engine_view(1, ttft_s=0.3))
    agent.settle(DUE)
    (alone,) = unexplained(sqlite)
    agent.take(proxy_view(1))
    assert explain(sqlite, explained(alone, share(BURST, 0.1))) == []
    assert summed_causes(sqlite) == {}
    assert len(unexplained(sqlite)) == 1


@pytest.mark.parametrize("row", [[], [request(1)]], ids=["no row", "a request that met"])
def test_what_is_no_missed_request_is_not_explained(
    sqlite: Engine, row: list[JudgedRequest]
) -> None:
    store(sqlite, row)
    assert explain(sqlite, explained(missed(1), share(KV, 1.0))) == []
    assert summed_causes(sqlite) == {}


def test_evidence_is_bounded(sqlite: Engine) -> None:
    store(sqlite, [missed(1)])
    long = replace(share(KV, 1.0), evidence=("e" * 5000,) * 100)
    explain(sqlite, explained(missed(1), long))
    (stored,) = json.loads(rows(sqlite)[0]["explanation"])["shares"]
    assert stored["evidence"] == ["e" * MAX_CHARACTERS] * MAX_SENTENCES


def test_requests_of_slices_before_a_failure_are_returned_once(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who counts them would else never count them."""
    monkeypatch.setattr(explanations, "REQUESTS_PER_SLICE", 3)
    writes: list[object] = []

    def fails_second(engine: Engine, work: Callable[[Connection], Any]) -> Any:
        writes.append(work)
        if len(writes) == 2:
            raise StoreUnavailable("away")
        return in_transaction(engine, work)

    monkeypatch.setattr(explanations, "in_transaction", fails_second)
    items = [explained(missed(n), share(KV, 0.5)) for n in range(8)]
    store(sqlite, [item.judged for item in items])
    assert len(explain(sqlite, *items)) == 3
    assert len(explain(sqlite, *items)) == 5
    assert summed_causes(sqlite)[10, NOON, "", "chat", "ttft", "kv_pressure"] == [8, 8, 4.0]


@pytest.mark.slow
def test_explaining_joining_and_folding_at_once_lose_nothing(sqlite: Engine) -> None:
    """The views of engines come late, while others explain what the proxy alone saw."""
    agent, count = JoiningAgent(sqlite), 60
    agent.take(*(proxy_view(n, tenant=f"t-{n % 3}") for n in range(count)))
    agent.settle(DUE)

    def explain_all() -> None:
        while judged := unexplained(sqlite):
            explain(sqlite, *(explained(each, share(KV, 0.25)) for each in judged))

    def join_late(part: int) -> None:
        for n in range(part, count, 2):
            agent.take(engine_view(n))

    with ThreadPoolExecutor() as threads:
        runs = [threads.submit(explain_all) for _ in range(2)]
        runs += [threads.submit(join_late, part) for part in range(2)]
        for _ in range(5):
            fold(sqlite)
        for run in runs:
            run.result()
    explain_all()
    assert summed_causes(sqlite) == causes_of_rows(sqlite) != {}
    assert {row["cause"] for row in rows(sqlite)} == {"kv_pressure"}
    assert counted_rollups(sqlite) == counted_rows(sqlite)


def test_new_tenants_beyond_the_limit_are_other(sqlite: Engine) -> None:
    few = ExplanationStore(sqlite, "agent-0", max_series=2)
    items = [explained(missed(n, tenant=f"t-{n}"), share(KV, 1.0)) for n in range(4)]
    store(sqlite, [item.judged for item in items])
    few.explain(items, NOON)
    of_hour = {key[2]: sums for key, sums in summed_causes(sqlite).items() if key[0] == 60}
    assert of_hour == {"t-0": [1, 1, 1.0], "t-1": [1, 1, 1.0], "other": [2, 2, 2.0]}
    few.explain([explained(items[3].judged, share(BURST, 1.0))], NOON)
    of_other = {
        key[-1]: sums
        for key, sums in summed_causes(sqlite).items()
        if key[:3] == (60, NOON, "other")
    }
    assert of_other == {"kv_pressure": [1, 1, 1.0], "burst": [1, 1, 1.0]}


def test_explanations_expire_with_their_requests_and_sums_with_their_rollups(
    sqlite: Engine,
) -> None:
    item = explained(missed(1), share(KV, 1.0))
    store(sqlite, [item.judged])
    explain(sqlite, item)
    Retention(sqlite).expire(NOON + DAY_S, NOON - 400 * DAY_S, NOON + 60)
    assert rows(sqlite) == []
    assert {place[0] for place in summed_causes(sqlite)} == {10, 60, 3600, DAY_S}
    Retention(sqlite).expire(NOON + 60, NOON - 400 * DAY_S, NOON + 3 * DAY_S)
    assert {place[0] for place in summed_causes(sqlite)} == {3600, DAY_S}
    Retention(sqlite).expire(NOON + 60, NOON + 2 * DAY_S, NOON + 3 * DAY_S)
    assert (rows_in(sqlite, cause_rollups), rows_in(sqlite, rollup_series)) == (0, 0)


def test_a_series_stays_while_only_sums_of_causes_have_it(sqlite: Engine) -> None:
    """Explained before its changes are folded, a request has no other rollup."""
    item = explained(missed(1), share(KV, 1.0))
    store(sqlite, [item.judged])
    explain(sqlite, item)
    with sqlite.begin() as connection:
        connection.execute(text("DELETE FROM rollup_changes"))
    Retention(sqlite).expire(0, 0, NOON + 60)
    assert summed_causes(sqlite) == causes_of_rows(sqlite) != {}


@pytest.mark.parametrize("change", ["verdicts = 'no JSON'", "status = 'no status'"])
def test_a_row_that_cannot_be_read_is_set_aside_and_the_others_are_found(
    sqlite: Engine, change: str
) -> None:
    store(sqlite, [missed(n, ended_at=NOON + n) for n in range(5)])
    spoil(sqlite, change, missed(2).record.span_id)
    set_aside: list[int] = []
    keeper = ExplanationStore(sqlite, "agent-0", on_set_aside=set_aside.append)
    assert numbers(keeper.unexplained(NOON - 10, NOON + 10)) == [0, 1, 3, 4]
    assert len(set_aside) == 1
    assert [row["cause"] for row in rows(sqlite)].count("unexplained") == 1
    # It comes up no more, so that it takes no other's place.
    assert numbers(keeper.unexplained(NOON - 10, NOON + 10, 2)) == [0, 1]
    assert len(set_aside) == 1


def test_a_time_that_cannot_be_read_stops_no_other_row(sqlite: Engine) -> None:
    store(sqlite, [missed(n, ended_at=NOON + n) for n in range(3)])
    spoil(sqlite, "started_at = 'yesterday'", missed(1).record.span_id)
    assert numbers(unexplained(sqlite)) == [0, 2]
