"""The addresses on which an agent listens, with the check of who may come in, and TLS."""

import asyncio
import logging
from pathlib import Path
from typing import Any

from agent.app.connection_limits import OTLP_GRPC, OTLP_HTTP, ConnectionLimits
from agent.http_client import client_tls, read_client_tls
from agent.settings import Settings
from agent.settings.access import Door, TokenFile, known_hosts
from agent.settings.values import host_and_port
from agent.sources.listening import AsgiServer, open_socket
from agent.sources.otlp.grpc import OtlpGrpc
from agent.sources.otlp.http import OtlpHttp
from agent.sources.otlp.receiver import Receiver
from agent.sources.tls import TlsFiles

_LOG = logging.getLogger(__name__)


class Doors:
    """The servers of the API and of spans; `read` is the door of the API."""

    def __init__(self, settings: Settings, limits: ConnectionLimits) -> None:
        """Read the files of tokens and of TLS. Raises SettingsInvalid."""
        security, self._otlp = settings.security, settings.otlp
        self._allowed = security.allowed_hosts
        read_tokens = _tokens("security.read_tokens", security.read_tokens)
        self.read = self._door(settings.listen.host, read_tokens)
        self._ingest = _tokens("security.ingest_tokens", security.ingest_tokens)
        self._tls = tls_files(settings)
        if self._tls is not None:
            self._tls.follow()
        self._limits = limits
        self._servers: list[AsgiServer] = []
        self._grpc: OtlpGrpc | None = None

    def serve(self, what: str, application: Any, host: str, port: int) -> None:
        """Serve an application until `stop`. Raises SettingsInvalid for a taken port."""
        listening = open_socket(what, host, port, self._limits.backlog(what))
        clients = self._limits.clients(what)
        server = AsgiServer(application, listening, clients, **tls_options(self._tls))
        server.start()
        _LOG.info("%s: listening on %s:%d", what, host, server.port)
        self._servers.append(server)

    def _door(self, host: str, tokens: TokenFile | None) -> Door:
        # A page of another site has no token, by whatever name it calls.
        return Door(None if tokens else known_hosts(host, self._allowed), tokens)

    async def receive(self, receiver: Receiver) -> None:
        """Listen for spans. Raises SettingsInvalid for a taken port."""
        http, grpc = self._otlp.http, self._otlp.grpc
        if http is not None:
            host, port = host_and_port(http)
            door = self._door(host, self._ingest)
            self.serve(OTLP_HTTP, OtlpHttp(receiver, door=door), host, port)
        if grpc is not None:
            self._grpc = OtlpGrpc(
                receiver,
                grpc,
                door=Door(tokens=self._ingest),
                tls=self._tls,
                connections=self._limits.most[OTLP_GRPC],
            )
            await self._grpc.start()
            _LOG.info("otlp.grpc: listening on %s, port %d", grpc, self._grpc.port)

    async def stop(self, grace_s: float) -> None:
        """Take no more requests; running exports have `grace_s` to end."""
        grpc = [] if self._grpc is None else [self._grpc.stop(grace_s)]
        await asyncio.gather(*grpc, *(server.stop() for server in self._servers))


def tls_files(settings: Settings) -> TlsFiles | None:
    """The certificate and its key, if the addresses have TLS.

    Raises SettingsInvalid, also for the file of authorities.
    """
    # The file may have changed since this process read it.
    read_client_tls(settings.tls.ca)
    client_tls(settings.tls.ca)
    security = settings.security
    if security.tls_certificate is None or security.tls_key is None:
        return None
    return TlsFiles(security.tls_certificate, security.tls_key)


def tls_options(tls: TlsFiles | None) -> dict[str, Any]:
    """Options of an HTTP server with TLS; none without files."""
    return {} if tls is None else {"ssl_context_factory": lambda *_: tls.context()}


def _tokens(setting: str, path: Path | None) -> TokenFile | None:
    if path is None:
        return None
    tokens = TokenFile(setting, path)
    tokens.follow()
    return tokens
