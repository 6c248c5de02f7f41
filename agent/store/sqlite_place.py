"""The file of a SQLite database: its lock, and whether its path still leads to it."""

import fcntl
import os
import sqlite3
import stat
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import URL

from agent.errors import StoreUnavailable

# The database, its write-ahead log, and the index of that log.
_ENDINGS = ("", "-wal", "-shm")

_Identity = tuple[int, int]


def sqlite_path(url: URL) -> Path | None:
    """The file of a SQLite database; None of another database, or where its path is a URI."""
    if url.get_backend_name() != "sqlite" or not url.database or "uri" in url.query:
        return None
    return Path(url.database)


def sqlite_files(url: URL) -> list[Path]:
    """The files that a SQLite database may have; none of another database."""
    path = sqlite_path(url)
    return [] if path is None else [Path(f"{path}{ending}") for ending in _ENDINGS]


def create_private(path: Path) -> None:
    """Create a missing database file that only its user may read, whatever the umask.

    SQLite gives its log and that log's index the mode of the database.
    """
    # To open and close a file that SQLite has open would drop SQLite's locks on it. Why a file
    # cannot be made is said by the connection that follows.
    with suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


def open_to_others(path: Path) -> Path | None:
    """The first of a database's files that users other than its own may open; None if none is."""
    for ending in _ENDINGS:
        file = Path(f"{path}{ending}")
        with suppress(OSError):
            if stat.S_IMODE(file.stat().st_mode) & 0o077:
                return file
    return None


class SqlitePlace:
    """A connection that keeps the files of a database open, and their device and inode numbers.

    While it is open, SQLite itself neither deletes nor replaces any of the files.
    """

    def __init__(self, path: Path, wait_s: float) -> None:
        """Open the files. Raises sqlite3.Error."""
        self._path = path
        create_private(path)
        self._connection = sqlite3.connect(path, timeout=wait_s, check_same_thread=False)
        try:
            self._connection.execute("PRAGMA journal_mode=WAL").close()
            # A first read opens the log.
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.Error:
            self._connection.close()
            raise
        self._opened = _identities(path)

    def holds(self) -> bool:
        """Whether the paths lead to the open files."""
        return None not in self._opened and _identities(self._path) == self._opened

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def leave(self) -> bool:
        """Close the connection to files that the paths no longer lead to; False if it stays open.

        SQLite opens a log that it finds with any database: the log of a file that is gone must go
        too. The last connection to a database deletes the log at the path, whichever that is: a log
        that came with the new database must stay.
        """
        now = _identities(self._path)
        if now[0] != self._opened[0]:
            for ending, found, opened in zip(_ENDINGS[1:], now[1:], self._opened[1:], strict=True):
                if found is not None and found == opened:
                    os.unlink(f"{self._path}{ending}")
            if any(
                found not in (None, own)
                for found, own in zip(now[1:], self._opened[1:], strict=True)
            ):
                return False
        self._connection.close()
        return True


def _identities(path: Path) -> tuple[_Identity | None, ...]:
    return tuple(_identity(f"{path}{ending}") for ending in _ENDINGS)


def _identity(path: str) -> _Identity | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def set_aside(path: Path) -> Path:
    """Rename a database's files; returns the new path of the database."""
    moved = path.with_name(f"{path.name}.corrupt-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    for ending in _ENDINGS:
        source = Path(f"{path}{ending}")
        if source.exists():
            source.rename(f"{moved}{ending}")
    return moved


class FileLock:
    """A lock on a file beside a database, which the kernel ends with the process.

    One agent at a time writes to a file, whatever its name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def take(self) -> None:
        """Lock, unless it is locked already. Raises StoreUnavailable while another agent has it."""
        if self._file is not None:
            return
        try:
            file = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreUnavailable(
                "the database's file cannot be opened", f"{self._path.absolute()}: {error}"
            ) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise StoreUnavailable(
                f"another agent writes to {self._path.name}; give each agent a `storage.file` of "
                "its own",
                str(self._path.absolute()),
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
