"""Minutes of engines: their rows, the requests that they are computed from, and their sums."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Engine

from agent.analysis.cost.bill import spending
from agent.analysis.efficiency.window_efficiency import window_efficiency
from agent.catalog.definitions import Verdict
from agent.outputs.api.efficiency_routes import ledger_of
from agent.records.minute import Ledger, MinuteRow, RequestCost
from agent.records.queries import Selection, Window
from agent.records.request import ProxyView, Status, Vantage
from agent.store import minute_sums, minutes
from agent.store.minute_sums import MINUTES_KEPT_S, MinuteQueries, merge_minutes
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from agent.store.rollups import KEEP_S
from agent.store.tables import engine_minutes
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.records.columns import minute_requests
from tests.records.minutes import UNKNOWN, minute
from tests.store.making import NOON, engine_sample, judgement, request, store
from tests.store.test_folding import rows_in
from tests.store.test_retention import commits_of


def test_a_minute_is_read_as_it_was_written(sqlite: Engine) -> None:
    minute_store = MinuteStore(sqlite, "agent-0")
    expected = [minute(0, disagreements=({"figure": "mfu"},)), minute(1, **UNKNOWN)]
    minute_store.write(expected, (), NOON)
    assert minute_store.between("chat-0", expected[0].from_at, expected[1].until) == expected
    assert minute_store.newest("chat-0") == expected[1]
    assert MinuteStore(sqlite, "agent-1").newest("chat-0") is None


def test_a_minute_that_is_written_again_replaces_the_old_one(sqlite: Engine) -> None:
    minute_store = MinuteStore(sqlite, "agent-0")
    minute_store.write([minute(0), minute(1)], (), NOON)
    minute_store.write([minute(0, requests=11)], (), NOON)
    stored = minute_store.between("chat-0", NOON - 60, NOON + 120)
    assert [each.requests for each in stored] == [11, 10]


def test_old_minutes_are_deleted(database: Engine) -> None:
    minute_store = MinuteStore(database, "agent-0")
    minute_store.write([minute(0), minute(1)], (), NOON)
    assert minute_store.expire(minute(1).starts_at) == 1
    assert minute_store.newest("chat-0") == minute(1)


def test_the_newest_sample_is_that_of_the_engine_and_the_agent(sqlite: Engine) -> None:
    facts = {("llm_engine_process_start_time_seconds", ()): 500.0, ("of", ("a", "b")): 2.0}
    for agent, engine, at in (
        ("a", "chat", 1.0),
        ("a", "chat", 2.0),
        ("a", "x", 3.0),
        ("b", "chat", 4.0),
    ):
        ObservationStore(sqlite, agent).write_engine_sample(
            engine_sample(NOON + at, engine=engine, facts=facts)
        )
    newest = MinuteStore(sqlite, "a").newest_sample("chat", NOON + 60)
    assert newest is not None
    found = (newest.at, newest.dialect, newest.model, newest.facts)
    assert found == (NOON + 2.0, "vllm", "llama", facts)
    assert newest.process_started_at == 500.0
    assert MinuteStore(sqlite, "c").newest_sample("chat", NOON + 60) is None


def test_a_sample_of_a_clock_that_was_ahead_is_not_the_newest(sqlite: Engine) -> None:
    for at in (NOON, NOON + 3600):
        ObservationStore(sqlite, "a").write_engine_sample(engine_sample(at, engine="chat"))
    newest = MinuteStore(sqlite, "a").newest_sample("chat", NOON + 60)
    assert newest is not None
    assert newest.at == NOON


def test_a_request_that_changed_meanwhile_gets_its_share_the_next_time(sqlite: Engine) -> None:
    """A row that was read as an engine's view has become a joined one."""
    minutes = Minutes(sqlite, PRICE)
    minutes.take(timed_request(1, 10.0, 20.0))
    (row,) = minutes.rows()
    share = RequestCost(row=row["id"], vantage="joined", complete=True, cost_usd=1.0)
    minutes.store.write((), [share], NOON)
    assert minutes.rows()[0]["priced_at"] is None
    assert minutes.costs() == [None]


PROXIED = ProxyView(choices=3)
FACTS = {
    **{"ttft_s": 0.1, "queue_s": 0.01, "prefill_s": 0.09, "decode_s": 0.4},
    **{"input_tokens": 100, "cached_tokens": 7, "output_tokens": 21, "finish_reason": "stop"},
}
BOTH = judgement(Verdict.MET, chat=Verdict.MET, batch=Verdict.MET)
ONE = judgement(Verdict.MISSED, chat=Verdict.MISSED, batch=Verdict.MET)
REQUESTS = [
    request(1, BOTH, **FACTS),
    request(2, ONE, vantage=Vantage.PROXY, proxied=PROXIED, route="/v1/chat/completions"),
    request(3, ONE, status=Status.CANCELLED, finish_reason="abort", output_tokens=0),
]


@pytest.mark.parametrize("at_once", [1, 4096])
def test_columns_have_the_values_of_rows(
    sqlite: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minutes, "ROWS_PER_READ", at_once)
    store(sqlite, REQUESTS)
    found = MinuteStore(sqlite, "agent-0").requests("chat-0", NOON, NOON + 60)
    expected = minute_requests([each.record for each in REQUESTS])
    for field in fields(found):
        if field.name not in ("rows", "met", "verdicts", "met_objectives"):
            columns = getattr(found, field.name), getattr(expected, field.name)
            np.testing.assert_array_equal(*columns, err_msg=field.name)
    assert np.isnan(found.ttft_s).tolist() == [False, True, True]
    assert (found.rows[1:] > found.rows[:-1]).all()
    assert found.met.tolist() == [True, False, False]
    met = [found.met_objectives[place] for place in found.verdicts.tolist()]
    assert met == [("chat", "batch"), ("batch",), ("batch",)]


def test_only_requests_that_reach_beyond_a_time_are_across_it(sqlite: Engine) -> None:
    times = [(0.0, 10.0), (5.0, 15.0), (12.0, 18.0), (12.0, 25.0), (30.0, 40.0)]
    store(
        sqlite,
        [
            request(number, started_at=NOON + from_at, ended_at=NOON + until)
            for number, (from_at, until) in enumerate(times)
        ],
    )
    found = MinuteStore(sqlite, "agent-0").requests_across("chat-0", NOON + 10, NOON + 20)
    assert (found.started_at - NOON).tolist() == [0, 5, 12]
    assert (found.ended_at - NOON).tolist() == [10, 15, 25]


def test_no_requests_are_empty_columns(sqlite: Engine) -> None:
    found = MinuteStore(sqlite, "agent-0").requests("chat-0", NOON, NOON + 60)
    assert {getattr(found, field.name).shape for field in fields(found)[:-1]} == {(0,)}
    assert found.met_objectives == ()


HOURS_KEPT_S = KEEP_S[3600]

LEDGER = Ledger(
    input_tokens=300.0, output_tokens=50.0, requests=5.0, finished=4.0, refused=1.0,
    row_input_tokens=100.0, row_output_tokens=20.0, row_requests=3.0, row_finished=3.0,
)  # fmt: skip
CLOSED = {"ledger": LEDGER, "ledger_closed": True, "unmatched": 0.0}
FEWER = CLOSED | {"ledger": replace(LEDGER, row_requests=4.0, row_finished=3.0), "requests": 3}
# Each kind of minute differs from the one before.
KINDS: Sequence[dict[str, Any]] = (
    CLOSED,
    {"busy_s": 10.0, "idle_s": 20.0, "unknown_s": 30.0, "decode_flops": 700.0, **FEWER},
    {"model": "qwen", "peak_flops_per_s": 1000.0, "peak_bytes_per_s": 20.0},
    UNKNOWN,
    {
        "ledger": LEDGER,
        "ledger_closed": False,
        "gpus": 2,
        "engine_mfu": 0.3,
        "hardware_mbu": 0.5,
        "hardware_mfu": 0.4,
    },
    {"prefill_s": None, "method": "tokens", "joules": None},
    {"gpus_usd": None, "ledger": replace(LEDGER, finished=None), "ledger_closed": True},
    {"electricity_usd": None, "steps": "estimated"},
    {"cache_full_s": 40.0, "good_tokens_by_objective": {"chat": 5, "long": 2}},
    {"engine_mfu": 0.1, "good_tokens_by_objective": {"chat": 4}},
    {"preemptions": 2.0, "draft_tokens": 20.0, "accepted_draft_tokens": 12.0},
    {"drafts": 7.0, "prefix_query_tokens": 100.0, "prefix_hit_tokens": 40.0},
)

ALL = Window(from_s=NOON - 86400, until=NOON + 10 * 86400)


def mixed(count: int) -> list[MinuteRow]:
    """Minutes of each kind in turn, with gaps; the last two have disagreements."""
    minutes = [
        minute(number, engine=f"chat-{number % 2}", **KINDS[number % len(KINDS)])
        for number in range(count)
        if number % 13
    ]
    last = max(each.starts_at for each in minutes)
    odd = {"figure": "mfu", "cause": "unknown"}
    return [
        *minutes,
        *(
            minute(int(last - NOON // 60 * 60) // 60 + 1, engine=engine, disagreements=(odd,))
            for engine in ("chat-0", "chat-1")
        ),
    ]


def store_minutes(engine: Engine, windows: Sequence[MinuteRow], agent: str = "agent-0") -> None:
    MinuteStore(engine, agent).write(windows, (), NOON)


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from flat(each, f"{name}.{key}")
    elif isinstance(value, tuple):
        for place, each in enumerate(value):
            yield from flat(each, f"{name}.{place}")
    else:
        yield name, value


def figures(windows: Sequence[MinuteRow]) -> dict[str, Any]:
    """Every figure of a period: efficiency, spending, the ledger and its times."""
    efficiency = window_efficiency(windows)
    assert efficiency is not None
    ledger = ledger_of(windows)
    nested = {
        "efficiency": asdict(efficiency),
        "spending": asdict(spending(windows)),
        "ledger": None if ledger is None else ledger.model_dump(exclude={"counted_until"}),
    }
    return dict(flat(nested)) | {
        "from_at": min(each.from_at for each in windows),
        "until": max(each.until for each in windows),
    }


def assert_close(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        close = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
        assert actual[name] == close, name


def test_figures_of_a_period_are_the_sums_of_its_minutes(database: Engine) -> None:
    stored = mixed(300)
    store_minutes(database, stored)
    queried = MinuteQueries(database).minutes(ALL, Selection())
    assert len(queried) < 40 < len(stored)
    assert_close(figures(queried), figures(stored))


def test_no_sum_has_minutes_of_two_steps(sqlite: Engine) -> None:
    stored = [minute(number, decode_flops=float(number)) for number in range(20)]
    store_minutes(sqlite, stored)
    over = Window(from_s=stored[0].starts_at, until=stored[-1].until)
    queried = MinuteQueries(sqlite).minutes(over, Selection(), 300)
    sums = [each.work.decode_flops for each in queried]
    # The newest minute comes alone.
    assert sums == [0 + 1 + 2 + 3 + 4, 35.0, 60.0, 15 + 16 + 17 + 18, 19.0]


@pytest.mark.parametrize("chosen", [{"engine": "chat-1"}, {"model": "qwen"}])
def test_only_the_selected_minutes_are_summed(database: Engine, chosen: dict[str, str]) -> None:
    stored = mixed(60)
    store_minutes(database, stored)
    ((name, value),) = chosen.items()
    over = Window(from_s=stored[5].starts_at, until=stored[40].starts_at)
    selected = [each for each in stored[5:40] if getattr(each, name) == value]
    queried = MinuteQueries(database).minutes(over, Selection(**chosen))
    assert_close(figures(queried), figures(selected))


def test_minutes_of_unknown_tokens_by_objective_are_not_merged_with_known_ones(
    sqlite: Engine,
) -> None:
    known = [minute(n, good_tokens_by_objective={"a": 1, "b": n}) for n in (0, 1)]
    store_minutes(sqlite, [*known, *(minute(n, good_tokens_by_objective=None) for n in (2, 3, 4))])
    queried = MinuteQueries(sqlite).minutes(ALL, Selection())
    unknown = [each.good_tokens_by_objective is None for each in queried]
    assert (sum_of(queried, "a", "b"), sum(unknown)) == ({"a": 2, "b": 1}, 2)


def sum_of(windows: Sequence[MinuteRow], *names: str) -> dict[str, float]:
    by_objective = [each.good_tokens_by_objective or {} for each in windows]
    return {name: sum(each.get(name, 0) for each in by_objective) for name in names}


def test_old_minutes_become_hours_with_the_same_figures(database: Engine) -> None:
    stored = mixed(600)
    store_minutes(database, stored)
    before = rows_in(database, engine_minutes)
    hours = merge_minutes(database, "agent-0", NOON + 5 * 3600 + MINUTES_KEPT_S)
    assert hours >= 8
    assert rows_in(database, engine_minutes) < before * 0.75
    assert_close(figures(MinuteQueries(database).minutes(ALL, Selection())), figures(stored))
    assert merge_minutes(database, "agent-0", NOON + 5 * 3600 + MINUTES_KEPT_S) == 0


def test_old_hours_become_days_with_the_same_figures(sqlite: Engine) -> None:
    stored = [minute(60 * hour, **KINDS[hour // 24 % 3]) for hour in range(24 * 8)]
    store_minutes(sqlite, stored)
    merge_minutes(sqlite, "agent-0", NOON + 5 * 86400 + HOURS_KEPT_S)
    assert rows_in(sqlite, engine_minutes) < 24 * 4 + 10
    assert_close(figures(MinuteQueries(sqlite).minutes(ALL, Selection())), figures(stored))


def test_young_minutes_and_minutes_of_other_agents_stay(sqlite: Engine) -> None:
    store_minutes(sqlite, [minute(number) for number in range(120)])
    store_minutes(sqlite, [minute(number) for number in range(120)], "agent-1")
    merge_minutes(sqlite, "agent-0", NOON + 100 * 60 + MINUTES_KEPT_S - 7200)
    assert rows_in(sqlite, engine_minutes) == 240


def test_old_minutes_that_a_late_request_may_change_stay(sqlite: Engine) -> None:
    """For example after a long time without an agent."""
    store_minutes(sqlite, [minute(number) for number in range(240)])
    newest = MinuteStore(sqlite, "agent-0").newest("chat-0")
    merge_minutes(sqlite, "agent-0", NOON + 10 * MINUTES_KEPT_S)
    assert MinuteStore(sqlite, "agent-0").newest("chat-0") == newest
    left = MinuteStore(sqlite, "agent-0").between("chat-0", minute(61).starts_at, 4e9)
    minutes = [each for each in left if each.starts_at > minute(61).starts_at]
    assert len(minutes) == 240 - 62
    assert rows_in(sqlite, engine_minutes) < 240


def test_minutes_are_merged_in_slices_so_that_others_can_commit_between(
    sqlite: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(minute_sums, "MERGES_PER_SLICE", 2)
    store_minutes(sqlite, [minute(number) for number in range(360)])
    with commits_of(sqlite) as commits:
        hours = merge_minutes(sqlite, "agent-0", NOON + 10 * MINUTES_KEPT_S)
    assert hours == 3
    # A full slice, a partial one, and one that finds no days.
    assert len(commits) == 3
