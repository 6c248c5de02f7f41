"""Agents of one name on one database, each on a clock of the test."""

import os
import socket
import subprocess
import sys

import pytest
from sqlalchemy import Engine, text

from agent.store.claim import DEAD_AFTER_S, NameClaim, NameTaken, own_instance
from tests.store.making import Clock

ELSEWHERE = "another-host:1:aa"


@pytest.fixture
def clock() -> Clock:
    return Clock(5.0)


@pytest.fixture
def claim(clock: Clock) -> NameClaim:
    return NameClaim("chat", own_instance(), clock)


def rows(engine: Engine) -> list[tuple[str, str]]:
    with engine.connect() as connection:
        found = connection.execute(text("SELECT name, instance FROM agents ORDER BY name"))
        return [(name, instance) for name, instance in found]


def test_an_agent_takes_its_name_again_and_gives_it_back(
    database: Engine, claim: NameClaim
) -> None:
    claim.take(database)
    claim.take(database)
    claim.beat(database)
    ((name, instance),) = rows(database)
    assert name == "chat"
    assert instance.startswith(f"{socket.gethostname()}:{os.getpid()}:")
    claim.release(database)
    NameClaim("chat", ELSEWHERE).take(database)
    assert rows(database) == [("chat", ELSEWHERE)]


def test_names_do_not_conflict_with_each_other(database: Engine, claim: NameClaim) -> None:
    NameClaim("code", ELSEWHERE).take(database)
    claim.take(database)
    assert [name for name, _ in rows(database)] == ["chat", "code"]


def test_the_name_of_an_agent_that_lives_elsewhere_is_taken(
    database: Engine, claim: NameClaim, clock: Clock
) -> None:
    other = NameClaim("chat", ELSEWHERE)
    other.take(database)
    for _ in range(10):
        with pytest.raises(NameTaken, match="another agent of the name 'chat'") as taken:
            claim.take(database)
        clock.now += DEAD_AFTER_S - 1
        other.beat(database)
    assert "another-host" not in taken.value.public
    assert rows(database) == [("chat", ELSEWHERE)]


def test_the_name_of_an_agent_that_counts_no_beats_is_free_after_a_while(
    database: Engine, claim: NameClaim, clock: Clock
) -> None:
    other = NameClaim("chat", ELSEWHERE)
    other.take(database)
    with pytest.raises(NameTaken):
        claim.take(database)
    clock.now += DEAD_AFTER_S
    claim.take(database)
    # It was only slow: it learns that the name is gone, and takes nothing from the new one.
    with pytest.raises(NameTaken, match="took over"):
        other.beat(database)
    other.release(database)
    claim.beat(database)


def test_a_process_of_this_host_that_has_ended_is_not_waited_for(
    database: Engine, claim: NameClaim
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here = NameClaim("chat", f"{socket.gethostname()}:{process.pid}:bb")
        here.take(database)
        with pytest.raises(NameTaken):
            claim.take(database)
        process.communicate(b"\n")
    claim.take(database)


def test_an_earlier_agent_of_this_process_is_not_waited_for(
    database: Engine, claim: NameClaim
) -> None:
    NameClaim("chat", own_instance()).take(database)
    claim.take(database)
