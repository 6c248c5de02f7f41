"""The memory in which bodies of requests wait until they are read and sent on."""


class BodyRoom:
    """Room for the bodies of all requests together.

    One body may take as much as is still free after it, so that a few large ones never take the
    room from the small ones: N bodies of any size leave a part in N + 1 of the room free.
    """

    __slots__ = ("_free_bytes",)

    def __init__(self, total_bytes: int) -> None:
        self._free_bytes = total_bytes

    def has(self, size_bytes: int) -> bool:
        """Whether a body of this size may take room now."""
        return 2 * size_bytes <= self._free_bytes

    def take(self, held_bytes: int, more_bytes: int) -> bool:
        """Take more room for a body that holds some; False if it may not have it."""
        if held_bytes + more_bytes > self._free_bytes - more_bytes:
            return False
        self._free_bytes -= more_bytes
        return True

    def give_back(self, held_bytes: int) -> None:
        """Free the room of a body."""
        self._free_bytes += held_bytes
