"""A way to ClickHouse that loses answers: what was sent is done there, and nobody hears of it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

_PASSED = ("Content-Type", "Content-Encoding", "Accept-Encoding")
WITHIN_S = 60.0


class LossyWay:
    """Passes statements on; of those whose address has `loses`, the answer is cut off.

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
        there = requests.post(
            f"{self.way.server}{self.path}", data=self._body(), headers=headers, timeout=WITHIN_S
        )
        if self.way.loses is not None and self.way.loses in self.path and there.ok:
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
