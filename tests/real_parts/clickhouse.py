"""A real ClickHouse, and a way to it that loses answers."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
        """The SQLAlchemy URL of a database, perhaps by way of another port, uncompressed."""
        plain = "" if port is None else "?compress=false"
        return f"clickhousedb://default:s3cret@127.0.0.1:{port or self._port}/{database}{plain}"

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


_PASSED = ("Content-Type", "Content-Encoding", "Accept-Encoding")
WITHIN_S = 60.0


class LossyWay:
    """Passes statements on; of those that begin with `loses`, the answer is cut off.

    The driver sends them again at once, unless they get `status` instead.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.loses: str | None = None
        self.status: int | None = None
        self.lost = 0


class _Passing(BaseHTTPRequestHandler):
    way: LossyWay

    def do_POST(self) -> None:
        headers = {name: self.headers[name] for name in _PASSED if name in self.headers}
        body = self._body()
        there = requests.post(
            f"{self.way.server}{self.path}", data=body, headers=headers, timeout=WITHIN_S
        )
        loses = self.way.loses
        said = body[:200].replace(b"`", b"")
        if loses is not None and said.startswith(loses.encode()) and there.ok:
            self.way.lost += 1
            if self.way.status is None:
                self.close_connection = True
            else:
                self.send_error(self.way.status)
            return
        self.send_response(there.status_code)
        for name, value in there.headers.items():
            if name.startswith("X-ClickHouse"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(there.content)))
        self.end_headers()
        self.wfile.write(there.content)

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing of each request."""


@contextmanager
def lossy_way(server: str) -> Iterator[tuple[LossyWay, int]]:
    """A way to the server at this address, and its port on the loopback interface."""
    way = LossyWay(server)
    passing = type("Passing", (_Passing,), {"way": way})
    front = ThreadingHTTPServer(("127.0.0.1", 0), passing)
    thread = threading.Thread(target=front.serve_forever, name="lossy way")
    thread.start()
    yield way, front.server_address[1]
    front.shutdown()
    thread.join()
    front.server_close()
