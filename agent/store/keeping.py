"""Keeps the agent's file open: tries until it opens, and opens it anew after it was replaced."""

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine, event

from agent.errors import StoreUnavailable
from agent.store.claim import BEAT_EVERY_S, NameClaim, NameTaken
from agent.store.connection import CORRUPT_CODES, open_engine, sqlite_code, store_unavailable
from agent.store.health import StoreHealth
from agent.store.migrating import upgrade
from agent.store.sqlite_connection import SqliteConnection
from agent.store.sqlite_place import FileLock, SqlitePlace, open_to_others, set_aside

_LOG = logging.getLogger(__name__)

# How often the file of an open database is checked, and how often opening is tried again.
LOOK_EVERY_S = 0.5
TRY_EVERY_S = 2.0
_SQLITE_WAIT_S = 5.0

_NOT_YET = "the database is not open yet; send again in a moment"
_REPLACED = "the database's file was deleted or replaced; it is opened anew"
_DAMAGED = "the database's file is corrupt; it is set aside, and a new one begun"

Prepare = Callable[[Engine], None]


class _SqliteConnections:
    """The connections of engines to a SQLite file.

    SQLite shares the index of the log among all connections of a process, so one to a deleted log
    makes every new one fail. And the last to be closed deletes the log at the path, whichever that
    is. So all are closed before the file is opened anew.
    """

    def __init__(self, engines: Sequence[Engine], refuse: Callable[[], None]) -> None:
        """`refuse` raises while nothing may connect."""
        self._refuse = refuse
        self._lock = threading.Lock()
        self._open: WeakSet[SqliteConnection] = WeakSet()
        self._old: WeakSet[SqliteConnection] = WeakSet()
        for engine in engines:
            event.listen(engine, "do_connect", self._connect)
            event.listen(engine, "checkin", self._returned)

    def close_when_returned(self) -> None:
        """Let none that is open now be used again."""
        with self._lock:
            self._old.update(self._open)

    def all_closed(self) -> bool:
        """Whether those are closed."""
        with self._lock:
            return all(connection.closed for connection in self._old)

    def _connect(self, dialect: Any, _record: object, given: Any, named: Any) -> SqliteConnection:
        with self._lock:
            self._refuse()
            connection: SqliteConnection = dialect.connect(*given, **named)
            self._open.add(connection)
        return connection

    def _returned(self, connection: SqliteConnection | None, record: Any) -> None:
        if connection is not None and connection in self._old:
            record.invalidate()


class StoreKeeper:
    """Opens the file in a thread of its own; until then its engines raise StoreUnavailable.

    A lock lets no other agent write to it, until `release`.

    A second thread renews the agent's name claim, which shows whether writes succeed.
    """

    def __init__(
        self,
        path: Path,
        engines: Sequence[Engine],
        *,
        claim: NameClaim,
        prepare: Prepare,
        health: StoreHealth,
        sets_aside: bool,
        on_set_aside: Callable[[], None] | None = None,
    ) -> None:
        """`prepare` gets the migrated database before `engines` may use it, at each opening.

        With `sets_aside` a corrupt file is renamed, and a new one begun.
        """
        self._path = path
        self._file_lock = FileLock(path)
        self._engines = engines
        self._claim = claim
        self._prepare = prepare
        self._health = health
        self._sets_aside = sets_aside
        self._on_set_aside = on_set_aside
        self._damage: Exception | None = None
        self._lock = threading.Lock()
        self._refusal: str | None = _NOT_YET
        self._logged: str | None = None
        self._place: SqlitePlace | None = None
        self._place_before: SqlitePlace | None = None
        # Places of replaced files: closing them would delete the log of the new file at the path.
        self._never_closed: list[SqlitePlace] = []
        self._tried = threading.Event()
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._connections = _SqliteConnections(engines, self._refuse)
        for engine in engines:
            event.listen(engine, "do_connect", self._refuse)
            event.listen(engine, "connect", self._require_place)

    def start(self, *, wait_s: float) -> None:
        """Start both threads; returns after the first attempt to open, or after `wait_s`."""
        for name, work in (("store-keeper", self._keep), ("store-beat", self._beat)):
            threading.Thread(target=work, name=name, daemon=True).start()
        self._tried.wait(wait_s)

    def verify(self) -> None:
        """Raise StoreUnavailable unless the last commit went to the file that is at the path."""
        if self._refusal is not None:
            raise StoreUnavailable(self._refusal)
        if self._place is not None and not self._place.holds():
            self._shut(_REPLACED)
            raise StoreUnavailable(_REPLACED)

    def failed(self, error: Exception) -> None:
        """Set the file aside, if `sets_aside` is on and this error shows that it is corrupt."""
        if self._sets_aside and self._refusal is None and _is_corrupt(error):
            self._damage = error
            self._shut(_DAMAGED)

    def close(self) -> None:
        """Give the name back and end the threads. This may wait for the database."""
        self._stopping.set()
        self._wake.set()
        if self._refusal is None:
            with suppress(StoreUnavailable):
                self._claim.release(self._engines[0])

    def release(self) -> None:
        """Let another agent write to the file, whose connections are closed."""
        self._file_lock.release()

    def _refuse(self, *_given: object) -> None:
        if self._refusal is not None:
            raise StoreUnavailable(self._refusal)

    def _require_place(self, connection: Any, _record: object) -> None:
        """Let nobody use a connection that made a new log: SQLite would damage the file."""
        try:
            self.verify()
        except StoreUnavailable:
            connection.close()
            raise

    def _keep(self) -> None:
        while not self._stopping.is_set():
            if self._refusal is None:
                with suppress(StoreUnavailable):
                    self.verify()
            elif self._connections.all_closed():
                self._leave_place()
                self._try_to_open()
                self._tried.set()
            self._wake.clear()
            soon = self._refusal in (None, _REPLACED, _DAMAGED)
            self._wake.wait(LOOK_EVERY_S if soon else TRY_EVERY_S)

    def _try_to_open(self) -> None:
        try:
            with self._health.write("the opening of the database", probe=True), _as_unavailable():
                self._open()
        except StoreUnavailable as error:
            self._refusal = error.public
            if self._logged != str(error):
                self._logged = str(error)
                _LOG.error("%s; it is tried again, and nothing is stored until then", error)
        else:
            if self._logged is not None:
                _LOG.warning("the database is open")
            self._logged = None

    def _open(self) -> None:
        damage, self._damage = self._damage, None
        self._file_lock.take()
        if damage is not None:
            self._corrupt(damage)
        try:
            place = self._opened()
        except Exception as error:
            if not _is_corrupt(error):
                raise
            self._corrupt(error)
            place = self._opened()
        if file := open_to_others(self._path):
            _LOG.warning(
                "other users of this machine may open %s; `chmod 600 %s*`", file, self._path
            )
        with self._lock:
            self._place = place
            self._refusal = None
        self._health.opened()

    def _opened(self) -> SqlitePlace:
        """Open and prepare the file."""
        place = SqlitePlace(self._path, _SQLITE_WAIT_S)
        try:
            self._make_ready(place)
        except BaseException:
            place.close()
            raise
        return place

    def _make_ready(self, place: SqlitePlace) -> None:
        engine = open_engine(f"sqlite:///{self._path}", pool_pre_ping=False)
        event.listen(engine, "connect", partial(_require, place))
        try:
            before, after = upgrade(engine)
            if before != after:
                _LOG.info("the database was brought from revision %s to %s", before, after)
            self._claim.take(engine)
            self._prepare(engine)
        finally:
            engine.dispose()
        if not place.holds():
            raise StoreUnavailable(_REPLACED)

    def _corrupt(self, error: Exception) -> None:
        if not self._sets_aside:
            raise StoreUnavailable(
                f"the database's file {self._path.name} is corrupt; restore it, or start a new one "
                "with storage.on_corrupt: set_aside",
                f"{self._path.absolute()}: {error}",
            ) from error
        moved = set_aside(self._path)
        if self._on_set_aside is not None:
            self._on_set_aside()
        _LOG.error("%s is corrupt: it was renamed to %s, and a new one is begun", self._path, moved)

    def _shut(self, refusal: str) -> None:
        with self._lock:
            if self._refusal is not None:
                return
            self._refusal = refusal
            self._place_before, self._place = self._place, None
        self._health.closed(refusal)
        _LOG.error("%s", refusal)
        self._connections.close_when_returned()
        for engine in self._engines:
            engine.dispose()
        self._wake.set()

    def _leave_place(self) -> None:
        place, self._place_before = self._place_before, None
        if place is not None and not place.leave():
            self._never_closed.append(place)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_EVERY_S):
            if self._refusal is not None:
                continue
            try:
                with self._health.write("a small write", probe=True):
                    self._claim.beat(self._engines[0])
            except NameTaken as error:
                self._shut(error.public)
            except StoreUnavailable as error:
                _LOG.warning("%s", error)


def _require(place: SqlitePlace, connection: Any, _record: object) -> None:
    if not place.holds():
        connection.close()
        raise StoreUnavailable(_REPLACED)


def _is_corrupt(error: BaseException | None) -> bool:
    while error is not None:
        if sqlite_code(error) in CORRUPT_CODES:
            return True
        error = error.__cause__
    return False


@contextmanager
def _as_unavailable() -> Iterator[None]:
    """Raise StoreUnavailable for any other error: the next attempt may succeed."""
    try:
        yield
    except StoreUnavailable:
        raise
    except Exception as error:
        if not isinstance(error, (sqlite3.Error, OSError)):
            _LOG.exception("the database cannot be opened")
        raise store_unavailable("the database cannot be opened", error) from error
