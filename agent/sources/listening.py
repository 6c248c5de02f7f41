"""Listening sockets, and uvicorn servers that run in the agent's own event loop."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from agent.errors import SettingsInvalid
from agent.sources.client_connection import BoundedProtocol
from agent.sources.socket_clients import SocketClients

_BACKLOG = 1024
# uvicorn's ticks between two sweeps of the clients: a second.
_SWEEP_TICKS = 10


def open_socket(
    setting: str, host: str, port: int, backlog: int = _BACKLOG, *, reuse_port: bool = False
) -> socket.socket:
    """Open a listening socket; port 0 takes a free one. Raises SettingsInvalid on failure.

    `backlog` is how many connections may wait until the agent takes them. With `reuse_port`
    several sockets of this user share the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=backlog, reuse_port=reuse_port
        )
    except OSError as error:
        reason = error.strerror or error
        raise SettingsInvalid(
            [f"{setting}: cannot listen on {host}:{port}: {reason}; choose another address"]
        ) from error


_STOP_WITHIN_S = 5
# Beyond its limit: uvicorn then ends by itself, unless it began to wait without a limit.
_FORCED_AFTER_S = 0.5

_OPTIONS: dict[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "access_log": False,
    "log_config": None,
}


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handling: the agent stops all its servers together."""

    def __init__(self, config: uvicorn.Config, clients: SocketClients) -> None:
        super().__init__(config)
        self._clients = clients

    async def on_tick(self, counter: int) -> bool:
        """Sweep the clients; uvicorn calls this ten times a second."""
        if counter % _SWEEP_TICKS == 0:
            self._clients.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield


class AsgiServer:
    """Serves one ASGI application on one socket, or on several of one address.

    `options` override uvicorn's.
    """

    def __init__(
        self,
        application: Any,
        listening: socket.socket | Sequence[socket.socket],
        clients: SocketClients | None = None,
        *,
        http: type[BoundedProtocol] = BoundedProtocol,
        **options: Any,
    ) -> None:
        clients = clients or SocketClients("listen")
        self._sockets = [listening] if isinstance(listening, socket.socket) else [*listening]
        if (send_buffer_bytes := clients.limits.send_buffer_bytes) is not None:
            for each in self._sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        protocol: Any = functools.partial(http, clients=clients)
        config = uvicorn.Config(application, http=protocol, **_OPTIONS | options)
        self._server = _EmbeddedServer(config, clients)
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Serve in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=self._sockets))

    async def stop(self, *, within_s: int | None = _STOP_WITHIN_S) -> None:
        """Accept no new requests, and wait until the open ones have ended or the limit is over.

        A wait that is cancelled lets them go on, and a later call can set a limit.
        """
        self._server.config.timeout_graceful_shutdown = within_s
        self._server.should_exit = True
        if self._serving is None:
            return
        try:
            async with asyncio.timeout(None if within_s is None else within_s + _FORCED_AFTER_S):
                await asyncio.shield(self._serving)
        except TimeoutError:
            self._server.force_exit = True
            await self._serving
