"""What /readyz says of the shared database."""

from agent.app.journaling import forwarding_in_words
from agent.store.journal.backlog import Lag


def test_what_keeps_changes_from_the_shared_database_is_said() -> None:
    assert forwarding_in_words("it is away", Lag(7, 2.5)) == "it is away; 7 changes wait"


def test_a_journal_that_falls_behind_while_it_is_forwarded_is_said() -> None:
    assert forwarding_in_words(None, Lag(9000, 30.0)) == "ok"
    said = "the journal is 90 s behind; 9000 changes wait"
    assert forwarding_in_words(None, Lag(9000, 90.4)) == said
