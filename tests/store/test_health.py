"""What /readyz says of the writes before it, on a clock of the test."""

import pytest

from agent.errors import StoreUnavailable
from agent.store.health import SENT_AGAIN_WITHIN_S, SLOW_S, StoreHealth
from tests.store.making import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


@pytest.fixture
def health(clock: Clock) -> StoreHealth:
    return StoreHealth(clock)


def fail(health: StoreHealth, sentence: str, *, probe: bool = False) -> None:
    error = StoreUnavailable(sentence, "connection to 10.0.0.7 as secret failed")
    with pytest.raises(StoreUnavailable), health.write("a write", probe=probe):
        raise error


def succeed(health: StoreHealth, *, probe: bool = False) -> None:
    with health.write("a write", probe=probe):
        pass


def test_without_a_write_nothing_is_wrong(health: StoreHealth) -> None:
    assert health.problem() is None
    succeed(health)
    assert health.problem() is None


def test_a_failure_is_told_with_its_age_and_without_its_cause_until_a_write_succeeds(
    health: StoreHealth, clock: Clock
) -> None:
    fail(health, "the disk is full")
    clock.now += 7
    fail(health, "the disk is read-only")
    assert health.problem() == "the disk is read-only (since 7 s)"
    succeed(health)
    assert health.problem() is None


def test_a_small_write_outweighs_no_failure_of_requests_that_are_sent_again(
    health: StoreHealth, clock: Clock
) -> None:
    fail(health, "the disk is full")
    clock.now += SENT_AGAIN_WITHIN_S - 1
    succeed(health, probe=True)
    assert health.problem() is not None
    clock.now += 1
    succeed(health, probe=True)
    assert health.problem() is None


def test_a_small_write_outweighs_a_small_write(health: StoreHealth) -> None:
    fail(health, "the database is locked", probe=True)
    succeed(health, probe=True)
    assert health.problem() is None


def test_a_write_that_hangs_is_told_while_it_hangs(health: StoreHealth, clock: Clock) -> None:
    with health.write("a write of requests"):
        clock.now += SLOW_S
        assert health.problem() is None
        clock.now += 2
        succeed(health, probe=True)
        assert health.problem() == "a write of requests waits for the database since 7 s"
    assert health.problem() is None


def test_a_closed_database_is_told_until_it_is_opened(health: StoreHealth) -> None:
    health.closed("its file was deleted")
    succeed(health, probe=True)
    assert health.problem() == "its file was deleted (since 0 s)"
    health.opened()
    assert health.problem() is None
