"""Windows of engines on each kind of database."""

from math import fsum

import pytest
from sqlalchemy import Engine

from agent.records.engine import EngineSample
from agent.records.minute import RequestCost
from agent.records.request import Status
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from tests.pipeline.minutes import PRICE, Minutes, asked
from tests.records.minutes import UNKNOWN, minute
from tests.store.making import NOON


def test_a_minute_is_told_as_it_was_kept(database: Engine) -> None:
    kept = MinuteStore(database, "agent-0")
    wanted = [minute(0, disagreements=({"figure": "mfu"},)), minute(1, **UNKNOWN)]
    kept.write(wanted, (), NOON)
    assert kept.between("chat-0", wanted[0].from_at, wanted[1].until) == wanted
    assert kept.newest("chat-0") == wanted[1]
    assert MinuteStore(database, "agent-1").newest("chat-0") is None


def test_a_minute_that_is_kept_again_replaces_what_it_was(database: Engine) -> None:
    kept = MinuteStore(database, "agent-0")
    kept.write([minute(0), minute(1)], (), NOON)
    kept.write([minute(0, requests=11)], (), NOON)
    told = kept.between("chat-0", 0.0, 4e9) or kept.between("chat-0", NOON - 60, NOON + 120)
    assert [each.requests for each in told] == [11, 10]


def test_old_minutes_are_deleted(database: Engine) -> None:
    kept = MinuteStore(database, "agent-0")
    kept.write([minute(0), minute(1)], (), NOON)
    assert kept.expire(minute(1).starts_at) == 1
    assert kept.newest("chat-0") == minute(1)


def test_the_newest_sample_is_that_of_the_engine_and_the_agent(database: Engine) -> None:
    facts = {("llm_engine_process_start_time_seconds", ()): 500.0, ("of", ("a", "b")): 2.0}
    for agent, engine, at in (
        ("a", "chat", 1.0),
        ("a", "chat", 2.0),
        ("a", "x", 3.0),
        ("b", "chat", 4.0),
    ):
        ObservationStore(database, agent).write_engine_sample(
            EngineSample(engine=engine, at=NOON + at, dialect="vllm", model="m", facts=facts)
        )
    newest = MinuteStore(database, "a").newest_sample("chat", NOON + 60)
    assert newest is not None
    assert (newest.at, newest.dialect, newest.facts) == (NOON + 2.0, "vllm", facts)
    assert newest.process_started_at == 500.0
    assert MinuteStore(database, "c").newest_sample("chat", NOON + 60) is None


def test_a_sample_of_a_clock_that_was_ahead_is_not_the_newest(database: Engine) -> None:
    for at in (NOON, NOON + 3600):
        ObservationStore(database, "a").write_engine_sample(
            EngineSample(engine="chat", at=at, dialect="vllm", model=None, facts={})
        )
    newest = MinuteStore(database, "a").newest_sample("chat", NOON + 60)
    assert newest is not None
    assert newest.at == NOON


def test_all_cents_are_in_requests_and_minutes(database: Engine) -> None:
    """The first comes late, and the second is given up."""
    minutes = Minutes(database, PRICE)
    for step in range(43):
        at = 5.0 * step
        minutes.read_one(at, running=1.0, steps=at, output=3 * at, input=9 * at)
    minutes.take(asked(2, 70.0, 30.0, status=Status.CANCELLED))
    minutes.count(151.0)
    minutes.take(asked(1, 10.0, 80.0, output_tokens=200))
    windows = minutes.count(211.0)
    nobodys = fsum((w.idle_usd or 0) + (w.unknown_usd or 0) + (w.unseen_usd or 0) for w in windows)
    costs = minutes.costs()
    assert None not in costs
    assert fsum(usd or 0.0 for usd in costs) + nobodys == pytest.approx(0.18)
    assert fsum(w.bill_usd or 0.0 for w in windows) == pytest.approx(0.18)
    assert fsum(w.aborted_usd or 0.0 for w in windows) == pytest.approx(costs[0])


def test_a_request_that_changed_meanwhile_gets_its_part_the_next_time(database: Engine) -> None:
    """What was asked of the database as an engine's view is a joined one by now."""
    minutes = Minutes(database, PRICE)
    minutes.take(asked(1, 10.0, 20.0))
    (row,) = minutes.rows()
    part = RequestCost(row=row["id"], vantage="joined", complete=True, cost_usd=1.0)
    minutes.store.write((), [part], NOON)
    assert minutes.rows()[0]["priced_at"] is None
    assert minutes.costs() == [None]
