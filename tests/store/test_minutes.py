"""Minutes of engines in an agent's file."""

from math import fsum

import pytest
from sqlalchemy import Engine

from agent.records.engine import EngineSample
from agent.records.minute import RequestCost, total
from agent.records.request import Status
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from tests.pipeline.minutes import PRICE, Minutes, timed_request
from tests.records.minutes import UNKNOWN, cost_of, minute
from tests.store.making import NOON


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
    stored = minute_store.between("chat-0", 0.0, 4e9) or minute_store.between(
        "chat-0", NOON - 60, NOON + 120
    )
    assert [each.requests for each in stored] == [11, 10]


def test_old_minutes_are_deleted(database: Engine) -> None:
    """Also in a shared database."""
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
            EngineSample(engine=engine, at=NOON + at, dialect="vllm", model="m", facts=facts)
        )
    newest = MinuteStore(sqlite, "a").newest_sample("chat", NOON + 60)
    assert newest is not None
    assert (newest.at, newest.dialect, newest.facts) == (NOON + 2.0, "vllm", facts)
    assert newest.process_started_at == 500.0
    assert MinuteStore(sqlite, "c").newest_sample("chat", NOON + 60) is None


def test_a_sample_of_a_clock_that_was_ahead_is_not_the_newest(sqlite: Engine) -> None:
    for at in (NOON, NOON + 3600):
        ObservationStore(sqlite, "a").write_engine_sample(
            EngineSample(engine="chat", at=at, dialect="vllm", model=None, facts={})
        )
    newest = MinuteStore(sqlite, "a").newest_sample("chat", NOON + 60)
    assert newest is not None
    assert newest.at == NOON


def test_costs_of_requests_and_minutes_add_up_to_the_bill(sqlite: Engine) -> None:
    """The first request arrives late, and the second is cancelled."""
    minutes = Minutes(sqlite, PRICE)
    for step in range(43):
        at = 5.0 * step
        minutes.read_one(at, running=1.0, steps=at, output=3 * at, input=9 * at)
    minutes.take(timed_request(2, 70.0, 30.0, status=Status.CANCELLED))
    minutes.computed(151.0)
    minutes.take(timed_request(1, 10.0, 80.0, output_tokens=200))
    windows = minutes.computed(211.0)
    cost = total(map(cost_of, windows))
    assert cost is not None
    unassigned_usd = cost.idle + cost.unknown + cost.unseen
    costs = minutes.costs()
    assert None not in costs
    assert fsum(usd or 0.0 for usd in costs) + unassigned_usd == pytest.approx(0.18)
    assert fsum(w.bill_usd or 0.0 for w in windows) == pytest.approx(0.18)
    assert cost.aborted == pytest.approx(costs[0])


def test_a_request_that_changed_meanwhile_gets_its_share_the_next_time(sqlite: Engine) -> None:
    """A row that was read as an engine's view has become a joined one."""
    minutes = Minutes(sqlite, PRICE)
    minutes.take(timed_request(1, 10.0, 20.0))
    (row,) = minutes.rows()
    share = RequestCost(row=row["id"], vantage="joined", complete=True, cost_usd=1.0)
    minutes.store.write((), [share], NOON)
    assert minutes.rows()[0]["priced_at"] is None
    assert minutes.costs() == [None]
