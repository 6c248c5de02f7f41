"""An HTTP server that records each request, whatever it is, as a proxy of the environment would."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Recorded:
    """The requests so far: `POST /path` and the headers."""

    port: int = 0
    redirects_to: str | None = None
    status: int = 404
    body: bytes = b""
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def passwords(self) -> set[str | None]:
        """The Authorization headers of all requests; None of a request without one."""
        return {headers.get("Authorization") for _, headers in self.requests}


@contextmanager
def recording_server() -> Iterator[Recorded]:
    """Responds the same to everything, at first 404."""
    recorded = Recorded()

    class Handler(BaseHTTPRequestHandler):
        def _record(self) -> None:
            recorded.requests.append((f"{self.command} {self.path}", dict(self.headers)))
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if recorded.redirects_to is None:
                self.send_response(recorded.status)
            else:
                self.send_response(307)
                self.send_header("Location", recorded.redirects_to)
            self.send_header("Content-Length", str(len(recorded.body)))
            self.end_headers()
            self.wfile.write(recorded.body)

        do_GET = do_POST = do_CONNECT = _record  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorded.port = server.server_port
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            serving.join()
