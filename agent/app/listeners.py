"""The addresses on which an agent listens, with their limits, the check of access, and TLS."""

import asyncio
import logging
import resource
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.http_client import client_tls, read_client_tls
from agent.settings import Settings
from agent.settings.access import AccessPolicy, TokenFile, known_hosts
from agent.settings.values import host_and_port
from agent.sources.client_connection import ClientLimits, OnCut, SocketClients
from agent.sources.listening import AsgiServer, TlsFiles, open_socket
from agent.sources.otlp.grpc import OtlpGrpc
from agent.sources.otlp.http import OtlpHttp
from agent.sources.otlp.receiver import Receiver
from agent.sources.proxy.reverse_proxy import UNREAD_S

# For the database, engines, logs, forwarding and GPUs.
_OWN_DESCRIPTORS = 128
_MOST_DESCRIPTORS = 16_384

# The settings with the addresses.
API, OTLP_HTTP, OTLP_GRPC, PROXY = "listen", "otlp.http", "otlp.grpc", "proxy.listen"
# Connections if descriptors are plenty, as in most containers.
_MOST: Mapping[str, int] = {API: 256, OTLP_HTTP: 512, OTLP_GRPC: 256, PROXY: 4096}
_LEAST = 4
# Of the remaining descriptors, a socket other than the proxy's has this part at most.
_SHARE = 16
# Half as many connections may wait to be accepted, and are then accepted at once. A client of the
# proxy also needs a connection to an engine.
_DESCRIPTORS_EACH = 1.5
_DESCRIPTORS_EACH_PROXIED = 2.5

# What waits for clients that do not read; a page of 1,000 requests has up to 7 MB.
_UNREAD_BYTES = 32 * 1024 * 1024
# The kernel's part of each response of the API: it would take several MiB, which are not counted.
_SEND_BUFFER_BYTES = 128 * 1024
# Of the proxy: requests that are not answered. A usual request takes a tenth of an equal part.
_REQUESTS_BYTES = 48 * 1024 * 1024


def raise_descriptors() -> int:
    """Raise the soft limit of descriptors as far as the hard one allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


def connections(descriptors: int) -> Mapping[str, int]:
    """Return the most connections of each socket, by the setting with its address."""
    free = max(descriptors - _OWN_DESCRIPTORS, descriptors // 2)
    others = {setting: most for setting, most in _MOST.items() if setting != PROXY}
    limits = {setting: max(_LEAST, min(most, free // _SHARE)) for setting, most in others.items()}
    rest = free - int(sum(limits.values()) * _DESCRIPTORS_EACH)
    limits[PROXY] = max(_LEAST, min(_MOST[PROXY], int(rest / _DESCRIPTORS_EACH_PROXIED)))
    return limits


# The limits of HTTP, but for the number of connections.
LIMITS: Mapping[str, ClientLimits] = {
    API: ClientLimits(unread_bytes=_UNREAD_BYTES, send_buffer_bytes=_SEND_BUFFER_BYTES),
    OTLP_HTTP: ClientLimits(),
    PROXY: ClientLimits(
        unread_s=UNREAD_S, unread_bytes=_UNREAD_BYTES, requests_bytes=_REQUESTS_BYTES
    ),
}


class ConnectionLimits:
    """The connections of one agent, divided among its listening sockets."""

    def __init__(self, descriptors: int, on_cut: OnCut | None = None) -> None:
        self.most = connections(descriptors)
        self._on_cut = on_cut

    def clients(self, setting: str) -> SocketClients:
        """Return the clients of a socket, none yet."""
        limits = replace(LIMITS[setting], connections=self.most[setting])
        return SocketClients(setting, limits, self._on_cut)

    def proxied(self, workers: int) -> SocketClients:
        """Return the clients of one of the proxy's workers, which share its limits."""
        usual = LIMITS[PROXY]
        limits = replace(
            usual,
            connections=max(_LEAST, self.most[PROXY] // workers),
            unread_bytes=(usual.unread_bytes or _UNREAD_BYTES) // workers,
            requests_bytes=usual.requests_bytes // workers,
        )
        return SocketClients(PROXY, limits, self._on_cut)

    def backlog(self, setting: str) -> int:
        """Return how many connections may wait to be accepted."""
        return self.most[setting] // 2


_LOG = logging.getLogger(__name__)


class Listeners:
    """The servers of the API and of spans; `access` is the check of the API."""

    def __init__(self, settings: Settings, limits: ConnectionLimits) -> None:
        """Read the files of tokens and of TLS. Raises SettingsInvalid."""
        security, self._otlp = settings.security, settings.otlp
        self._allowed = security.allowed_hosts
        read_tokens = _tokens("security.read_tokens", security.read_tokens)
        self.access = self._access_policy(settings.listen.host, read_tokens)
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
        if what == API:
            scheme = "http" if self._tls is None else "https"
            _LOG.info("page: %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, server.port)
        self._servers.append(server)

    def _access_policy(self, host: str, tokens: TokenFile | None) -> AccessPolicy:
        # A page of another site has no token, by whatever name it calls.
        return AccessPolicy(None if tokens else known_hosts(host, self._allowed), tokens)

    async def receive(self, receiver: Receiver) -> None:
        """Listen for spans. Raises SettingsInvalid for a taken port."""
        http, grpc = self._otlp.http, self._otlp.grpc
        if http is not None:
            host, port = host_and_port(http)
            access = self._access_policy(host, self._ingest)
            self.serve(OTLP_HTTP, OtlpHttp(receiver, access=access), host, port)
        if grpc is not None:
            self._grpc = OtlpGrpc(
                receiver,
                grpc,
                access=AccessPolicy(tokens=self._ingest),
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
