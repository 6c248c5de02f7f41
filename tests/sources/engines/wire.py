"""A fake engine at the wire: a real HTTP server on loopback whose answers a test scripts."""

import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.real_parts.certificates import Certificate

Script = Callable[[BaseHTTPRequestHandler], None]


class EngineServer:
    """Answers each path by its script; a path without one is a 404. A certificate gives it TLS."""

    def __init__(self, certificate: Certificate | None = None) -> None:
        self.scripts: dict[str, Script] = {}
        self.asked: list[str] = []
        self.posted: list[tuple[dict[str, str], bytes]] = []
        self.stopping = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.scripts.get(self.path, _not_found)(self)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                outer.posted.append((dict(self.headers), self.rfile.read(length)))
                outer.scripts.get(self.path, _not_found)(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._scheme = "http" if certificate is None else "https"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.certificate, certificate.key)
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        """What an operator would write in the settings."""
        return f"{self._scheme}://{self.address}"

    def answers(
        self, path: str, body: bytes, *, status: int = 200, headers: tuple[str, ...] = ()
    ) -> None:
        lines = (f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers, "", "")
        self.scripts[path] = lambda handler: _write(handler, "\r\n".join(lines).encode() + body)

    def drips(self, path: str, *pieces: bytes) -> None:
        """Answer `path` with the first pieces at once, and then with the last, on and on."""

        def drip(handler: BaseHTTPRequestHandler) -> None:
            for piece in pieces[:-1]:
                _write(handler, piece)
            while not self.stopping.wait(0.02):
                _write(handler, pieces[-1])

        self.scripts[path] = drip

    def stop(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.stopping.is_set():
            self.stop()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: that the agent hangs up is what the tests are about."""


def _write(handler: BaseHTTPRequestHandler, data: bytes) -> None:
    handler.wfile.write(data)
    handler.wfile.flush()


def _not_found(handler: BaseHTTPRequestHandler) -> None:
    _write(handler, b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n")
