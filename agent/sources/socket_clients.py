"""The limits of one listening socket: how many clients it has, and how slow they may be."""

import fcntl
import logging
import select
import struct
import termios
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from agent.catalog.reasons import ClientCut

_LOG = logging.getLogger(__name__)

OnCut = Callable[[str, ClientCut], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits for the clients of one listening socket; times are in seconds.

    `head_s` is until the head of a request is complete, `body_s` the longest time without a byte of
    an incomplete body. In `unread_s` a client must take something of a response that waits for it.
    Responses that wait for their clients have `waiting_bytes` together; None is no limit.
    """

    connections: int = 256
    head_s: float = 30.0
    body_s: float = 60.0
    unread_s: float = 60.0
    waiting_bytes: int | None = None


class LimitedClient(Protocol):
    """A client's connection, as the limits see it."""

    idle_since_s: float | None

    def overdue(self, now_s: float) -> ClientCut | None:
        """Return the limit that the client exceeds."""

    def cut(self, reason: ClientCut) -> None:
        """Close the connection, with a response that says why where one can be sent."""

    def abort(self) -> None:
        """Close the connection at once."""

    def paused_descriptor(self) -> int | None:
        """Return the descriptor of a connection from which nothing is read now."""

    def unsent_bytes(self) -> int:
        """Return the size of what waits in the agent until the client reads."""


class SocketClients:
    """The clients of one listening socket. `sweep` must be called about every second.

    `name` is the setting with the address. `on_cut` counts each client that was cut off.
    """

    def __init__(
        self, name: str, limits: ClientLimits = ClientLimits(), on_cut: OnCut = lambda *_: None
    ) -> None:
        self.name = name
        self.limits = limits
        self._on_cut = on_cut
        self._clients: set[LimitedClient] = set()
        self._logged: set[ClientCut] = set()

    def enter(self, client: LimitedClient) -> None:
        """Take a new client. If there are too many, the client that is idle longest leaves.

        The new client leaves if no other is idle.
        """
        self._clients.add(client)
        # A client that was cut off is here until its connection is closed, and idle no more.
        if len(self._clients) > self.limits.connections:
            idle = [one for one in self._clients if one.idle_since_s is not None]
            self._cut(min(idle, key=lambda one: one.idle_since_s or 0.0), ClientCut.TOO_MANY)

    def leave(self, client: LimitedClient) -> None:
        """Forget a client whose connection is closed."""
        self._clients.discard(client)

    def sweep(self, now_s: float) -> None:
        """Cut off the clients that exceed a limit, and those that left unnoticed."""
        for client in list(self._clients):
            if (reason := client.overdue(now_s)) is not None:
                self._cut(client, reason)
        for client in _gone(self._clients):
            client.abort()

    def takes_response(self, size_bytes: int) -> bool:
        """Whether a response may wait for its client, next to those that wait already."""
        limit_bytes = self.limits.waiting_bytes
        if limit_bytes is None or size_bytes <= limit_bytes // self.limits.connections:
            return True
        waiting_bytes = sum(client.unsent_bytes() for client in self._clients)
        return waiting_bytes + size_bytes <= limit_bytes

    def count(self, reason: ClientCut) -> None:
        """Count a client that was cut off or refused; log the first one of each reason."""
        if reason not in self._logged:
            self._logged.add(reason)
            _LOG.warning("%s: a client was cut off (%s); logged once", self.name, reason)
        self._on_cut(self.name, reason)

    def _cut(self, client: LimitedClient, reason: ClientCut) -> None:
        client.cut(reason)
        self.count(reason)


def _gone(clients: Iterable[LimitedClient]) -> list[LimitedClient]:
    """Return the clients that left while nothing is read from their connections."""
    paused = {
        descriptor: client
        for client in clients
        if (descriptor := client.paused_descriptor()) is not None
    }
    if not paused:
        return []
    poll = select.poll()
    for descriptor in paused:
        poll.register(descriptor, select.POLLRDHUP)
    return [paused[descriptor] for descriptor, _ in poll.poll(0)]


def unacknowledged_bytes(descriptor: int) -> int:
    """Return the size of what the kernel holds until the other side takes it."""
    try:
        (size_bytes,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)))
    except OSError:
        # The connection is being closed.
        return 0
    return int(size_bytes)
