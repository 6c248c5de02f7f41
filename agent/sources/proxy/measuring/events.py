"""Server-sent events out of a byte stream that is cut anywhere.

WHATWG HTML, "Server-sent events": a line ends with CR LF, LF or CR, an event with an empty line.
Nothing else ends a line: U+2028, U+2029 and U+0085 stand unescaped in generated text.
"""

import re

# A longer event is let pass in pieces, none of which is read.
MAX_EVENT_BYTES = 2 << 20

# Whether a CR ends a line by itself is known by the next byte only.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?=[^\n]))")
_LF = ord("\n")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventSplitter:
    """Cuts a stream into events; all that comes out is, put together, what went in."""

    __slots__ = ("_plain", "_rest", "_searched")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        # Whether LF alone ended all lines so far, which is found much faster.
        self._plain = True

    @property
    def waiting(self) -> bool:
        """Whether the beginning of an event waits for the rest of it."""
        return bool(self._rest)

    @property
    def rest(self) -> bytes:
        """The bytes after the last complete event."""
        return bytes(self._rest)

    def split(self, data: bytes) -> list[bytes]:
        """The events that are complete with these bytes, each with its empty line."""
        rest = self._rest
        self._plain = self._plain and b"\r" not in data
        if self._plain and not rest and data.find(b"\n") == len(data) - 2 and data[-1] == _LF:
            return [data]
        rest += data
        events: list[bytes] = []
        begin = 0
        while end := self._next_end():
            events.append(bytes(rest[begin:end]))
            begin = self._searched = end
        if len(rest) - begin > MAX_EVENT_BYTES:
            events.append(bytes(rest[begin:]))
            begin = len(rest)
        del rest[:begin]
        self._searched = max(0, len(rest) - _LONGEST_END)
        return events

    def _next_end(self) -> int | None:
        if self._plain:
            at = self._rest.find(b"\n\n", self._searched)
            return None if at < 0 else at + 2
        end = _END.search(self._rest, self._searched)
        return end.end() if end else None

    def take_rest(self) -> bytes:
        """The bytes after the last complete event, which are forgotten here."""
        rest = self.rest
        self._rest.clear()
        self._searched = 0
        return rest


def data_of(event: bytes) -> bytes | None:
    """What an event carries in its data lines; None for a comment or an event without data."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    carried = None
    for line in _LINE_END.split(event.removeprefix(_BYTE_ORDER_MARK)):
        if line.startswith(b"data:"):
            value = line[6:] if line.startswith(b"data: ") else line[5:]
            carried = value if carried is None else carried + b"\n" + value
    return carried
