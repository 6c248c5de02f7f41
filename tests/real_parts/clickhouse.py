"""ClickHouse's engine from chDB as a server process (see `clickhouse_front`), on a free port."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import requests

from tests.real_parts.ports import free_port
from tests.real_parts.processes import ServerProcess, answers

READY_WITHIN_S = 180.0


class ClickHouseServer:
    """One server with its own data folder; it can be stopped, killed, frozen and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._databases = 0
        self._process = self._started()

    @property
    def http(self) -> str:
        """The address of its HTTP interface."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._process.pid

    def url(self, database: str, port: int | None = None) -> str:
        """The SQLAlchemy URL of a database, perhaps by way of another port."""
        return f"clickhousedb://default:s3cret@127.0.0.1:{port or self._port}/{database}"

    @contextmanager
    def new_database(self) -> Iterator[str]:
        """The SQLAlchemy URL of an empty database that is dropped afterwards."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f"CREATE DATABASE {name}")
        yield self.url(name)
        self.execute(f"DROP DATABASE {name}")

    def execute(self, statement: str) -> str:
        """The result of a statement as text."""
        response = requests.post(self.http, data=statement.encode(), timeout=READY_WITHIN_S)
        assert response.status_code == 200, response.text
        return response.text

    def kill(self) -> None:
        """End it as kill -9 does."""
        self._process.kill()

    def restart(self) -> None:
        """Start it again on the same files and port."""
        self._process = self._started()

    def stop(self) -> None:
        """End it."""
        self._process.stop()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped inside, with its connections open."""
        os.kill(self._process.pid, signal.SIGSTOP)
        yield
        os.kill(self._process.pid, signal.SIGCONT)

    def _started(self) -> ServerProcess:
        front = [sys.executable, "-m", "tests.real_parts.clickhouse_front"]
        process = ServerProcess([*front, self._folder, str(self._port)], self._folder / "front.log")
        process.wait_until(lambda: answers(f"{self.http}/ping"), within_s=READY_WITHIN_S)
        return process


@pytest.fixture(scope="session")
def clickhouse_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClickHouseServer]:
    """One server for all tests."""
    server = ClickHouseServer(tmp_path_factory.mktemp("clickhouse"))
    yield server
    server.stop()


@pytest.fixture
def clickhouse_url(clickhouse_server: ClickHouseServer) -> Iterator[str]:
    """The URL of an empty database."""
    with clickhouse_server.new_database() as url:
        yield url
