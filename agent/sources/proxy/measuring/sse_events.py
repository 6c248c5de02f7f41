"""Splits a byte stream into server-sent events (SSE), wherever the pieces are cut.

WHATWG HTML, "Server-sent events": a line ends with CR LF, LF or CR, an event with an empty line.
U+2028, U+2029 and U+0085 end no line: generated text contains them unescaped.
"""

import re

# A longer event passes in pieces and is not read.
MAX_EVENT_BYTES = 2 << 20

# Only the next byte shows whether a CR ends a line by itself.
_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?=[^\n]))")
_LF = ord("\n")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4
_DATA = b"data: "
_BETWEEN_DATA = b"\n\n" + _DATA
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventSplitter:
    """Splits a stream into events; joined, they are the bytes that went in."""

    __slots__ = ("_plain", "_rest", "_searched")

    def __init__(self) -> None:
        self._rest = bytearray()
        self._searched = 0
        # Whether all lines so far end with LF alone, which is much faster to find.
        self._plain = True

    @property
    def waiting(self) -> bool:
        """Whether an event is incomplete."""
        return bool(self._rest)

    @property
    def rest(self) -> bytes:
        """The bytes after the last complete event."""
        return bytes(self._rest)

    def split(self, data: bytes) -> list[bytes]:
        """Return the events completed by these bytes, each with its empty line."""
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
        """Return the bytes after the last complete event and forget them."""
        rest = self.rest
        self._rest.clear()
        self._searched = 0
        return rest


def only_data(piece: bytes) -> bytes | None:
    """Return the data of a piece that is one event of one data line, as nearly all are."""
    end = len(piece) - 2
    if piece.startswith(b"data: ") and piece.find(b"\n\n") == end == piece.find(b"\n"):
        return None if b"\r" in piece else piece[6:end]
    return None


def data_lines(events: bytes) -> bytes | None:
    """Return the data of whole events, one a line; None unless they are events of one data line.

    Other events may be among them, whose lines are then no JSON.
    """
    if events.startswith(_DATA) and events.endswith(b"\n\n"):
        return events[len(_DATA) : -2].replace(_BETWEEN_DATA, b"\n")
    return None


def data_of(event: bytes) -> bytes | None:
    """Return the data lines of an event, joined; None for a comment or an event without data."""
    data = only_data(event)
    if data is not None:
        return data
    for line in _LINE_END.split(event.removeprefix(_BYTE_ORDER_MARK)):
        if line.startswith(b"data:"):
            value = line[6:] if line.startswith(b"data: ") else line[5:]
            data = value if data is None else data + b"\n" + value
    return data
