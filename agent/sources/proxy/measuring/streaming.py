"""Reads a stream of events as it passes."""

import re

from agent.sources.proxy.measuring.events import EventSplitter, data_of
from agent.sources.proxy.measuring.payload import parsed
from agent.sources.proxy.measuring.protocols import COUNTS, NOTHING, Protocol, Told
from agent.sources.proxy.measuring.reading import Findings
from agent.sources.proxy.measuring.removal import UsageRemoval
from agent.sources.proxy.measuring.timing import MANY

_QUOTE = b'"'
_TEXT = re.compile(rb'(?:[^"\\]|\\.)*')
# As vLLM writes it, the last member of the event, which ends right after it. Any other form is
# understood too, but takes longer.
_COUNTED = re.compile(
    rb',"usage":\{"prompt_tokens":\d+,"total_tokens":\d+,"completion_tokens":(\d{1,9})'
    rb'(?:,"completion_tokens_details":(?:null|\{"reasoning_tokens":\d+\}))?\}\}\n\n\Z'
)
_DONE = b"[DONE]"
_END = b"\n\n"
_NEVER = 1 << 62
# Bytes before a text by which it is found.
_TELLING = 16


class StreamedAnswer:
    """A stream of events, most of which are recognised without being parsed.

    The events of a stream differ in little more than the generated text. Of an event with text that
    was parsed, the bytes before and after the text are kept. A piece with the same bytes around a
    text is the same event with another token. So is one that only begins with the same bytes, where
    it is one event and has none of the protocol's `tells` in it.
    """

    __slots__ = (
        "_alone",
        "_between",
        "_count",
        "_counted",
        "_empty",
        "_ending",
        "_moments",
        "_opening",
        "_protocol",
        "_quotes",
        "_removal",
        "_several",
        "_shortest",
        "_splitter",
        "_tells",
        "_text",
        "_unread",
        "findings",
        "unsent",
    )

    def __init__(self, protocol: Protocol, removal: UsageRemoval | None, *, choices: int) -> None:
        self.findings = Findings()
        self.unsent = b""
        self._count = self.findings.timing.another
        self._moments = self.findings.timing.moments
        self._protocol = protocol
        self._removal = removal
        self._several = choices > 1
        self._splitter = EventSplitter()
        self._opening: bytes | None = None
        self._ending = b""
        self._between = self._empty = b""
        self._quotes = 0
        self._text = 0
        self._shortest = _NEVER
        self._tells: tuple[bytes, ...] = ()
        # Whether each event with text has the count of all tokens so far.
        self._counted = False
        # Whether nothing that came before still waits.
        self._alone = True
        self._unread: tuple[bytes, float] | None = None

    def take(self, data: bytes, at_s: float) -> bytes:
        """A piece of the answer came; returns what the client is to get now."""
        if self._unread is not None:
            self.catch_up()
        opening = self._opening
        # As in `_known`, without a call on the way of nearly every piece, for it may be a cold one.
        if (
            opening is not None
            and self._alone
            and data.startswith(opening)
            and len(data) >= self._shortest
            and data.endswith(self._ending)
            and data.find(_QUOTE, self._text, -len(self._ending)) < 0
        ):
            self._moments.append(at_s)
            if len(self._moments) >= MANY:
                self.findings.timing.sort()
            return data
        return self._known(data, at_s) or self._put_off(data, at_s) or self._one_by_one(data, at_s)

    def _known(self, data: bytes, at_s: float) -> bytes | None:
        """What the client is to get for a piece that is one event like the known one, else None."""
        opening = self._opening
        if opening is None or not self._alone or not data.startswith(opening):
            return None
        if (
            len(data) >= self._shortest
            and data.endswith(self._ending)
            # A quote in the text is escaped, or else the text is not all that is between.
            and data.find(_QUOTE, self._text, -len(self._ending)) < 0
        ):
            self._count(at_s)
            return data
        return self._another(data, at_s)

    def catch_up(self) -> None:
        """Read the piece that the client got unread."""
        if self._unread is not None:
            (data, at_s), self._unread = self._unread, None
            self._one_by_one(data, at_s)

    def _put_off(self, data: bytes, at_s: float) -> bytes | None:
        """The piece, to be read later, where nothing in it is to be taken out or held back."""
        removal = self._removal
        if removal is not None and (
            removal.each
            or not self._alone
            or not data.endswith(_END)
            or b"\r" in data
            or b"usage" in data
            or data.count(b"finish_reason") != data.count(b'"finish_reason":null')
        ):
            return None
        self._unread = data, at_s
        return data

    def finish(self, at_s: float) -> bytes:
        """No more will come; returns the last bytes for the client."""
        self.catch_up()
        rest = self._splitter.take_rest()
        missed = self.findings.missed
        if self._removal is None:
            last = b""
            self._event(rest, at_s)
        else:
            self.unsent = self._removal.held + rest
            last = self._event(rest, at_s) + self._removal.take_held()
        # That an event was cut off is the fault of how the stream ended.
        self.findings.missed = missed
        return last

    def _one_by_one(self, data: bytes, at_s: float) -> bytes:
        """What the client is to get for a piece that may hold several events.

        Events that came together are recognised as those that come alone.
        """
        end = data.find(_END) + len(_END)
        if end in (len(data), len(_END) - 1) or b"\r" in data:
            return self._events(data, at_s)
        removal = self._removal
        unsent = b"" if removal is None else removal.held + self._splitter.rest
        kept, begin = [], 0
        try:
            while end >= len(_END):
                events, alike_end = self._alike(data, begin)
                if events:
                    self.findings.timing.together(events, at_s)
                    end = alike_end
                    kept.append(data[begin:end])
                else:
                    event = data[begin:end]
                    kept.append(self._known(event, at_s) or self._events(event, at_s))
                begin, end = end, data.find(_END, end) + len(_END)
            if begin < len(data):
                kept.append(self._events(data[begin:], at_s))
        except Exception:
            # None of the piece was sent yet.
            self.unsent = unsent
            raise
        return data if removal is None else b"".join(kept)

    def _alike(self, data: bytes, begin: int) -> tuple[int, int]:
        """How many events from there on are the known one with another text, and where they end.

        None of them where others lie between them.
        """
        opening, ending = self._opening, self._ending
        if opening is None or not self._alone or self._counted:
            return 0, begin
        events = data.count(self._between, begin) + 1
        if events == 1 or not data.startswith(opening, begin):
            return 0, begin
        last = data.rfind(self._between)
        end = data.find(ending, last + len(self._between)) + len(ending)
        if end < last:
            # The last one is not complete.
            events, end = events - 1, last + len(ending)
        # A quote in a text is escaped, or else the text is not all that is between.
        if data.count(_QUOTE, begin, end) != events * self._quotes:
            return 0, begin
        if not self._protocol.silent_tokens and data.find(self._empty, begin, end) >= 0:
            return 0, begin
        return events, end

    def _another(self, data: bytes, at_s: float) -> bytes | None:
        """What the client is to get for a piece that is one event with text alone, else None."""
        text = self._text
        if data.find(b"\n", text) != len(data) - 2 or not data.endswith(b"\n\n"):
            return None
        if data.startswith(_QUOTE, text) and not self._protocol.silent_tokens:
            # The event that is known, but with no text in it.
            return data if data[text:] == self._ending and not self._counted else None
        for tell in self._tells:
            if data.find(tell, text) >= 0:
                return None
        if self._counted:
            counted = _COUNTED.match(data, data.find(COUNTS, text) - 1)
            return self._another_counted(data, counted, at_s) if counted else None
        self._count(at_s)
        return data

    def _another_counted(self, data: bytes, counted: re.Match[bytes], at_s: float) -> bytes:
        tokens = int(counted[1])
        findings = self.findings
        findings.timing.token(at_s, visible=False, counted=tokens)
        findings.counted_tokens = tokens
        if self._removal is None or not self._removal.each:
            return data
        return data[: counted.start()] + b"}\n\n"

    def _events(self, data: bytes, at_s: float) -> bytes:
        removal = self._removal
        if removal is None:
            for event in self._splitter.split(data):
                self._event(event, at_s)
            self._alone = not self._splitter.waiting
            return data
        self.unsent = removal.held + self._splitter.rest
        kept = b"".join([self._event(event, at_s) for event in self._splitter.split(data)])
        self._alone = not (self._splitter.waiting or removal.held)
        return kept

    def _event(self, event: bytes, at_s: float) -> bytes:
        told = self._told(event)
        if told is not NOTHING:
            self._note(told, at_s)
            if told.token and not (told.finishes or told.error or self._several):
                self._learn(event, told)
        return event if self._removal is None else self._removal.kept(event, told)

    def _told(self, event: bytes) -> Told:
        carried = data_of(event)
        if carried is None:
            return NOTHING
        if carried == _DONE:
            return Told(done=True)
        payload = parsed(carried)
        if payload is None:
            self.findings.missed = "event_unreadable"
            return NOTHING
        return self._protocol.event(payload)

    def _note(self, told: Told, at_s: float) -> None:
        # With several choices an event counts the tokens of its own choice.
        if self._several and told.usage is not None and not told.final:
            told = told._replace(usage=None)
        self.findings.note(told)
        timing = self.findings.timing
        if told.token:
            counted = None if told.usage is None else told.usage.output_tokens
            timing.token(at_s, visible=told.visible, counted=counted)
        if told.finishes:
            timing.finished(at_s)

    def _learn(self, event: bytes, told: Told) -> None:
        protocol = self._protocol
        places = [
            event.find(opening) + len(opening) for opening in protocol.openings if opening in event
        ]
        text = min(places, default=0)
        # One that writes spaces has no opening: its tells would be written otherwise, too.
        if not text:
            return
        self._counted = told.usage is not None
        self._opening, self._text = event[:text], text
        self._ending = event[_text_end(event, text) :]
        self._between = self._ending + self._opening
        self._quotes = self._between.count(_QUOTE)
        self._empty = self._opening[-_TELLING:] + _QUOTE
        shortest = text + len(self._ending) + (not protocol.silent_tokens)
        # A count that is the same again would still be one that the client did not ask for.
        self._shortest = _NEVER if self._counted else shortest
        unseen = self.findings.timing.visible_s is None
        tells = protocol.tells + protocol.shows * unseen
        self._tells = tuple([tell for tell in tells if tell != COUNTS or not self._counted])


def _text_end(event: bytes, begin: int) -> int:
    text = _TEXT.match(event, begin)
    return text.end() if text else begin
