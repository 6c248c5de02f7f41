"""PostgreSQL from Debian: one server for all tests, one new database for each."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.real_parts.ports import free_port
from tests.real_parts.processes import PartMissing, ServerProcess, run_as
from tests.real_parts.waiting import eventually

READY_WITHIN_S = 180.0
OWNER = "postgres"


def _program(name: str) -> Path:
    """A server program of the newest PostgreSQL; Debian keeps them off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=_version)
    if not found and (on_path := shutil.which(name)):
        return Path(on_path)
    if not found:
        raise PartMissing(f"PostgreSQL's {name} is not installed: run .ci/install-parts")
    return found[-1]


def _version(program: Path) -> int:
    return int(program.parents[1].name)


def _server_user() -> str | None:
    """PostgreSQL refuses to run as root; other users run it themselves."""
    return OWNER if os.geteuid() == 0 else None


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class PostgresServer:
    """One PostgreSQL server with its own data folder, on a free port of the loopback interface."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._user = _server_user()
        self._databases = 0
        if self._user:
            shutil.chown(folder, self._user, self._user)
        made = ["-D", str(self._data), "-U", OWNER, "-A", "trust", "-E", "UTF8"]
        run_as(self._user, [_program("initdb"), *made], folder=folder)
        self._process = self._started()
        # The default from PostgreSQL 15 on writes each page of a new database to the log as well.
        self._strategy = " STRATEGY FILE_COPY" if self._release() >= 15 else ""

    def url(self, database: str) -> str:
        """The SQLAlchemy URL of a database."""
        return f"postgresql+psycopg://{OWNER}@127.0.0.1:{self._port}/{database}"

    @contextmanager
    def new_database(self) -> Iterator[str]:
        """The SQLAlchemy address of an empty database that is dropped afterwards."""
        self._databases += 1
        name = f"test_{self._databases}"
        self._execute(f"CREATE DATABASE {name}{self._strategy}")
        yield self.url(name)
        self._execute(f"DROP DATABASE {name} WITH (FORCE)")

    def stop(self) -> None:
        """Fast shutdown: connections are closed, and committed rows are on disk."""
        os.kill(self._process.pid, signal.SIGINT)
        self._process.wait(within_s=READY_WITHIN_S)

    def kill(self) -> None:
        """Kill it as kill -9 does: nothing is flushed, and clients get no message.

        Its children are sessions of their own. Until each has ended, no new server can start.
        """
        server = psutil.Process(self._process.pid)
        server.suspend()
        children = server.children(recursive=True)
        self._process.kill()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        eventually(lambda: not any(map(_lives, children)), within_s=READY_WITHIN_S, what="its end")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Inside the block it answers nothing, though its connections stay open."""
        server = psutil.Process(self._process.pid)
        server.suspend()
        stopped = [server, *server.children(recursive=True)]
        try:
            for process in stopped:
                process.suspend()
            yield
        finally:
            for process in stopped:
                # A child whose client has left ends as soon as it goes on.
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    @contextmanager
    def with_connections(self, most: int) -> Iterator[None]:
        """Inside the block it was started anew, for so many connections."""
        self.stop()
        # Not by a statement, whose connection could be the one too many.
        self._process = self._started("-c", f"max_connections={most}")
        try:
            yield
        finally:
            self.stop()
            self.restart()

    def restart(self) -> None:
        """Start again after `stop` or `kill`, on the same port and data."""
        self._process = self._started()

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _started(self, *options: str) -> ServerProcess:
        process = ServerProcess(
            [
                *(_program("postgres"), "-D", self._data, "-k", self._folder),
                *("-h", "127.0.0.1", "-p", str(self._port)),
                # A killed process loses no data that the kernel has; only a lost machine does.
                *("-c", "fsync=off"),
                *options,
            ],
            self._folder / "postgres.log",
            user=self._user,
        )
        process.wait_until(self._accepts, within_s=READY_WITHIN_S)
        return process

    def _accepts(self) -> bool:
        try:
            self._execute("SELECT 1")
        except psycopg.OperationalError as error:
            # Others may have all connections already.
            return "too many clients" in str(error)
        return True

    def _execute(self, statement: str) -> None:
        with self._connected() as connection:
            connection.execute(statement.encode())

    def _release(self) -> int:
        with self._connected() as connection:
            return connection.info.server_version // 10_000

    def _connected(self) -> psycopg.Connection[Any]:
        where = f"host=127.0.0.1 port={self._port} user={OWNER} dbname=postgres"
        return psycopg.connect(where, autocommit=True, connect_timeout=5)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The server that all tests share; a test that stops it must start it again."""
    # Not under pytest's own folder, which the server's user may not enter.
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        server = PostgresServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The SQLAlchemy address of a new, empty database of the real PostgreSQL."""
    with postgres_server.new_database() as url:
        yield url
