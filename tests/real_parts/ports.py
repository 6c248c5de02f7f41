"""Free TCP ports for the servers that tests start."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import suppress

# Below the ports that the kernel gives to connections (Linux: 32,768 and above): until the server
# has started, one of these could take the port.
_FROM, _UNTIL = 10_240, 32_768


def _ports() -> Iterator[int]:
    """Every port once, in an order of this process alone."""
    yield from random.Random(os.getpid()).sample(range(_FROM, _UNTIL), _UNTIL - _FROM)


_left = _ports()


def free_port() -> int:
    """A free TCP port of the loopback interface, another one at each call."""
    for port in _left:
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("this process has used all ports")
