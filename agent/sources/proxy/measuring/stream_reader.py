"""Reads a stream of server-sent events (SSE) as it passes.

WHATWG HTML, "Server-sent events": a line ends with CR LF, LF or CR, an event with an empty line.
U+2028, U+2029 and U+0085 end no line: generated text contains them unescaped.

Usage that only the proxy asked for is removed. vLLM 0.32
(`vllm/entrypoints/openai/{chat_completion,completion}/serving.py`) does the following. With
`include_usage`, one event without choices follows the last one, and has the `system_fingerprint`
that otherwise is in the event of the finish reason. With `continuous_usage_stats`, each event has a
key `usage`. No event gets `"usage":null`: engines that write it do so without being asked.
"""

import json
import re
from collections.abc import Sequence

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.exchange import Reads
from agent.sources.proxy.measuring.api_protocols import ApiProtocol
from agent.sources.proxy.measuring.json_values import json_keys, remove_key
from agent.sources.proxy.measuring.parsed_event import NOTHING, VISIBLE_TOKEN, ParsedEvent
from agent.sources.proxy.measuring.response_readers import ResponseFindings

# A longer event passes in pieces and is not read.
MAX_EVENT_BYTES = 2 << 20

# Only the next byte shows whether a CR ends a line by itself.
_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?=[^\n]))")
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
        end = _BLANK_LINE.search(self._rest, self._searched)
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
    if piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.find(b"\n") == end:
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


_DECODER = json.JSONDecoder()
_USAGE_NAME = b'"usage"'
_USAGE = re.compile(rb',[ \t]*"usage"[ \t]*:[ \t]*')
_FINGERPRINT = re.compile(rb'"system_fingerprint"\s*:\s*"(?:[^"\\]|\\.)*"')


class UsageStripper:
    """Rewrites the events of a stream of one choice to what the client asked for.

    The event with the finish reason is held until the next event: an engine that counts sends that
    one right after it, and the held event gets the next event's fingerprint.
    """

    __slots__ = ("_final", "each", "held")

    def __init__(self, *, final: bool, each: bool) -> None:
        self.each = each
        self.held = b""
        self._final = final

    def stripped(self, event: bytes, parsed: ParsedEvent) -> bytes:
        """Return the bytes for the client after this event: none, one, or several events."""
        if self._final and parsed.usage is not None:
            if parsed.usage_only:
                return self._finish(event)
            # An engine that counts in each event without being asked does so for any client.
            self._final = self.each
        strip = self.each and parsed.usage and not parsed.usage_only
        kept = _without_usage(event) if strip else event
        if self._final and parsed.finish_reasons:
            held, self.held = self.held, kept
            return held
        return self.take_held() + kept

    def take_held(self) -> bytes:
        """Return the held event and forget it."""
        held, self.held = self.held, b""
        return held

    def _finish(self, event: bytes) -> bytes:
        fingerprint = _FINGERPRINT.search(event)
        return _with_fingerprint(self.take_held(), fingerprint[0] if fingerprint else None)


def _with_fingerprint(event: bytes, fingerprint: bytes | None) -> bytes:
    if not event or fingerprint is None or b'"system_fingerprint"' in event:
        return event
    end = event.rindex(b"}")
    return event[:end] + b"," + fingerprint + event[end:]


def _without_usage(event: bytes) -> bytes:
    match = _USAGE.search(event)
    # Its name occurs once, so it is the key that was read.
    if match and event.count(_USAGE_NAME) == 1 and only_data(event) is not None:
        rest = event[match.end() :].decode()
        _, end = _DECODER.raw_decode(rest)
        return event[: match.start()] + rest[end:].encode()
    return _with_key_removed(event)


def _with_key_removed(event: bytes) -> bytes:
    data = data_of(event)
    if data is None or data not in event:
        # The data spans several lines. No known engine writes that.
        return event
    text = data.decode()
    return event.replace(data, remove_key(text, json_keys(text), "usage").encode())


# A stream whose tokens differ in more than their text and a number is read whole from then on.
_MAX_LESSONS = 16
_NUMBER = b"0123456789,"
_LESSONS_AT_ONCE = 2


def _common_begin(one: bytes, other: bytes) -> bytes:
    size = min(len(one), len(other))
    # A long integer has the first bytes on top, and zeros where both are alike.
    differ = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return one[: size - _bytes_in(differ)]


def _common_end(one: bytes, other: bytes) -> bytes:
    size = min(len(one), len(other))
    differ = int.from_bytes(one[-size:], "little") ^ int.from_bytes(other[-size:], "little")
    return one[len(one) - size + _bytes_in(differ) :]


def _bytes_in(number: int) -> int:
    return (number.bit_length() + 7) // 8


class TokenPattern:
    """Recognises the events of one stream that are a visible token and nothing else.

    An engine writes each of them alike but for the text and, in `/v1/responses`, a number after it.
    What lies before, between and after these is learned from events that were read, up to the
    quotes around the text. Another event with the same parts has the same keys, because every key
    has quotes; a text with a quote is left to the JSON parser.
    """

    __slots__ = (
        "_before_number",
        "_begin",
        "_begin_bytes",
        "_end",
        "_end_bytes",
        "_lessons",
        "learns",
    )

    def __init__(self) -> None:
        # Whether another event would help: none matched yet, and it may still be found.
        self.learns = True
        self._begin = b""
        # Longer than any piece, so that nothing matches before two lessons.
        self._begin_bytes = MAX_EVENT_BYTES
        # What lies between the text and the number; empty without a number.
        self._before_number = b""
        self._end = b""
        self._end_bytes = 0
        self._lessons = 0

    def learn(self, event: bytes) -> None:
        """Take a whole event that is a visible token and nothing else."""
        if self._lessons >= _MAX_LESSONS:
            return
        self._lessons += 1
        self.learns = self._lessons < _MAX_LESSONS
        if self._lessons == 1:
            self._begin = self._end = event
            return
        begin, end = _common_begin(self._begin, event), _common_end(self._end, event)
        self._begin = begin[: begin.rfind(b'"') + 1]
        self._end = end[end.find(b'"') :]
        self._begin_bytes, self._end_bytes = len(self._begin), len(self._end)
        self._before_number = self._after_text(event)
        # Of two equal texts all is the begin, and there is nothing between it and the end.
        if self._begin_bytes + self._end_bytes <= len(event):
            self.learns = False

    def _after_text(self, event: bytes) -> bytes:
        """What follows the text of an event up to its number, if there is more than a text."""
        rest = event[self._begin_bytes : len(event) - self._end_bytes]
        at = rest.find(b'"')
        # A text may contain a quote, too.
        if at <= 0 or rest.startswith(b"\\", at - 1):
            return b""
        return rest[at:].rstrip(_NUMBER)

    def matches(self, piece: bytes) -> bool:
        """Whether a piece of the stream is such an event; False if that is not certain."""
        begin_bytes = self._begin_bytes
        end_at = piece.find(b'"', begin_bytes)
        if end_at <= begin_bytes or not piece.startswith(self._begin):
            return False
        before_number, end = self._before_number, self._end
        if not before_number:
            return end_at == len(piece) - self._end_bytes and piece.endswith(end)
        if not piece.startswith(before_number, end_at):
            return False
        # Nothing is left but the number.
        return piece.endswith(end) and not piece[
            end_at + len(before_number) : len(piece) - self._end_bytes
        ].strip(_NUMBER)

    def matches_all(self, pieces: Sequence[bytes]) -> bool:
        """Whether `matches` is true for each of these pieces."""
        if self._before_number:
            return all(map(self.matches, pieces))
        begin, end = self._begin, self._end
        texts = [piece.removeprefix(begin).removesuffix(end) for piece in pieces]
        text = b"".join(texts)
        around_bytes = len(pieces) * (self._begin_bytes + self._end_bytes)
        # Where a begin or an end is missing, more is left.
        return len(text) + around_bytes == sum(map(len, pieces)) and b'"' not in text and all(texts)


_DONE = b"[DONE]"
_DONE_EVENT = ParsedEvent(done=True)
_END = b"\n\n"
_LAST_EVENT = b"data: " + _DONE + _END
_FINISH_REASON = re.compile(rb'"finish_reason"\s*+:\s*+(?!null)')

# Pieces that the client has and that are not read yet: reading many at once takes less time than
# reading each between other work, but it must not delay other streams, many of which may do so at
# once.
MAX_DEFERRED_PIECES = 8
MAX_DEFERRED_BYTES = 16 * 1024

# Of a stream that the client has already: the first pieces are read one by one until the events of
# its tokens are known, and at most so many of the last ones are no tokens.
_READ_TO_LEARN = 8
_LAST_PIECES = 5


class StreamReader:
    """Reads a stream of events; pieces that need no change pass before they are read."""

    __slots__ = (
        "_deferred",
        "_deferred_bytes",
        "_pattern",
        "_protocol",
        "_several_choices",
        "_splitter",
        "_stripper",
        "_timing",
        "findings",
        "unsent",
    )

    def __init__(
        self, protocol: ApiProtocol, stripper: UsageStripper | None, *, choices: int
    ) -> None:
        self.findings = ResponseFindings()
        self.unsent = b""
        self._protocol = protocol
        self._stripper = stripper
        self._several_choices = choices > 1
        self._timing = self.findings.timing
        self._splitter = EventSplitter()
        self._pattern = TokenPattern()
        self._deferred: list[tuple[bytes, float]] = []
        self._deferred_bytes = 0

    def take(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the stream; return the bytes to send to the client now."""
        stripper = self._stripper
        if self._pattern.matches(data) and self._passes(stripper):
            if self._deferred:
                self.catch_up()
            self._timing.visible_token(at_s)
            return data
        if stripper is not None and self._may_change(stripper, data):
            self.catch_up()
            return self._stripped(stripper, data, at_s)
        deferred = self._deferred
        deferred.append((data, at_s))
        self._deferred_bytes += len(data)
        if len(deferred) >= MAX_DEFERRED_PIECES or self._deferred_bytes >= MAX_DEFERRED_BYTES:
            self.catch_up()
        return data

    def take_all(self, pieces: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Read pieces that the client has already, as `take` reads each."""
        tokens, read = 0, 0
        if self._stripper is None and self._passes(None):
            self.catch_up()
            while self._pattern.learns and read < min(len(pieces), _READ_TO_LEARN):
                self._read_piece(pieces[read], times_s[read])
                read += 1
            tokens = self._tokens(pieces[read:], times_s[read:])
        read += tokens
        # Few are left behind tokens. Others are read together.
        take = self._read_piece if tokens else self.take
        for data, at_s in zip(pieces[read:], times_s[read:], strict=True):
            take(data, at_s)

    def _tokens(self, pieces: Sequence[bytes], times_s: Sequence[float]) -> int:
        """Note the first of these pieces as tokens; return how many are nothing else.

        The last ones of a stream are not: they are found from the end. Returns 0 also if others are
        among them.
        """
        pattern, end = self._pattern, len(pieces)
        least = max(end - _LAST_PIECES, 0)
        while end > least and not pattern.matches(pieces[end - 1]):
            end -= 1
        if end == least or not pattern.matches_all(pieces[:end]):
            return 0
        self._timing.visible_tokens(times_s[:end], end)
        return end

    def _passes(self, stripper: UsageStripper | None) -> bool:
        """Whether an event that is a token and nothing else goes to the client as it is."""
        if self._splitter.waiting or self._several_choices:
            return False
        return stripper is None or not (stripper.each or stripper.held)

    def catch_up(self) -> None:
        """Read the deferred pieces, which the client has already."""
        deferred, self._deferred = self._deferred, []
        self._deferred_bytes = 0
        if deferred and (self._splitter.waiting or not self._read_together(deferred)):
            for data, at_s in deferred:
                self._read_piece(data, at_s)

    def _read_piece(self, data: bytes, at_s: float) -> None:
        for event in self._splitter.split(data):
            parsed = self._parse(event)
            self._note(parsed, at_s)
            if parsed is VISIBLE_TOKEN and event == data:
                self._pattern.learn(event)

    def _read_together(self, pieces: Reads) -> bool:
        """Read pieces of whole events, each of one line of data, as nearly all are.

        False, and nothing is read, if there is another event or a part of one.
        """
        whole = [data for data, _ in pieces if data.endswith(_END)]
        stream = b"".join(whole)
        events = stream.removesuffix(_LAST_EVENT)
        lines = data_lines(events)
        if lines is None or len(whole) < len(pieces) or not self._identified(lines):
            return False
        # Lines may also hold one event in two, or two events in one.
        if not self._note_together(pieces, lines, events.count(_END)):
            return False
        if len(events) < len(stream):
            self.findings.note(_DONE_EVENT)
        return True

    def _note_together(self, pieces: Reads, lines: bytes, number: int) -> bool:
        protocol = self._protocol
        if protocol.count_tokens is None or protocol.read_events is None:
            return False
        if protocol.count_tokens(lines) == number:
            times_s = [at_s for data, at_s in pieces if data != _LAST_EVENT]
            self.findings.timing.visible_tokens(times_s, number)
            if len(times_s) == number:
                self._learn(pieces, [VISIBLE_TOKEN] * number)
            return True
        parsed = protocol.read_events(lines)
        if parsed is None or len(parsed) != number:
            return False
        times_s = [at_s for data, at_s in pieces for _ in range(data.count(_END))]
        for event, at_s in zip(parsed, times_s, strict=False):
            self._note(event, at_s)
        if len(pieces) == number:
            self._learn(pieces, parsed)
        return True

    def _learn(self, pieces: Reads, parsed: Sequence[ParsedEvent]) -> None:
        """Learn from the first pieces, each of one event, that are visible tokens."""
        read = zip(pieces, parsed, strict=False)
        tokens = [data for (data, _), event in read if event is VISIBLE_TOKEN]
        for data in tokens[:_LESSONS_AT_ONCE]:
            self._pattern.learn(data)

    def _identified(self, lines: bytes) -> bool:
        """Whether the response's id is known, mostly from the first event."""
        findings = self.findings
        if findings.response_id is None:
            findings.identify(lines.partition(b"\n")[0])
        return findings.response_id is not None

    def finish(self, at_s: float) -> bytes:
        """Read the end of the stream; return the last bytes for the client."""
        self.catch_up()
        rest = self._splitter.take_rest() if self._splitter.waiting else b""
        stripper, missed = self._stripper, self.findings.missed
        self.unsent = b"" if stripper is None else stripper.held + rest
        parsed = self._parse(rest) if rest else NOTHING
        self._note(parsed, at_s)
        # An event that was cut off is not unreadable: the ending of the exchange explains it.
        self.findings.missed = missed
        if stripper is None:
            return b""
        return stripper.stripped(rest, parsed) + stripper.take_held()

    def passes(self, data: bytes) -> bool:
        """Whether the client gets these bytes unchanged, and no others if they are the last."""
        stripper = self._stripper
        if stripper is None:
            return True
        if not data:
            return not (stripper.held or self._splitter.waiting)
        return not self._may_change(stripper, data)

    def _may_change(self, stripper: UsageStripper, data: bytes) -> bool:
        """Whether the client may get other bytes than these, or get them later."""
        return (
            stripper.each
            or bool(stripper.held)
            or self._splitter.waiting
            or not data.endswith(_END)
            or b"\r" in data
            or b'"usage"' in data
            or _FINISH_REASON.search(data) is not None
        )

    def _stripped(self, stripper: UsageStripper, data: bytes, at_s: float) -> bytes:
        self.unsent = stripper.held + self._splitter.rest
        kept = []
        for event in self._splitter.split(data):
            parsed = self._parse(event)
            self._note(parsed, at_s)
            kept.append(stripper.stripped(event, parsed))
        self.unsent = b""
        return b"".join(kept)

    def _parse(self, event: bytes) -> ParsedEvent:
        data = data_of(event)
        return NOTHING if data is None else self._read(data)

    def _read(self, data: bytes) -> ParsedEvent:
        if data == _DONE:
            return _DONE_EVENT
        parsed = self._protocol.read_event(data)
        if parsed is None:
            self.findings.missed = ProxyFailure.EVENT_UNREADABLE
            return NOTHING
        if self.findings.response_id is None:
            self.findings.identify(data)
        return parsed

    def _note(self, parsed: ParsedEvent, at_s: float) -> None:
        timing = self._timing
        if parsed is VISIBLE_TOKEN:
            timing.token(at_s, visible=True)
            return
        if parsed is NOTHING:
            return
        # With several choices an event counts the tokens of its own choice.
        if self._several_choices and parsed.usage is not None and not parsed.usage_only:
            parsed = parsed._replace(usage=None)
        self.findings.note(parsed)
        if parsed.token:
            tokens = None if parsed.usage is None else parsed.usage.output_tokens
            timing.token(at_s, visible=parsed.visible, tokens=tokens)
        elif parsed.finish_reasons and self._protocol.finish_is_token:
            timing.finished(at_s)
