"""The limits of one listening socket: how many clients it has, and how slow they may be."""

import fcntl
import logging
import math
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
    If there are too many, who does nothing for `stalls_s` gives way to a new one.
    Responses that wait for their clients have `unread_bytes` together; None is no limit. Beyond it,
    slow clients are cut off, those for which most waits first: who took nothing for `stalls_s`, or
    for whom something waits for `slow_s`. Requests that are not answered have `requests_bytes`
    together; beyond it, each client has an equal part. `send_buffer_bytes` of a response may wait
    in the kernel; None leaves it to the kernel, which takes several MiB.
    """

    connections: int = 256
    head_s: float = 30.0
    body_s: float = 60.0
    unread_s: float = 60.0
    stalls_s: float = 1.0
    slow_s: float = 10.0
    unread_bytes: int | None = None
    requests_bytes: int = 8 * 1024 * 1024
    send_buffer_bytes: int | None = None


class LimitedClient(Protocol):
    """A client's connection, as the limits see it."""

    idle_since_s: float | None

    @property
    def stalled_since_s(self) -> float | None:
        """Return since when it neither sends the rest of a body nor takes its response."""

    def overdue(self, now_s: float) -> ClientCut | None:
        """Return the limit that the client exceeds."""

    def cut(self, reason: ClientCut) -> None:
        """Close the connection, with a response that says why, if one can be sent."""

    def abort(self) -> None:
        """Close the connection at once."""

    def paused_descriptor(self) -> int | None:
        """Return the descriptor of a connection from which nothing is read now."""

    def unsent_bytes(self) -> int:
        """Return the size of what waits in the agent until the client reads."""

    def is_slow(self, now_s: float) -> bool:
        """Return whether the client takes its response too slowly, as the last sweep saw it."""


class SocketClients:
    """The clients of one listening socket. `sweep` must be called about every second.

    `name` is the setting with the address. `on_cut` counts each client that was cut off.
    """

    def __init__(
        self, name: str, limits: ClientLimits = ClientLimits(), on_cut: OnCut = lambda *_: None
    ) -> None:
        self.name = name
        self.limits = limits
        # What the clients' requests take now, without the bodies that are read.
        self.held_bytes = 0
        self._on_cut = on_cut
        self._clients: set[LimitedClient] = set()
        self._logged: set[ClientCut] = set()

    def enter(self, client: LimitedClient) -> None:
        """Take a new client. If there are too many, the client that is idle longest leaves, or the
        one that stalls longest.

        The new client leaves if no other is idle or stalls.
        """
        self._clients.add(client)
        # A client that was cut off stays here until its connection is closed, but is not idle.
        if len(self._clients) > self.limits.connections:
            self._cut(self._longest_idle(client), ClientCut.TOO_MANY)

    def _longest_idle(self, newest: LimitedClient) -> LimitedClient:
        idle = [one for one in self._clients if one.idle_since_s is not None]
        found = min(idle, key=lambda one: one.idle_since_s or 0.0)
        if found is not newest:
            return found
        before_s = (newest.idle_since_s or 0.0) - self.limits.stalls_s
        stalled = [(one.stalled_since_s or math.inf, one) for one in self._clients]
        since_s, longest = min(stalled, key=lambda each: each[0])
        return longest if since_s <= before_s else newest

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
        if self.limits.unread_bytes is not None:
            self._cut_unread(self.limits.unread_bytes, now_s)

    def may_hold(self, size_bytes: int) -> bool:
        """Whether a client's requests may take `size_bytes`, which are in `held_bytes` already.

        Each client may always take an equal part of the whole, so large requests never keep small
        ones out.
        """
        whole_bytes, most = self.limits.requests_bytes, self.limits.connections
        return self.held_bytes <= whole_bytes or size_bytes <= whole_bytes // most

    def _cut_unread(self, limit_bytes: int, now_s: float) -> None:
        unsent = [(client.unsent_bytes(), client) for client in self._clients]
        excess_bytes = sum(size_bytes for size_bytes, _ in unsent) - limit_bytes
        # Never a response that was just made: the limit is for clients that do not take it.
        slow = [each for each in unsent if each[0] and each[1].is_slow(now_s)]
        for size_bytes, client in sorted(slow, key=lambda each: -each[0]):
            if excess_bytes <= 0:
                return
            self._cut(client, ClientCut.RESPONSES_WAIT)
            excess_bytes -= size_bytes

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
