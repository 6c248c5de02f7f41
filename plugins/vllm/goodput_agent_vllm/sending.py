"""Sends records to the agent's socket, and never waits for the agent."""

import os
import socket
import time
from collections import deque

from goodput_agent_vllm.datagrams import HEADER, write_header

PATH_VARIABLE = "GOODPUT_AGENT_SOCKET"
DEFAULT_PATH = "/run/goodput-agent/vllm.sock"

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
    """

    def __init__(self, path: str | None = None, pause_s: float = PAUSE_S) -> None:
        """`path` is the agent's socket; None takes it from the environment, or DEFAULT_PATH."""
        self._pause_s = pause_s
        self.path = path or os.environ.get(PATH_VARIABLE) or DEFAULT_PATH
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
        try:
            self._sendto(body, self.path)
        except BlockingIOError:
            return _FULL_S
        except OSError:
            # No agent, or one that this user may not write to.
            return _AWAY_S
        return 0.0
