from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from sqlalchemy import Engine

from agent.catalog.definitions import Verdict
from agent.records.event import Confidence, EventKind
from agent.records.objective import JudgedRequest, Judgement
from agent.records.queries import PageOf, RequestFilter, Selection
from agent.records.request import Status
from agent.store.observations import ObservationStore
from agent.store.store_queries import Row, StoreQueries
from tests.store.making import (
    NOON,
    judgement,
    key_of,
    keys_of,
    pages,
    request,
    restart,
    some,
    store_in,
)

MICROSECOND = 1e-6


def ids(page: PageOf[Row]) -> list[str]:
    return [row["request_id"] for row in page.items]


def found(queries: StoreQueries, **given: Any) -> set[str]:
    selection = {
        name: given.pop(name)
        for name in ("engine", "model", "tenant", "objective")
        if name in given
    }
    chosen = RequestFilter(selection=Selection(**selection), **given)
    return set(ids(queries.requests(chosen, None, 1000)))


def test_an_empty_database_gives_an_empty_page(queries: StoreQueries) -> None:
    assert queries.requests(RequestFilter(), None, 10) == PageOf((), None)
    assert queries.events(None, 10) == PageOf((), None)
    assert queries.request("request-1") == []
    assert queries.objectives_in_force() == []
    assert queries.newest_gpu_samples(NOON) == []
    assert queries.gpu_samples("GPU-1", 0.0, NOON, None, 10) == PageOf((), None)
    assert not queries.knows_gpu("GPU-1")


FILTERED: Sequence[JudgedRequest] = (
    request(1, engine="chat-0", model="llama", tenant="acme", ttft_s=0.1, tpot_s=0.01, e2e_s=1.0),
    request(2, engine="chat-1", model="Llama", tenant="ACME", ttft_s=0.2, tpot_s=0.02, e2e_s=2.0),
    request(3, engine="chat-1", model="llama", tenant=None, status=Status.ERROR),
    request(4, engine=None, model=None, tenant="a%", started_at=NOON + 10.5),
)


FILTERS: Sequence[tuple[dict[str, Any], set[int]]] = (
    ({}, {1, 2, 3, 4}),
    ({"engine": "chat-1"}, {2, 3}),
    ({"model": "llama"}, {1, 3}),
    ({"tenant": "acme"}, {1}),
    ({"tenant": "a%"}, {4}),
    ({"tenant": ""}, set()),
    ({"engine": "chat-1", "model": "llama"}, {3}),
    ({"status": "error"}, {3}),
    ({"min_ttft_s": 0.2}, {2}),
    ({"min_tpot_s": 0.01}, {1, 2}),
    ({"min_e2e_s": 1.5}, {2}),
    ({"min_e2e_s": 0.0}, {1, 2}),
    ({"started_from": NOON + 10.5}, {4}),
    ({"started_from": NOON + 10.5 + MICROSECOND}, set()),
    ({"started_until": NOON + 10.5}, {1, 2, 3}),
    ({"started_until": NOON + 10.5 + MICROSECOND}, {1, 2, 3, 4}),
    ({"started_from": NOON + 0.25, "started_until": NOON + 0.25}, set()),
    ({"tenant": "x' OR '1'='1"}, set()),
)


def test_a_filter_selects_the_rows_that_match(database: Engine, queries: StoreQueries) -> None:
    store_in(database, FILTERED)
    for given, numbers in FILTERS:
        assert found(queries, **given) == {f"request-{n}" for n in numbers}, given


OBJECTIVES = ("chat", "chat-2", "Chat", "c_at", "cha%", "ch", "met", "größe", "2", 'quo"te', "a\\b")


def test_a_filter_by_verdict_uses_the_objective_of_the_query(
    database: Engine, queries: StoreQueries
) -> None:
    """Names that start alike, differ in case or contain wildcards match only themselves."""
    verdicts = (Verdict.MET, Verdict.MISSED)
    store_in(
        database,
        [
            request(2 * n + m, judgement(Verdict.UNDETERMINED, **{name: verdict}), request_id=name)
            for n, name in enumerate(OBJECTIVES)
            for m, verdict in enumerate(verdicts)
        ],
    )
    for name in OBJECTIVES:
        assert found(queries, objective=name) == {name}
        for verdict in verdicts:
            assert found(queries, objective=name, verdict=str(verdict)) == {name}
        assert found(queries, objective=name, verdict="undetermined") == set()
    for name in ("c%", "_hat", "hat", "missed", "", '"', "chat-"):
        assert found(queries, objective=name) == set(), name


def test_a_filter_by_verdict_without_an_objective_uses_the_requests_verdict(
    database: Engine, queries: StoreQueries
) -> None:
    mixed = judgement(Verdict.MISSED, chat=Verdict.MET, batch=Verdict.MISSED)
    store_in(
        database,
        [request(1, mixed), request(2), request(3, Judgement(Verdict.UNDETERMINED, ()))],
    )
    assert found(queries, verdict="missed") == {"request-1"}
    assert found(queries, verdict="met") == {"request-2"}
    assert found(queries, verdict="undetermined") == {"request-3"}
    assert found(queries, objective="chat", verdict="met") == {"request-1", "request-2"}
    assert found(queries, objective="batch", verdict="missed") == {"request-1"}
    assert found(queries, objective="batch", verdict="met") == set()


def pages_of(queries: StoreQueries, limit: int) -> Iterator[PageOf[Row]]:
    return pages(lambda cursor: queries.requests(RequestFilter(), cursor, limit))


@pytest.mark.parametrize("limit", [1, 4, 20, 21, 100])
def test_pages_contain_every_row_once_also_with_equal_start_times(
    database: Engine, queries: StoreQueries, limit: int
) -> None:
    times = [NOON, NOON + MICROSECOND, NOON + 1.5]
    store_in(database, [request(n, started_at=times[n % 3]) for n in range(20)])
    read = [row for page in pages_of(queries, limit) for row in page.items]
    assert sorted((row["trace_id"], row["span_id"]) for row in read) == keys_of(some(range(20)))
    places = [(row["started_at"], row["id"]) for row in read]
    assert places == sorted(places, reverse=True)
    assert len(list(pages_of(queries, limit))) == -(-20 // limit)


def test_pages_contain_every_row_once_while_others_are_stored(
    database: Engine, queries: StoreQueries
) -> None:
    store_in(database, [request(n, started_at=NOON + n // 4) for n in range(20)])
    read: list[str] = []
    for number, page in enumerate(pages_of(queries, 3)):
        read += [row["trace_id"] for row in page.items]
        if number < 6:
            latest = page.items[-1]["started_at"]
            # Newer than all, as old as the last one of the page, and older than all.
            times = enumerate((NOON + 100, latest, NOON - 100))
            store_in(database, [request(1000 + 10 * number + m, started_at=at) for m, at in times])
    assert len(read) == len(set(read))
    assert set(read) >= {trace_id for trace_id, _ in keys_of(some(range(20)))}
    newer = {trace_id for trace_id, _ in keys_of(some(1000 + 10 * n for n in range(6)))}
    assert newer.isdisjoint(read)


def test_every_span_of_a_request_id_is_found_newest_first(
    database: Engine, queries: StoreQueries
) -> None:
    store_in(
        database,
        [request(n, request_id="twice", started_at=NOON + at) for n, at in enumerate((1, 3, 2))],
    )
    store_in(database, [request(9, request_id="Twice"), request(10, request_id="twice-2")])
    spans = [row["trace_id"] for row in queries.request("twice")]
    assert spans == [key_of(request(n))[0] for n in (1, 2, 0)]
    assert queries.request("twic%") == []


def test_an_event_is_read_as_it_was_written(database: Engine, queries: StoreQueries) -> None:
    evidence = {"process_started_at": NOON - 0.5, "größe": "🦙\0", "unknown": None}
    ObservationStore(database, "agent-0").write_event(
        restart(NOON + 0.123456, engine=None, gpu="GPU-1", evidence=evidence)
    )
    (row,) = queries.events(None, 10).items
    assert {name: row[name] for name in row if name not in ("id", "changed")} == {
        "at": NOON + 0.123456,
        "agent": "agent-0",
        "engine": None,
        "gpu": "GPU-1",
        "kind": "RESTART",
        "confidence": "certain",
        "evidence": evidence,
    }


def test_events_are_chosen_by_engine_and_kind_and_come_in_pages(
    database: Engine, queries: StoreQueries
) -> None:
    observations = ObservationStore(database, "agent-0")
    for n in range(6):
        observations.write_event(restart(NOON + n // 2, evidence={"n": n}))
    observations.write_event(restart(NOON, engine="chat-1"))
    observations.write_event(restart(NOON, kind=EventKind.UNREACHABLE))
    found = pages(lambda cursor: queries.events(cursor, 2, engine="chat-0", kind="RESTART"))
    read = [row["evidence"]["n"] for page in found for row in page.items]
    assert read == [5, 4, 3, 2, 1, 0]
    assert len(queries.events(None, 10).items) == 8


EVENT_FILTERS: Sequence[tuple[dict[str, Any], list[int]]] = (
    ({}, [4, 3, 2, 1]),
    ({"engine": "chat-1"}, [4, 2]),
    ({"gpu": "GPU-1"}, [3, 2]),
    ({"gpu": "GPU-"}, []),
    ({"kind": "GPU_FAULT"}, [4, 3]),
    ({"confidence": "suspected"}, [2]),
    ({"engine": "chat-1", "gpu": "GPU-1"}, [2]),
    ({"kind": "RESTART", "confidence": "certain"}, [1]),
)


def test_events_are_chosen_by_engine_gpu_kind_and_confidence(
    database: Engine, queries: StoreQueries
) -> None:
    observations = ObservationStore(database, "agent-0")
    fault, suspected = EventKind.GPU_FAULT, Confidence.SUSPECTED
    for event_ in (
        restart(NOON + 1),
        restart(NOON + 2, engine="chat-1", gpu="GPU-1", confidence=suspected),
        restart(NOON + 3, engine=None, gpu="GPU-1", kind=fault),
        restart(NOON + 4, engine="chat-1", gpu="GPU-2", kind=fault),
    ):
        observations.write_event(event_)
    for given, seconds in EVENT_FILTERS:
        rows = queries.events(None, 10, **given).items
        assert [row["at"] - NOON for row in rows] == seconds, given
