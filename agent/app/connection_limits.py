"""How many clients each listening socket may have, so that none takes descriptors of another."""

import resource
from collections.abc import Mapping
from dataclasses import replace

from agent.sources.proxy.proxy_server import UNREAD_S
from agent.sources.socket_clients import ClientLimits, OnCut, SocketClients

# For the database, engines, logs, forwarding and GPUs.
_OWN_DESCRIPTORS = 128
_MOST_DESCRIPTORS = 16_384

# The settings with the addresses.
API, OTLP_HTTP, OTLP_GRPC, PROXY = "listen", "otlp.http", "otlp.grpc", "proxy.listen"
# Connections where descriptors are plenty, as in most containers.
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
# The kernel's part of each response of the API: it would take several MiB, which nobody counts.
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

    def __init__(self, descriptors: int, on_cut: OnCut) -> None:
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
