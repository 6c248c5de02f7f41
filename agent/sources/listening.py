"""Listening sockets, their TLS, and uvicorn servers that run in the agent's own event loop."""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import uvicorn

from agent.errors import SettingsInvalid
from agent.settings.named_files import follow, read_named_file
from agent.sources.client_connection import BoundedProtocol, SocketClients

_LOG = logging.getLogger(__name__)


class TlsFiles:
    """A certificate and its key. New ones are used as soon as both fit each other."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises SettingsInvalid."""
        self._files = (certificate, key)
        self._problem: str | None = None
        try:
            self._pem = self._read()
            self._newest = self._context(self._pem)
        except (OSError, ValueError) as error:
            raise SettingsInvalid(
                [f"security.tls_certificate: {certificate} and {key} cannot be used: {error}"]
            ) from error

    def follow(self) -> None:
        """Read the files every second from now on, in a thread of its own."""
        follow(self.refresh, str(self._files[0]))

    def refresh(self) -> None:
        """Read the files now. If they cannot be used, the former ones stay in use."""
        problem = None
        try:
            pem = self._read()
            if pem != self._pem:
                self._newest, self._pem = self._context(pem), pem
                _LOG.info("the TLS certificate was read again")
        except (OSError, ValueError) as error:
            problem = f"the new TLS files cannot be used, and the former stay: {error}"
        if problem not in (None, self._problem):
            _LOG.warning(problem)
        self._problem = problem

    def context(self) -> ssl.SSLContext:
        """A context for servers, which takes the newest certificate at each handshake."""
        return self._newest

    def credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC."""
        return grpc.dynamic_ssl_server_credentials(
            self._of_grpc(), self._of_grpc, require_client_authentication=False
        )

    def _use_newest(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _of_grpc(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._pem
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def _read(self) -> Sequence[bytes]:
        return [_content(file) for file in self._files]

    def _context(self, pem: Sequence[bytes]) -> ssl.SSLContext:
        """Raises ssl.SSLError, an OSError, or ValueError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The library reads files alone: these are in memory.
        copies = [os.memfd_create("pem") for _ in pem]
        try:
            for copy, content in zip(copies, pem, strict=True):
                os.write(copy, content)
            certificate, key = (f"/proc/self/fd/{copy}" for copy in copies)
            # Without a password it would ask for one at the terminal.
            context.load_cert_chain(certificate, key, password="")
        finally:
            for copy in copies:
                os.close(copy)
        context.sni_callback = self._use_newest
        return context


def _content(file: Path) -> bytes:
    try:
        return read_named_file(file)
    except OSError as error:
        raise OSError(f"{file}: {error}") from error


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


async def sweep_regularly(clients: SocketClients) -> None:
    """Apply the limits for clients until cancelled."""
    while True:
        clients.sweep(asyncio.get_running_loop().time())
        await asyncio.sleep(_SWEEP_EVERY_S)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn without its signal handling: the agent stops all its servers together."""

    def __init__(self, config: uvicorn.Config, clients: SocketClients) -> None:
        super().__init__(config)
        self._clients = clients

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until the last client has left; the limits hold for those that are left, too."""
        sweeping = asyncio.create_task(sweep_regularly(self._clients))
        try:
            await super().serve(sockets)
        finally:
            sweeping.cancel()

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
        **options: Any,
    ) -> None:
        clients = clients or SocketClients("listen")
        self._sockets = [listening] if isinstance(listening, socket.socket) else [*listening]
        if (send_buffer_bytes := clients.limits.send_buffer_bytes) is not None:
            for each in self._sockets:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        protocol: Any = functools.partial(BoundedProtocol, clients=clients)
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
