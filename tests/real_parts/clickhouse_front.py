"""ClickHouse's engine, in-process from chDB, behind the part of its HTTP interface that we use.

`python -m tests.real_parts.clickhouse_front FOLDER PORT`. The engine, its files, SQL, types, the
Native format, deduplication and merges are ClickHouse's own. Of HTTP it has what the driver sends:
a statement in the body or in the parameter `query`, settings and values as parameters, data behind
an INSERT. It knows no users, no sessions and no query ids, and runs statements one after the other.
"""

import argparse
import gzip
import os
import re
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import chdb
import lz4.frame
from backports import zstd

# Parameters that are of HTTP and no settings of the engine.
_OF_HTTP = {
    *("query", "database", "compress", "decompress", "wait_end_of_query", "session_id", "query_id"),
    *("enable_http_compression", "client_protocol_version", "send_progress_in_http_headers"),
    *("http_headers_progress_interval_ms", "default_format", "user", "password", "role"),
}
_VALUE = "param_"
_MOST_CONNECTIONS = 32

Settings = frozenset[tuple[str, str]]

_INSERT = re.compile(rb"\A\s*INSERT\s+INTO\s+(.+?)\s+FORMAT\s+(\w+)[ \t]*\n", re.S | re.I)
_FORMAT = re.compile(r"\bFORMAT\s+(\w+)\s*;?\s*\Z", re.I)
_CODE = re.compile(r"Code: (\d+)")
_DECODERS = {"gzip": gzip.decompress, "lz4": lz4.frame.decompress, "zstd": zstd.decompress}


class Engine:
    """The one engine of this process; one statement at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        # An engine without a connection is closed.
        self._kept = self._open()
        # To set settings takes longer than most statements, and few of them differ.
        self._connections: OrderedDict[Settings, Any] = OrderedDict()

    def run(self, body: bytes, given: Mapping[str, str]) -> tuple[bytes, str]:
        """The result and its format. Raises the engine's RuntimeError."""
        with self._lock:
            connection = self._connection(given)
            statement = given.get("query", "").encode()
            whole = statement + b"\n" + body if statement else body
            insert = _INSERT.match(whole)
            if insert is not None:
                return self._inserted(connection, insert, whole[insert.end() :]), ""
            sql = whole.decode().strip()
            named = _FORMAT.search(sql)
            wanted = named.group(1) if named else given.get("default_format", "TabSeparated")
            values = {k[len(_VALUE) :]: v for k, v in given.items() if k.startswith(_VALUE)}
            result = connection.query(sql, wanted, params=values)
            return result.bytes() or b"", wanted

    def _connection(self, given: Mapping[str, str]) -> Any:
        settings = frozenset(
            (name, value)
            for name, value in given.items()
            if name == "database" or (name not in _OF_HTTP and not name.startswith(_VALUE))
        )
        connection = self._connections.pop(settings, None)
        if connection is None:
            connection = self._connected(dict(settings))
        self._connections[settings] = connection
        if len(self._connections) > _MOST_CONNECTIONS:
            _, oldest = self._connections.popitem(last=False)
            oldest.close()
        return connection

    def _open(self) -> Any:
        opened: Any = chdb.connect(str(self._folder / "data"))  # type: ignore[no-untyped-call]
        return opened

    def _connected(self, settings: dict[str, str]) -> Any:
        connection = self._open()
        if database := settings.pop("database", None):
            connection.query(f"USE `{database}`")
        for name, value in settings.items():
            quoted = value.replace("\\", "\\\\").replace("'", "\\'")
            connection.query(f"SET {name} = '{quoted}'")
        return connection

    def _inserted(self, connection: Any, insert: re.Match[bytes], data: bytes) -> bytes:
        into, of_format = (part.decode() for part in insert.groups())
        with tempfile.NamedTemporaryFile(dir=self._folder, suffix=".insert") as file:
            file.write(data)
            file.flush()
            connection.query(f"INSERT INTO {into} FROM INFILE '{file.name}' FORMAT {of_format}")
        return b""


class Front(BaseHTTPRequestHandler):
    """Answers one connection."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    # A client waits 40 ms for what Nagle's algorithm holds back.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer a ping, or a statement without a body."""
        self._answer()

    def do_POST(self) -> None:
        """Run a statement."""
        self._answer()

    def _answer(self) -> None:
        url = urlsplit(self.path)
        body = self._body()
        if url.path == "/ping":
            self._send(200, b"Ok.\n", {})
            return
        try:
            # A body that the driver broke off is refused, as the server does.
            body = self._decoded(body)
            result, of_format = self.engine.run(body, dict(parse_qsl(url.query)))
        except Exception as error:
            code = _CODE.search(str(error))
            headers = {"X-ClickHouse-Exception-Code": code.group(1) if code else "1000"}
            self._send(500, str(error).encode(), headers)
            return
        headers = {"X-ClickHouse-Timezone": "UTC", "X-ClickHouse-Summary": "{}"}
        self._send(200, result, headers | ({"X-ClickHouse-Format": of_format} if of_format else {}))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            return b"".join(self._chunks())
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _decoded(self, body: bytes) -> bytes:
        decode = _DECODERS.get(self.headers.get("Content-Encoding", ""))
        return body if decode is None else decode(body)

    def _chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing of each request."""


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("port", type=int)
    given = parser.parse_args()
    os.environ["TZ"] = "UTC"
    Front.engine = Engine(given.folder)
    ThreadingHTTPServer(("127.0.0.1", given.port), Front).serve_forever()


if __name__ == "__main__":
    main()
