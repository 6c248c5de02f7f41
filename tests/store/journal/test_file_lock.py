"""One journal has one agent at a time."""

from pathlib import Path

import pytest

from agent.errors import StoreUnavailable
from agent.store.journal.file_lock import JournalLock


def test_a_second_agent_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    first, second = (JournalLock(tmp_path / "journal.db") for _ in range(2))
    first.take()
    # The same agent opens its journal again after damage.
    first.take()
    with pytest.raises(StoreUnavailable, match=r"another agent writes to the journal journal\.db"):
        second.take()
    first.release()
    second.take()
