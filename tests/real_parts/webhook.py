"""Whoever Alertmanager tells: a server that keeps each alert posted to it."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """One alert of one message; `path` is where it was posted."""

    path: str
    name: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class Webhook:
    """Takes everything and remembers it in the order of its coming."""

    def __init__(self) -> None:
        self._told: list[Told] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._told))
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook")
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def told(self, path: str = "/alerts") -> list[Told]:
        """All that was posted there until now."""
        return [told for told in tuple(self._told) if told.path == path]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def _handler(kept: list[Told]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kept.extend(_told(self.path, alert) for alert in body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: the test reads what was posted."""

    return Handler


def _told(path: str, alert: Mapping[str, Any]) -> Told:
    return Told(
        path=path,
        name=alert["labels"]["alertname"],
        status=alert["status"],
        labels=alert["labels"],
        annotations=alert["annotations"],
    )
