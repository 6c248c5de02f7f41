"""Jobs give way while a sender waits."""

import threading

import pytest

from agent.app import storing
from agent.app.storing import Precedence
from agent.errors import PayloadInvalid

WITHIN_S = 60.0
# A job that does not wait goes on within this time.
LONG_ENOUGH_S = 0.2


@pytest.fixture
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "GIVES_WAY_S", WITHIN_S)


class _Job(threading.Thread):
    """A job between two slices of its work."""

    def __init__(self, senders: Precedence) -> None:
        super().__init__(daemon=True)
        self._senders = senders
        self.goes_on = threading.Event()
        self.start()

    def run(self) -> None:
        self._senders.give_way()
        self.goes_on.set()


def test_without_a_sender_a_job_goes_on_at_once(no_limit: None) -> None:
    assert _Job(Precedence()).goes_on.wait(WITHIN_S / 2)


def test_a_job_goes_on_when_the_last_sender_has_its_answer(no_limit: None) -> None:
    senders = Precedence()
    with senders:
        with senders:
            job = _Job(senders)
        assert not job.goes_on.wait(LONG_ENOUGH_S)
    assert job.goes_on.wait(WITHIN_S / 2)


def test_the_sender_after_a_failed_one_waits_for_no_job(no_limit: None) -> None:
    senders = Precedence()
    with pytest.raises(PayloadInvalid), senders:
        raise PayloadInvalid("not a protobuf message")
    assert _Job(senders).goes_on.wait(WITHIN_S / 2)
    with senders:
        assert not _Job(senders).goes_on.wait(LONG_ENOUGH_S)


def test_senders_that_never_cease_do_not_stop_a_job() -> None:
    with Precedence() as senders:
        assert _Job(senders).goes_on.wait(WITHIN_S)
