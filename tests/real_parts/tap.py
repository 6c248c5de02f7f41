"""A TCP relay between the agent's proxy and the engine that records when each piece passed."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes and the Unix time at which they passed."""

    data: bytes
    at: float


@dataclass(slots=True)
class TappedConnection:
    """Pieces to the engine, timed when read, and responses, timed before they are sent on."""

    requests: list[Piece] = field(default_factory=list)
    responses: list[Piece] = field(default_factory=list)


class Tap:
    """Relays every connection to one server while the block lasts."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        assert target.port is not None
        self._target = (target.hostname or "", target.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.connections: list[TappedConnection] = []
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def exchange(self, request_id: str) -> TappedConnection:
        """The pieces from the request with this X-Request-Id to the next one on its connection."""
        wanted = f"\r\nx-request-id: {request_id}\r\n".encode()
        for connection in tuple(self.connections):
            requests = tuple(connection.requests)
            for number, piece in enumerate(requests):
                if wanted in piece.data.lower():
                    until = min((later.at for later in requests[number + 1 :]), default=time.time())
                    responses = [one for one in connection.responses if piece.at <= one.at <= until]
                    return TappedConnection([piece], responses)
        raise AssertionError(f"no request {request_id} went to the engine")

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                connection = TappedConnection()
                self.connections.append(connection)
                self._open += [client, server]
                _relay(client, server, connection.requests)
                _relay(server, client, connection.responses)

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _relay(source: socket.socket, sink: socket.socket, passed: list[Piece]) -> None:
    """Copy until the source ends, in a thread of its own."""

    def copy() -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                passed.append(Piece(data, time.time()))
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    threading.Thread(target=copy, daemon=True).start()
