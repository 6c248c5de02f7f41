import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, RowMapping, event, func, select, text

from agent.catalog.definitions import DEFINITIONS, GOODPUT
from agent.errors import StoreUnavailable
from agent.records.engine import EngineSample
from agent.records.event import Confidence, Event, EventKind
from agent.records.objective import Match, Objective
from agent.store import keeping
from agent.store.connection import open_engine
from agent.store.keeping import Keeper
from agent.store.queries import StoreQueries
from agent.store.rollups import KEEP_S
from agent.store.tables import engine_samples, metadata, objectives
from tests.store.making import (
    NOON,
    counted_rollups,
    counted_rows,
    fold,
    gpu_sample,
    keys_of,
    request,
    rollup_bytes,
    some,
    store,
    stored_keys,
)

DAY_S = 86400


@pytest.fixture
def keeper(database: Engine) -> Keeper:
    """What an agent stores beside requests."""
    return Keeper(database, "agent-0")


def sample(at: float) -> EngineSample:
    """A reading at that moment."""
    return EngineSample(engine="chat-0", at=at, dialect="vllm", model=None, facts={})


def restart(at: float) -> Event:
    """An event at that moment."""
    return Event(at=at, engine="chat-0", kind=EventKind.RESTART, confidence=Confidence.CERTAIN)


def engine_readings(engine: Engine) -> Sequence[RowMapping]:
    """What is stored of engines' pages, in the order in which it came."""
    with engine.connect() as connection:
        query = select(engine_samples).order_by(engine_samples.c.id)
        return connection.execute(query).mappings().all()


def counts(engine: Engine) -> dict[str, int]:
    """How many rows each table has."""
    with engine.connect() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one()
            for table in metadata.sorted_tables
        }


@contextmanager
def commits_of(engine: Engine) -> Iterator[list[str]]:
    """How many transactions are committed inside."""
    seen: list[str] = []

    def listen(_connection: object) -> None:
        seen.append("commit")

    event.listen(engine, "commit", listen)
    yield seen
    event.remove(engine, "commit", listen)


def test_old_rows_go_and_young_ones_stay(database: Engine, keeper: Keeper) -> None:
    border = NOON - 7 * DAY_S
    moments = (border - 1000, border - 1e-6, border, border + 1e-6, NOON)
    store(database, [request(n, started_at=at) for n, at in enumerate(moments)])
    for at in moments:
        keeper.keep_sample(sample(at))
    keeper.keep_gpu_samples([gpu_sample(at) for at in moments])
    gone = keeper.expire(requests_before=border, rollups_before=border - 1e9, now=NOON)
    assert gone == 6
    assert stored_keys(database) == keys_of(some([2, 3, 4]))
    assert counts(database)["engine_samples"] == counts(database)["gpu_samples"] == 3


def test_nothing_else_goes(database: Engine, keeper: Keeper) -> None:
    keeper.put_in_force([promise("chat")], NOON - 500 * DAY_S)
    keeper.put_in_force([promise("chat", ttft_s=1.0)], NOON - 450 * DAY_S)
    store(database, some(range(3), started_at=NOON, ended_at=NOON))
    keeper.keep_sample(sample(NOON))
    keeper.keep_gpu_samples([gpu_sample(NOON)])
    keeper.keep_event(restart(NOON))
    before = counts(database)
    assert keeper.expire(NOON, NOON, NOON) == 0
    assert counts(database) == before


def test_many_old_rows_go_slice_by_slice_so_that_the_writer_gets_its_turns(
    database: Engine, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "ROWS_PER_SLICE", 3)
    store(database, some(range(10)))
    store(database, some([100], started_at=NOON + 60))
    fold(database)
    with commits_of(database) as commits:
        assert keeper.expire(NOON + 60, 0, NOON + 60) == 10
    # Three full slices and the rest; one for each other table or width of rollup; series.
    assert len(commits) == 4 + 7 + 2
    assert stored_keys(database) == keys_of(some([100]))


def test_a_full_last_slice_is_no_reason_to_go_on_for_ever(
    database: Engine, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "ROWS_PER_SLICE", 5)
    store(database, some(range(10)))
    assert keeper.expire(NOON + 60, 0, NOON + 60) == 10


def test_rollups_outlive_the_rows_that_they_count(
    database: Engine, keeper: Keeper, queries: StoreQueries
) -> None:
    store(database, some(range(3)))
    before = rollup_bytes(database)
    keeper.expire(requests_before=NOON + 60, rollups_before=NOON - 400 * DAY_S, now=NOON + 60)
    assert counted_rows(database) == {}
    assert rollup_bytes(database) == before


def test_rollups_go_the_sooner_the_narrower_they_are(database: Engine, keeper: Keeper) -> None:
    kept_s = {**KEEP_S, DAY_S: 400 * DAY_S}
    starts = {
        width_s: [
            (NOON - age_s) // width_s * width_s for age_s in (0, keep_s, keep_s + 2 * width_s)
        ]
        for width_s, keep_s in kept_s.items()
    }
    moments = sorted({start for each in starts.values() for start in each})
    store(database, [request(n, ended_at=start) for n, start in enumerate(moments)])
    fold(database)
    keeper.expire(0, rollups_before=NOON - 400 * DAY_S, now=NOON)
    left = {key[:2] for key in rollup_bytes(database)}
    for width_s, (newest, oldest, too_old) in starts.items():
        assert {(width_s, newest), (width_s, oldest)} <= left
        assert (width_s, too_old) not in left
        assert all(start > NOON - kept_s[width_s] - width_s for w, start in left if w == width_s)
    assert len(stored_keys(database)) == len(moments)


def test_no_rollup_is_older_than_what_is_set(database: Engine, keeper: Keeper) -> None:
    store(database, [request(n, ended_at=NOON - n * 600) for n in range(20)])
    fold(database)
    keeper.expire(0, rollups_before=NOON - 3600, now=NOON)
    ends = {start + width_s for width_s, start, *_ in rollup_bytes(database)}
    assert min(ends) > NOON - 3600


def test_a_series_goes_with_its_last_rollup(database: Engine, keeper: Keeper) -> None:
    store(database, [request(1, model="old", ended_at=NOON - 401 * DAY_S), request(2)])
    fold(database)
    assert keeper.expire(0, NOON - 400 * DAY_S, NOON) == 6 + 2
    assert counts(database)["rollup_series"] == 2
    store(database, [request(3, model="old")])
    assert counted_rollups(database)[60, NOON, "agent-0", "chat-0", "old", "", "", "chat"]


def test_changes_that_no_rollup_holds_yet_never_go(database: Engine, keeper: Keeper) -> None:
    store(database, some(range(3)))
    keeper.expire(NOON + 1e6, NOON + 1e6, NOON + 1e6)
    assert counts(database)["rollup_changes"] == 1


@pytest.mark.parametrize("width_s", KEEP_S)
def test_the_longest_window_on_a_grid_is_younger_than_what_goes(
    database: Engine, keeper: Keeper, queries: StoreQueries, width_s: int
) -> None:
    """Also when it is asked for late, and its first rollup began before the window."""
    longest_s = max(
        length_s
        for length_s in range(0, 500 * DAY_S, 21_600)
        if queries.grid_s(length_s) == width_s
    )
    start = (NOON - longest_s) // width_s * width_s
    store(database, [request(1, ended_at=start)])
    fold(database)
    keeper.expire(0, 0, NOON + 3600)
    assert (width_s, start) in {key[:2] for key in rollup_bytes(database)}


def test_events_are_kept_as_long_as_rollups(database: Engine, keeper: Keeper) -> None:
    for at in (NOON - 400 * DAY_S - 1, NOON - 399 * DAY_S, NOON):
        keeper.keep_event(restart(at))
    assert keeper.expire(NOON, NOON - 400 * DAY_S, NOON) == 1
    assert counts(database)["events"] == 2


def test_what_was_let_go_can_be_written_beside(database: Engine, keeper: Keeper) -> None:
    """Letting go and writing at once: neither is refused, and each row is stored once."""
    store(database, some(range(200), started_at=NOON - 1000))
    failures: list[Exception] = []

    def expire() -> None:
        try:
            keeper.expire(NOON - 500, 0, NOON)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=expire)
    thread.start()
    for number in range(1000, 1020):
        store(database, some([number]))
    thread.join()
    assert failures == []
    assert stored_keys(database) == keys_of(some(range(1000, 1020)))


def test_a_figure_that_json_has_no_word_for_is_unknown(
    database: Engine, keeper: Keeper, queries: StoreQueries
) -> None:
    """Engines' pages hold NaN, and what is stored must be JSON to every reader of the database."""
    odd = {"a": float("nan"), "b": float("-inf"), "c": 1.5}
    keeper.keep_event(replace(restart(NOON), evidence=odd))
    facts: dict[tuple[str, tuple[str, ...]], float] = {(name, ()): odd[name] for name in odd}
    keeper.keep_sample(replace(sample(NOON), facts=facts))
    told = {"a": None, "b": None, "c": 1.5}
    (row,) = engine_readings(database)
    assert json.loads(row["facts"]) == told
    assert [row["evidence"] for row in queries.events(None, 10).items] == [told]


def test_a_reading_of_an_engine_is_stored_as_it_was(database: Engine, keeper: Keeper) -> None:
    facts = {("running", ()): 5.0, ("requests", ("stop", "größe")): 7.0}
    keeper.keep_sample(replace(sample(NOON + 0.123456), model="llama", facts=facts))
    keeper.keep_sample(sample(NOON + 1))
    first, second = engine_readings(database)
    assert (first["at"], first["agent"], first["engine"]) == (NOON + 0.123456, "agent-0", "chat-0")
    assert (first["model"], first["dialect"]) == ("llama", "vllm")
    assert json.loads(first["facts"]) == {"running": 5.0, "requests{stop,größe}": 7.0}
    assert (second["at"], second["model"]) == (NOON + 1, None)


def promise(name: str, **given: Any) -> Objective:
    """An objective of that name."""
    facts: dict[str, Any] = {"definition": GOODPUT, "target": 0.95, "window_s": 30 * DAY_S}
    return Objective(name=name, **(facts | given))


def in_force(queries: StoreQueries) -> dict[tuple[str, str], float]:
    """Since when each agent's objectives are in force."""
    rows = queries.objectives_in_force()
    return {(row["agent"], row["name"]): row["in_force_from"] for row in rows}


def history(engine: Engine) -> list[tuple[str, float, float | None]]:
    """Every objective that was ever in force, with from when until when."""
    query = select(objectives.c.name, objectives.c.in_force_from, objectives.c.in_force_until)
    with engine.connect() as connection:
        rows = connection.execute(query.order_by(objectives.c.name, objectives.c.in_force_from))
        return [(row[0], row[1], row[2]) for row in rows]


def test_a_promise_is_told_as_it_was_made(
    database: Engine, keeper: Keeper, queries: StoreQueries
) -> None:
    made = promise(
        "chat",
        definition=DEFINITIONS["vllm"],
        match=Match(model="llama-*", tenant="größe", max_input_tokens=4096),
        ttft_s=0.2,
    )
    keeper.put_in_force([made], NOON + 0.5)
    (row,) = queries.objectives_in_force()
    assert (row["name"], row["agent"], row["in_force_from"]) == ("chat", "agent-0", NOON + 0.5)
    assert row["in_force_until"] is None
    told = row["definition"]
    assert (told["ttft_s"], told["tpot_s"], told["target"]) == (0.2, None, 0.95)
    assert told["match"]["tenant"] == "größe"
    assert told["definition"]["failed"] == "undetermined"


def test_a_restart_changes_nothing(database: Engine, keeper: Keeper, queries: StoreQueries) -> None:
    promised = [promise("chat", ttft_s=0.2), promise("batch")]
    keeper.put_in_force(promised, NOON)
    Keeper(database, "agent-0").put_in_force(promised[::-1], NOON + 60)
    assert in_force(queries) == {("agent-0", "chat"): NOON, ("agent-0", "batch"): NOON}
    assert len(history(database)) == 2


def test_what_was_promised_before_a_change_stays_known(
    database: Engine, keeper: Keeper, queries: StoreQueries
) -> None:
    keeper.put_in_force([promise("chat", ttft_s=0.2), promise("chat-2"), promise("old")], NOON)
    keeper.put_in_force([promise("chat", ttft_s=0.3), promise("chat-2")], NOON + 60)
    assert in_force(queries) == {("agent-0", "chat"): NOON + 60, ("agent-0", "chat-2"): NOON}
    keeper.put_in_force([promise("chat", ttft_s=0.2), promise("chat-2"), promise("old")], NOON + 90)
    assert history(database) == [
        ("chat", NOON, NOON + 60),
        ("chat", NOON + 60, NOON + 90),
        ("chat", NOON + 90, None),
        ("chat-2", NOON, None),
        ("old", NOON, NOON + 60),
        ("old", NOON + 90, None),
    ]


def test_the_promises_of_one_agent_are_not_those_of_another(
    database: Engine, keeper: Keeper, queries: StoreQueries
) -> None:
    other = Keeper(database, "agent-1")
    keeper.put_in_force([promise("chat", ttft_s=0.2)], NOON)
    other.put_in_force([promise("chat", ttft_s=0.4), promise("batch")], NOON + 10)
    keeper.put_in_force([], NOON + 20)
    assert in_force(queries) == {
        ("agent-1", "chat"): NOON + 10,
        ("agent-1", "batch"): NOON + 10,
    }
    assert [row["name"] for row in queries.objectives_in_force()] == ["batch", "chat"]


def test_two_agents_of_one_name_that_start_at_once_promise_once(
    database_url: str, database: Engine, queries: StoreQueries
) -> None:
    engines = [open_engine(database_url) for _ in range(4)]
    together = threading.Barrier(len(engines))
    failures: list[Exception] = []

    def start(engine: Engine) -> None:
        try:
            with engine.connect() as connection:
                connection.execute(text("SELECT 1"))
            together.wait()
            Keeper(engine, "agent-0").put_in_force([promise("chat")], NOON)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=start, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for engine in engines:
        engine.dispose()
    assert failures == []
    assert len(queries.objectives_in_force()) == 1


def test_a_database_without_its_tables_is_told_in_one_line(new_url: str) -> None:
    engine = open_engine(new_url)
    keeper = Keeper(engine, "agent-0")
    for task in (
        lambda: keeper.keep_sample(sample(NOON)),
        lambda: keeper.keep_gpu_samples([gpu_sample(NOON)]),
        lambda: keeper.keep_event(restart(NOON)),
        lambda: keeper.put_in_force([promise("chat")], NOON),
        lambda: keeper.expire(NOON, NOON, NOON),
    ):
        with pytest.raises(StoreUnavailable) as refused:
            task()
        assert "\n" not in str(refused.value)
    engine.dispose()
