"""Sends records to the agent's socket, and never waits for the agent."""

import os
import socket
import stat
import time
from collections import deque

from goodput_agent_vllm.datagrams import HEADER, write_header

# A path, or one of these words: look for the socket, or send nothing. The agent has the same.
PATH_VARIABLE = "GOODPUT_AGENT_SOCKET"
AUTO, NONE = "auto", "none"

# Linux takes datagrams of 200 KB; for smaller ones the kernel needs less memory in one piece.
DATAGRAM_BYTES = 32_768
# 8 MB, or 7,000 requests that a middleware saw. When the agent is away for longer, the oldest are
# dropped.
WAITING_DATAGRAMS = 256
# One call of `send` sends at most this many datagrams: after a pause of the agent, more may wait.
_DATAGRAMS_PER_SEND = 8
# Records of this time are sent together. Waking the agent takes longer than the plugin's work in a
# step, and an agent on the engine's processors takes this time from the engine.
PAUSE_S = 0.2
# Seconds until the next attempt: the agent's queue was full, or the agent is away.
_FULL_S = 0.02
_AWAY_S = 1.0


def default_places() -> "tuple[str, ...]":
    """Where the agent's socket is looked for without the variable, in this order.

    The agent has the same (`agent/sources/plugin_sockets.py`).
    """
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    folders = ("/run/goodput-agent", f"{runtime}/goodput-agent", f"/tmp/goodput-agent-{uid}")
    return tuple(f"{folder}/vllm.sock" for folder in folders)


def _is_private(path: str) -> bool:
    """Whether no other user can have made what is in the folder of a path."""
    try:
        found = os.lstat(os.path.dirname(path))
    except OSError:
        return False
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return own and not found.st_mode & 0o022


class _Datagram:
    """Records that are sent together; `body` begins with room for the header."""

    __slots__ = ("body", "first", "records")

    def __init__(self, first: int) -> None:
        self.first = first
        self.records = 0
        self.body = bytearray(HEADER.size)


class Sender:
    """Numbers records, puts them into datagrams and sends these. For one thread.

    While the agent does not read, records wait in up to WAITING_DATAGRAMS datagrams. Beyond that
    the oldest datagram is dropped, and its records are counted in all later headers.

    `path` is the agent's socket. Without a given one, it is the place that took a datagram last,
    and None before the first.
    """

    def __init__(self, path: str | None = None, pause_s: float = PAUSE_S) -> None:
        """`path` is the agent's socket; None takes it from the environment, or looks for it."""
        self._pause_s = pause_s
        given = path or os.environ.get(PATH_VARIABLE) or AUTO
        self.path = None if given in (AUTO, NONE) else given
        self._places = default_places() if given == AUTO else (self.path,)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._sendto = self._socket.sendto
        self._run = int.from_bytes(os.urandom(8), "little")
        self._next = 0
        self._waiting: deque[_Datagram] = deque()
        self._next_at = 0.0
        self.dropped = 0

    def add(self, record: bytes) -> None:
        """Number a record and let it wait for the next `send`."""
        last = self._waiting[-1] if self._waiting else None
        if last is None or len(last.body) + len(record) > DATAGRAM_BYTES:
            if len(self._waiting) >= WAITING_DATAGRAMS:
                self.dropped += self._waiting.popleft().records
            last = _Datagram(self._next)
            self._waiting.append(last)
        last.body += record
        last.records += 1
        self._next += 1

    def send(self) -> float | None:
        """Send waiting datagrams while the agent takes them.

        Returns the seconds until the next attempt; None where no datagram waits any more.
        """
        now, waiting = time.monotonic(), self._waiting
        if now < self._next_at:
            return self._next_at - now
        pause_s = self._pause_s
        for _ in range(_DATAGRAMS_PER_SEND):
            if not waiting:
                break
            refused_s = self._sent(waiting[0])
            if refused_s:
                pause_s = refused_s
                break
            waiting.popleft()
        self._next_at = now + pause_s
        return pause_s if waiting else None

    def flush(self) -> float | None:
        """Send waiting datagrams now: something happened that must not be lost."""
        self._next_at = 0.0
        return self.send()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _sent(self, datagram: _Datagram) -> float:
        """Send a datagram; returns 0, or the seconds until the next attempt where it failed."""
        body = datagram.body
        write_header(body, self._run, datagram.records, datagram.first, self.dropped)
        for place in dict.fromkeys((self.path, *self._places)):
            if place is None or (place in self._places[1:] and not _is_private(place)):
                continue
            try:
                self._sendto(body, place)
            except BlockingIOError:
                self.path = place
                return _FULL_S
            except OSError:
                # No agent, or one that this user may not write to.
                continue
            self.path = place
            return 0.0
        return _AWAY_S
