"""The lock on a journal's file: one agent at a time writes to it and forwards it."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from agent.errors import StoreUnavailable


class JournalLock:
    """A lock on a file beside the journal, which the kernel ends with the process.

    The name of an agent keeps apart only agents of one name. Two names in one journal would
    forward each other's changes.
    """

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._file: int | None = None

    def take(self) -> None:
        """Lock, unless it is locked already. Raises StoreUnavailable while another agent has it."""
        if self._file is not None:
            return
        file = os.open(f"{self._journal}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise StoreUnavailable(
                f"another agent writes to the journal {self._journal.name}; give each agent a "
                "`storage.journal.path` of its own",
                str(self._journal.absolute()),
            ) from error
        except OSError:
            os.close(file)
            raise
        self._file = file

    def release(self) -> None:
        """Unlock."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.close(file)
