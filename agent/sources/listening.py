"""Listening sockets, and uvicorn servers that run in the agent's own event loop."""

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn

from agent.errors import SettingsInvalid
from agent.sources.client_connection import BoundedProtocol, SocketClients

_LOG = logging.getLogger(__name__)

_BACKLOG = 1024
_SWEEP_EVERY_S = 1.0
_CLOSED_CHECK_S = 0.01


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


_STOP_WITHIN_S = 5.0

# Longer than most senders are idle: OpenTelemetry's exporters send every 5 s, uvicorn's own time,
# and would send into connections that are being closed.
_IDLE_S = 75

_OPTIONS: dict[str, Any] = {
    "timeout_keep_alive": _IDLE_S,
    "interface": "asgi3",
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

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the last client has left; the limits hold for those that are left, too."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            await super().serve(sockets)
        finally:
            sweeping.cancel()

    async def _sweep(self) -> None:
        while True:
            self._clients.sweep(asyncio.get_running_loop().time())
            await asyncio.sleep(_SWEEP_EVERY_S)

    async def cut_off(self) -> None:
        """Close the connections of all clients, then end what is done for them."""
        for connection in [*self.server_state.connections]:
            connection.transport.abort()
        while self.server_state.connections:
            await asyncio.sleep(_CLOSED_CHECK_S)
        self.force_exit = True
        for task in self.server_state.tasks:
            task.cancel()

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
        self._application, self._name = application, clients.name
        config = uvicorn.Config(self._serve, http=protocol, **_OPTIONS | options)
        self._server = _EmbeddedServer(config, clients)
        self._serving: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The port of the address."""
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Serve in the running event loop."""
        self._serving = asyncio.create_task(self._server.serve(sockets=self._sockets))

    async def stop(self, *, within_s: float | None = _STOP_WITHIN_S) -> None:
        """Accept no new requests, and wait until the open ones have ended or the limit is over.

        Clients that are left then are cut off. A wait that is cancelled lets them go on, and a
        later call can set a limit.
        """
        self._server.should_exit = True
        if self._serving is None:
            return
        try:
            async with asyncio.timeout(within_s):
                await asyncio.shield(self._serving)
        except TimeoutError:
            left = len(self._server.server_state.connections)
            _LOG.warning("%s: %d clients were cut off after %g s", self._name, left, within_s)
            await self._server.cut_off()
            await self._serving

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await self._application(scope, receive, send)
        except asyncio.CancelledError:
            # uvicorn would log the request of a client that was cut off as an error.
            if not self._server.force_exit:
                raise
