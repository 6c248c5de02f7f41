"""Free TCP ports for the servers that tests start."""

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Below the ports that the kernel gives to connections (Linux: 32,768 and above): until the server
# has started, one of these could take the port.
_FROM, _UNTIL = 10_240, 32_768
# Each process of tests has ports of its own: while a test has its server down, a server of another
# must not answer in its place.
_PER_PROCESS = 704


def _own_ports() -> range:
    for start in range(_FROM, _UNTIL, _PER_PROCESS):
        path = Path(tempfile.gettempdir(), f"goodput-agent-tests-ports-{start}")
        # It stays open, and locked, until the process ends.
        file = os.open(path, os.O_CREAT | os.O_RDWR)
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return range(start, start + _PER_PROCESS)
        os.close(file)
    raise AssertionError("all ports belong to other processes of tests")


def _ports() -> Iterator[int]:
    """All ports of this process in turn, in an order that begins anywhere."""
    own = _own_ports()
    while True:
        yield from random.sample(own, len(own))


_left = _ports()


def free_port() -> int:
    """A free TCP port of the loopback interface, another one at each of 704 calls."""
    for _ in range(_PER_PROCESS):
        port = next(_left)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("all ports of this process are taken")
