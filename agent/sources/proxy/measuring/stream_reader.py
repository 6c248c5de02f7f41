"""Reads a stream of events as it passes: token times, usage, and how the response ended."""

import re

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.exchange import Reads
from agent.sources.proxy.measuring.api_protocols import ApiProtocol
from agent.sources.proxy.measuring.parsed_event import NOTHING, VISIBLE_TOKEN, ParsedEvent
from agent.sources.proxy.measuring.response_readers import ResponseFindings
from agent.sources.proxy.measuring.sse_events import EventSplitter, data_lines, data_of
from agent.sources.proxy.measuring.strip_usage import UsageStripper

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


class StreamReader:
    """Reads a stream of events; pieces that need no change pass before they are read."""

    __slots__ = (
        "_deferred",
        "_deferred_bytes",
        "_protocol",
        "_several_choices",
        "_splitter",
        "_stripper",
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
        self._splitter = EventSplitter()
        self._deferred: list[tuple[bytes, float]] = []
        self._deferred_bytes = 0

    def take(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the stream; return the bytes to send to the client now."""
        stripper = self._stripper
        if stripper is not None and self._may_change(stripper, data):
            self.catch_up()
            return self._stripped(stripper, data, at_s)
        deferred = self._deferred
        deferred.append((data, at_s))
        self._deferred_bytes += len(data)
        if len(deferred) >= MAX_DEFERRED_PIECES or self._deferred_bytes >= MAX_DEFERRED_BYTES:
            self.catch_up()
        return data

    def catch_up(self) -> None:
        """Read the deferred pieces, which the client has already."""
        deferred, self._deferred = self._deferred, []
        self._deferred_bytes = 0
        if self._splitter.waiting or not self._read_together(deferred):
            for data, at_s in deferred:
                for event in self._splitter.split(data):
                    self._note(self._parse(event), at_s)

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
        if protocol.count_tokens(lines) == number:
            times_s = [at_s for data, at_s in pieces if data != _LAST_EVENT]
            self.findings.timing.visible_tokens(times_s, number)
            return True
        parsed = protocol.read_events(lines)
        if parsed is None or len(parsed) != number:
            return False
        times_s = [at_s for data, at_s in pieces for _ in range(data.count(_END))]
        for event, at_s in zip(parsed, times_s, strict=False):
            self._note(event, at_s)
        return True

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
        timing = self.findings.timing
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
