"""What /readyz says of the shared database."""

from agent.app.storing import forwarding_status
from agent.store.journal.backlog import Lag


def test_what_keeps_changes_from_the_shared_database_is_said() -> None:
    assert forwarding_status("it is away", Lag(7, 2.5)) == "it is away; 7 changes wait"


def test_a_journal_that_falls_behind_while_it_is_forwarded_is_said() -> None:
    assert forwarding_status(None, Lag(9000, 30.0)) == "ok"
    said = "the journal is 90 s behind; 9000 changes wait"
    assert forwarding_status(None, Lag(9000, 90.4)) == said
