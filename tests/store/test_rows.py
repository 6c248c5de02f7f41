from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, get_args, get_type_hints

from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, select, text

from agent.catalog.definitions import Verdict
from agent.records.queries import RequestFilter
from agent.records.request import EngineView, ProxyView, RequestRecord, Status, Vantage
from agent.store.connection import open_engine
from agent.store.rows import judged_from, sqlite_timestamp
from agent.store.store_queries import StoreQueries
from agent.store.tables import requests
from tests.store.making import judgement, only_row, request, store, store_in
from tests.store.test_rollups import on_a_database

# Nanoseconds of a span times 1e-9, as the OTLP reader converts times.
TIMES = st.integers(1, 4_102_444_800_000_000_000).map(lambda ns: ns * 1e-9)
NEAR_A_MICROSECOND = st.tuples(st.integers(0, 2**31), st.integers(0, 2_000_000)).map(
    lambda pair: pair[0] + pair[1] / 2_000_000
)

# In Berlin summer time began half an hour before.
SUMMER_TIME_BEGINS = datetime(2026, 3, 29, 1, 30, tzinfo=UTC)

UNKNOWN_AT_FIRST = [
    name
    for name in RequestRecord._fields
    if RequestRecord._field_defaults.get(name, 0) is None and name not in ("proxied", "engine_view")
]
VIEW_COLUMNS = (
    *ProxyView._fields,
    *(name if name == "holdback_s" else f"engine_{name}" for name in EngineView._fields),
)


@given(st.one_of(TIMES, NEAR_A_MICROSECOND))
def test_the_file_and_every_query_round_a_time_alike(at: float) -> None:
    stored_text = datetime.strptime(sqlite_timestamp(at), "%Y-%m-%d %H:%M:%S.%f").replace(
        tzinfo=UTC
    )
    assert stored_text == datetime.fromtimestamp(at, UTC)


@on_a_database
@given(at=st.one_of(TIMES, NEAR_A_MICROSECOND))
def test_a_time_is_read_to_the_microsecond_and_found_by_its_own_value(
    sqlite: Engine, at: float
) -> None:
    with sqlite.begin() as connection:
        connection.execute(text("DELETE FROM requests"))
    store(sqlite, [request(1, started_at=at, ended_at=at, received_at=at)])
    row = only_row(sqlite)
    assert row["started_at"] == row["ended_at"] == row["received_at"]
    assert abs(row["started_at"] - at) <= 0.75e-6  # half a microsecond, and the error of a float
    for time in (at, row["started_at"]):
        wanted = RequestFilter(started_from=time, started_until=time + 1e-5)
        assert len(StoreQueries(sqlite).requests(wanted, None, 10).items) == 1


def test_times_are_stored_in_utc(sqlite: Engine) -> None:
    store(sqlite, [request(1, started_at=SUMMER_TIME_BEGINS.timestamp())])
    with sqlite.connect() as connection:
        stored_text = connection.execute(text("SELECT started_at FROM requests")).scalar_one()
    assert stored_text == "2026-03-29 01:30:00.000000"


def test_a_session_in_another_time_zone_reads_and_finds_the_same_times(
    emptied_postgres_url: str, postgres: Engine
) -> None:
    engine = open_engine(f"{emptied_postgres_url}?options=-ctimezone%3DEurope/Berlin")
    with engine.connect() as connection:
        assert connection.execute(text("SHOW timezone")).scalar_one() == "Europe/Berlin"
    at = SUMMER_TIME_BEGINS.timestamp()
    store_in(engine, [request(1, started_at=at)])
    wanted = RequestFilter(started_from=at, started_until=at + 1)
    for each in (engine, postgres):
        (row,) = StoreQueries(each).requests(wanted, None, 10).items
        assert row["started_at"] == at
    engine.dispose()


def test_unknown_values_are_read_as_none(sqlite: Engine) -> None:
    unknown: dict[str, Any] = dict.fromkeys(UNKNOWN_AT_FIRST)
    store(sqlite, [request(1, **unknown | {"request_id": "request-1"})])
    row = only_row(sqlite)
    names = (*UNKNOWN_AT_FIRST, *VIEW_COLUMNS, "settles_at")
    assert {name for name in names if row[name] is not None} == {"request_id"}
    assert row["counted"] is True


def known(kind: type, names: Iterable[str]) -> dict[str, Any]:
    """A value of its own for each field."""
    hints = get_type_hints(kind)
    return {name: _known(hints[name], place) for place, name in enumerate(names)}


def _known(hint: Any, place: int) -> Any:
    kind, *_ = get_args(hint) or (hint,)
    numbers = {int: 2**40 + place, float: place + 1 / 3, bool: False}
    texts = {str: f"größe {place}", Status: Status.ERROR}
    return {**numbers, **texts}.get(kind, {-320: 3, 0: 1, 12: 2**40})


def test_known_values_are_read_as_written(sqlite: Engine) -> None:
    everything = known(RequestRecord, UNKNOWN_AT_FIRST) | {"request_id": "request-1"}
    proxied = known(ProxyView, ProxyView._fields)
    seen = known(EngineView, EngineView._fields)
    judged = judgement(Verdict.MISSED, chat=Verdict.MET, batch=Verdict.UNDETERMINED)
    values: dict[str, Any] = {"vantage": Vantage.JOINED, "status": Status.THROTTLED}
    values["proxied"] = ProxyView(**proxied)
    values["engine_view"] = EngineView(**seen)
    stored = request(1, judged, **everything, **values)
    store(sqlite, [stored])
    row = only_row(sqlite)
    assert {name: row[name] for name in everything} == everything
    assert {name: row[name] for name in VIEW_COLUMNS} == dict(
        zip(VIEW_COLUMNS, (*proxied.values(), *seen.values()), strict=True)
    )
    assert (row["vantage"], row["status"], row["verdict"]) == ("joined", "throttled", "missed")
    assert row["verdicts"] == {"chat": "met", "batch": "undetermined"}
    assert (row["trace_id"], row["span_id"]) == (f"{1:032x}", f"{1:016x}")

    with sqlite.connect() as connection:
        (raw,) = connection.execute(select(requests)).mappings()
    read_back = judged_from({str(name): value for name, value in raw.items()})
    assert read_back.record == stored.record
    assert read_back.judgement.verdict is judged.verdict
    assert read_back.judgement.by_objective == judged.by_objective
