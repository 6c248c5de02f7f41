"""A webhook receiver: a server that records each alert posted to it."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class PostedAlert:
    """One alert of one message; `path` is where it was posted."""

    path: str
    name: str
    status: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]


class Webhook:
    """Accepts every message and records its alerts in order."""

    def __init__(self) -> None:
        self._alerts: list[PostedAlert] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self._alerts))
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook")
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def alerts(self, path: str = "/alerts") -> list[PostedAlert]:
        """All alerts posted to this path until now."""
        return [alert for alert in tuple(self._alerts) if alert.path == path]

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


def _handler(recorded: list[PostedAlert]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.extend(_posted(self.path, alert) for alert in body["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: the test reads the recorded alerts."""

    return Handler


def _posted(path: str, alert: Mapping[str, Any]) -> PostedAlert:
    return PostedAlert(
        path=path,
        name=alert["labels"]["alertname"],
        status=alert["status"],
        labels=alert["labels"],
        annotations=alert["annotations"],
    )
