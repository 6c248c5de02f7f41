"""A wall clock that another process sets: a file holds by how many seconds."""

import time
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import apscheduler.schedulers.base
import apscheduler.triggers.interval


class SettableClock:
    """The clock of a process under test; without the file, that of the machine."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def now(self) -> float:
        """Unix time."""
        return time.time() + self._set_by_s()

    def set_by(self, seconds: float) -> None:
        """Set it ahead of the machine's, or behind."""
        written = self._file.with_suffix(".new")
        written.write_text(str(seconds))
        written.replace(self._file)

    def rules_jobs(self) -> None:
        """From now on the scheduler of jobs reads it, too."""
        set_by_s = self._set_by_s

        class SetDatetime(datetime):
            @classmethod
            def now(cls, tz: tzinfo | None = None) -> "SetDatetime":
                return super().now(tz) + timedelta(seconds=set_by_s())

        for module in (apscheduler.schedulers.base, apscheduler.triggers.interval):
            vars(module)["datetime"] = SetDatetime

    def _set_by_s(self) -> float:
        with suppress(FileNotFoundError):
            return float(self._file.read_text())
        return 0.0
