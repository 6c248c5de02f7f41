"""Gives the memory of large bodies back to the system, which glibc would keep for later."""

import ctypes
from contextlib import suppress

# malloc.h of glibc. Other C libraries lack these functions.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# What is larger has pages of its own. glibc raises the limit to 32 MiB by and by, and the holes
# between small blocks stay: after three bursts of large exports the agent had 600 MiB, not 350.
_BLOCK_BYTES = 1024 * 1024

_libc = ctypes.CDLL(None)


def give_back_large_blocks() -> None:
    """Give large blocks back as soon as they are freed, in this whole process."""
    with suppress(AttributeError):
        _libc.mallopt(_M_MMAP_THRESHOLD, _BLOCK_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _BLOCK_BYTES)
