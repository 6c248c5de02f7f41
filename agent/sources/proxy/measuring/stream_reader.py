"""Reads a stream of events as it passes: token times, usage, and how the response ended."""

import re

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.measuring.api_protocols import (
    NOTHING,
    USAGE_MARKER,
    ApiProtocol,
    ParsedEvent,
)
from agent.sources.proxy.measuring.json_values import parse_object
from agent.sources.proxy.measuring.response_readers import ResponseFindings
from agent.sources.proxy.measuring.sse_events import EventSplitter, data_of
from agent.sources.proxy.measuring.strip_usage import UsageStripper
from agent.sources.proxy.measuring.token_timing import MAX_UNCOUNTED

_QUOTE = b'"'
_TEXT = re.compile(rb'(?:[^"\\]|\\.)*')
# The form that vLLM writes, as the last key of the event. Other forms are parsed, more slowly.
_USAGE_AT_END = re.compile(
    rb',"usage":\{"prompt_tokens":\d+,"total_tokens":\d+,"completion_tokens":(\d{1,9})'
    rb'(?:,"completion_tokens_details":(?:null|\{"reasoning_tokens":\d+\}))?\}\}\n\n\Z'
)
_DONE = b"[DONE]"
_END = b"\n\n"
_NO_LENGTH = 1 << 62
# An empty text is found by this many bytes before it.
_EMPTY_PREFIX_BYTES = 16


class StreamReader:
    """Reads a stream of events, most of which are recognised without parsing.

    The events of a stream differ in little more than the generated text. After parsing an event
    with text, the reader keeps the bytes before and after the text: the template. A piece with the
    same bytes around a text is the same event with another token. An event that shares only the
    prefix is accepted when it contains no other event and none of the protocol's markers.
    """

    __slots__ = (
        "_add_time",
        "_at_event_start",
        "_between",
        "_deferred",
        "_empty",
        "_has_counts",
        "_markers",
        "_min_length",
        "_prefix",
        "_protocol",
        "_quotes",
        "_several_choices",
        "_splitter",
        "_stripper",
        "_suffix",
        "_text_at",
        "_uncounted",
        "findings",
        "unsent",
    )

    def __init__(
        self, protocol: ApiProtocol, stripper: UsageStripper | None, *, choices: int
    ) -> None:
        self.findings = ResponseFindings()
        self.unsent = b""
        self._add_time = self.findings.timing.another
        self._uncounted = self.findings.timing.uncounted
        self._protocol = protocol
        self._stripper = stripper
        self._several_choices = choices > 1
        self._splitter = EventSplitter()
        self._prefix: bytes | None = None
        self._suffix = b""
        self._between = self._empty = b""
        self._quotes = 0
        self._text_at = 0
        self._min_length = _NO_LENGTH
        self._markers: tuple[bytes, ...] = ()
        # Whether each event with text has the count of all tokens so far.
        self._has_counts = False
        # Whether no earlier bytes wait for the rest of an event.
        self._at_event_start = True
        self._deferred: tuple[bytes, float] | None = None

    def take(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the stream; return the bytes to send to the client now."""
        if self._deferred is not None:
            self.catch_up()
        prefix = self._prefix
        # The same test as in `_known`, inlined: it runs for nearly every piece.
        if (
            prefix is not None
            and self._at_event_start
            and data.startswith(prefix)
            and len(data) >= self._min_length
            and data.endswith(self._suffix)
            and data.find(_QUOTE, self._text_at, -len(self._suffix)) < 0
        ):
            self._uncounted.append(at_s)
            if len(self._uncounted) >= MAX_UNCOUNTED:
                self.findings.timing.count_gaps()
            return data
        return self._known(data, at_s) or self._defer(data, at_s) or self._each_event(data, at_s)

    def _known(self, data: bytes, at_s: float) -> bytes | None:
        """Return the client's bytes of a piece that matches the template; else None."""
        prefix = self._prefix
        if prefix is None or not self._at_event_start or not data.startswith(prefix):
            return None
        if (
            len(data) >= self._min_length
            and data.endswith(self._suffix)
            # Quotes in the text are escaped: a bare quote means more than one text.
            and data.find(_QUOTE, self._text_at, -len(self._suffix)) < 0
        ):
            self._add_time(at_s)
            return data
        return self._known_prefix(data, at_s)

    def catch_up(self) -> None:
        """Read the deferred piece, which the client has already."""
        if self._deferred is not None:
            (data, at_s), self._deferred = self._deferred, None
            self._each_event(data, at_s)

    def _defer(self, data: bytes, at_s: float) -> bytes | None:
        """Keep the piece for later and return it; None if it may need a change or a hold."""
        stripper = self._stripper
        if stripper is not None and (
            stripper.each
            or not self._at_event_start
            or not data.endswith(_END)
            or b"\r" in data
            or b"usage" in data
            or data.count(b"finish_reason") != data.count(b'"finish_reason":null')
        ):
            return None
        self._deferred = data, at_s
        return data

    def finish(self, at_s: float) -> bytes:
        """Read the end of the stream; return the last bytes for the client."""
        self.catch_up()
        rest = self._splitter.take_rest()
        missed = self.findings.missed
        if self._stripper is None:
            last = b""
            self._event(rest, at_s)
        else:
            self.unsent = self._stripper.held + rest
            last = self._event(rest, at_s) + self._stripper.take_held()
        # An event that was cut off is not unreadable: the ending of the exchange explains it.
        self.findings.missed = missed
        return last

    def _each_event(self, data: bytes, at_s: float) -> bytes:
        """Return the client's bytes of a piece that may contain several events.

        Events that came together are matched against the template, too.
        """
        end = data.find(_END) + len(_END)
        if end in (len(data), len(_END) - 1) or b"\r" in data:
            return self._events(data, at_s)
        stripper = self._stripper
        unsent = b"" if stripper is None else stripper.held + self._splitter.rest
        kept, begin = [], 0
        try:
            while end >= len(_END):
                events, run_end = self._known_run(data, begin)
                if events:
                    self.findings.timing.together(events, at_s)
                    end = run_end
                    kept.append(data[begin:end])
                else:
                    event = data[begin:end]
                    kept.append(self._known(event, at_s) or self._events(event, at_s))
                begin, end = end, data.find(_END, end) + len(_END)
            if begin < len(data):
                kept.append(self._events(data[begin:], at_s))
        except Exception:
            # Nothing of the piece was sent yet.
            self.unsent = unsent
            raise
        return data if stripper is None else b"".join(kept)

    def _known_run(self, data: bytes, begin: int) -> tuple[int, int]:
        """Return how many events from `begin` on match without a break, and where they end."""
        prefix, suffix = self._prefix, self._suffix
        if prefix is None or not self._at_event_start or self._has_counts:
            return 0, begin
        events = data.count(self._between, begin) + 1
        if events == 1 or not data.startswith(prefix, begin):
            return 0, begin
        last = data.rfind(self._between)
        end = data.find(suffix, last + len(self._between)) + len(suffix)
        if end < last:
            # The last event is incomplete.
            events, end = events - 1, last + len(suffix)
        # Quotes in a text are escaped: more of them mean other events.
        if data.count(_QUOTE, begin, end) != events * self._quotes:
            return 0, begin
        if not self._protocol.empty_text_is_token and data.find(self._empty, begin, end) >= 0:
            return 0, begin
        return events, end

    def _known_prefix(self, data: bytes, at_s: float) -> bytes | None:
        """Return the client's bytes of a piece that is one event with text only; else None."""
        text_at = self._text_at
        if data.find(b"\n", text_at) != len(data) - 2 or not data.endswith(b"\n\n"):
            return None
        if data.startswith(_QUOTE, text_at) and not self._protocol.empty_text_is_token:
            # The template with an empty text.
            return data if data[text_at:] == self._suffix and not self._has_counts else None
        for marker in self._markers:
            if data.find(marker, text_at) >= 0:
                return None
        if self._has_counts:
            usage = _USAGE_AT_END.match(data, data.find(USAGE_MARKER, text_at) - 1)
            return self._known_with_count(data, usage, at_s) if usage else None
        self._add_time(at_s)
        return data

    def _known_with_count(self, data: bytes, usage: re.Match[bytes], at_s: float) -> bytes:
        tokens = int(usage[1])
        findings = self.findings
        findings.timing.token(at_s, visible=False, tokens=tokens)
        findings.counted_tokens = tokens
        if self._stripper is None or not self._stripper.each:
            return data
        return data[: usage.start()] + b"}\n\n"

    def _events(self, data: bytes, at_s: float) -> bytes:
        stripper = self._stripper
        if stripper is None:
            for event in self._splitter.split(data):
                self._event(event, at_s)
            self._at_event_start = not self._splitter.waiting
            return data
        self.unsent = stripper.held + self._splitter.rest
        kept = b"".join([self._event(event, at_s) for event in self._splitter.split(data)])
        self._at_event_start = not (self._splitter.waiting or stripper.held)
        return kept

    def _event(self, event: bytes, at_s: float) -> bytes:
        parsed = self._parse(event)
        if parsed is not NOTHING:
            self._note(parsed, at_s)
            ended = parsed.finish_reasons or parsed.error
            if parsed.token and not (ended or self._several_choices):
                self._learn_template(event, parsed)
        return event if self._stripper is None else self._stripper.stripped(event, parsed)

    def _parse(self, event: bytes) -> ParsedEvent:
        data = data_of(event)
        if data is None:
            return NOTHING
        if data == _DONE:
            return ParsedEvent(done=True)
        payload = parse_object(data)
        if payload is None:
            self.findings.missed = ProxyFailure.EVENT_UNREADABLE
            return NOTHING
        self.findings.identify(payload)
        return self._protocol.read_event(payload)

    def _note(self, parsed: ParsedEvent, at_s: float) -> None:
        # With several choices an event counts the tokens of its own choice.
        if self._several_choices and parsed.usage is not None and not parsed.usage_only:
            parsed = parsed._replace(usage=None)
        self.findings.note(parsed)
        timing = self.findings.timing
        if parsed.token:
            tokens = None if parsed.usage is None else parsed.usage.output_tokens
            timing.token(at_s, visible=parsed.visible, tokens=tokens)
        if parsed.finish_reasons and self._protocol.finish_is_token:
            timing.finished(at_s)

    def _learn_template(self, event: bytes, parsed: ParsedEvent) -> None:
        protocol = self._protocol
        openings = [opening for opening in protocol.text_openings if opening in event]
        text_at = min((event.find(opening) + len(opening) for opening in openings), default=0)
        # JSON written with spaces has no opening: its markers would have spaces, too.
        if not text_at:
            return
        self._has_counts = parsed.usage is not None
        self._prefix, self._text_at = event[:text_at], text_at
        text = _TEXT.match(event, text_at)
        assert text is not None, "the pattern matches the empty text, too"
        self._suffix = event[text.end() :]
        self._between = self._suffix + self._prefix
        self._quotes = self._between.count(_QUOTE)
        self._empty = self._prefix[-_EMPTY_PREFIX_BYTES:] + _QUOTE
        min_length = text_at + len(self._suffix) + (not protocol.empty_text_is_token)
        # A repeated count must be stripped as well, so such a piece never matches whole.
        self._min_length = _NO_LENGTH if self._has_counts else min_length
        none_visible = self.findings.timing.visible_s is None
        markers = protocol.markers + protocol.visible_markers * none_visible
        self._markers = tuple([m for m in markers if m != USAGE_MARKER or not self._has_counts])
