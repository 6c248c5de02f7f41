"""Readers of response bodies, the findings of a reader, and the token times of a stream."""

from collections.abc import Sequence
from operator import sub
from typing import Protocol

from agent.analysis.latency import tpot_s
from agent.analysis.quantiles import LOWEST_BIN, bins_of
from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.measuring.api_protocols import ApiProtocol
from agent.sources.proxy.measuring.parsed_event import (
    MAX_REASON_LENGTH,
    EngineTimes,
    ParsedEvent,
    ResponseError,
    TokenUsage,
    read_identity,
)

# Times are kept uncounted until there are this many, or until a gap is read.
_MAX_UNCOUNTED = 128


class TokenTiming:
    """Token times and gaps of one stream, all on one clock.

    A gap is the time between two events with generated text. Events that arrived in one piece have
    a gap of 0. `chunk_tokens` is the largest number of tokens in an event after the first one; None
    if not every such event was counted.

    Counting many gaps at once takes half as long as counting each between other work.
    """

    __slots__ = (
        "_gaps",
        "_last_s",
        "_max_gap_s",
        "_together",
        "_tokens",
        "_uncounted",
        "chunk_tokens",
        "finished_s",
        "first_is_reasoning",
        "first_s",
        "first_tokens",
        "reasoning_seen",
        "visible_s",
    )

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.first_is_reasoning = False
        self.reasoning_seen = False
        self.visible_s: float | None = None
        self.finished_s: float | None = None
        self._last_s = 0.0
        self._gaps: dict[int, int] = {}
        self._max_gap_s: float | None = None
        self._uncounted: list[float] = []
        self._together = 0
        self.first_tokens: int | None = None
        self.chunk_tokens: int | None = None
        self._tokens: int | None = None

    def token(self, at_s: float, *, visible: bool, tokens: int | None = None) -> None:
        """Add an event with text; `tokens` are all tokens so far, if the engine counts them."""
        if not visible:
            self.reasoning_seen = True
        elif self.visible_s is None:
            self.visible_s = at_s
        if self.first_s is None:
            self.first_s = self._last_s = at_s
            self.first_is_reasoning = not visible
            self.first_tokens = self._tokens = tokens
            return
        self._uncounted.append(at_s)
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self._count_gaps()
        if tokens is None or self._tokens is None:
            self._tokens = self.chunk_tokens = None
            return
        self.chunk_tokens = max(self.chunk_tokens or 0, tokens - self._tokens)
        self._tokens = tokens

    def visible_token(self, at_s: float) -> None:
        """Add an event with visible text that is not counted."""
        if self.first_s is None or self.visible_s is None:
            self.token(at_s, visible=True)
            return
        uncounted = self._uncounted
        uncounted.append(at_s)
        if len(uncounted) >= _MAX_UNCOUNTED:
            self._count_gaps()
        self._tokens = self.chunk_tokens = None

    def visible_tokens(self, pieces_s: Sequence[float], number: int) -> None:
        """Add events with visible text, of which none is counted, that arrived in several pieces.

        Each piece has one of these events or more, all pieces together `number`.
        """
        first_s = pieces_s[0]
        if self.visible_s is None:
            self.visible_s = first_s
        if self.first_s is None:
            self.first_s = self._last_s = first_s
            self._uncounted += pieces_s[1:]
        else:
            self._uncounted += pieces_s
        self._together += number - len(pieces_s)
        self._tokens = self.chunk_tokens = None
        if len(self._uncounted) >= _MAX_UNCOUNTED:
            self._count_gaps()

    @property
    def reasoning_s(self) -> float | None:
        """The time from the first token to the first visible one, if the first is reasoning."""
        if self.first_s is None or self.visible_s is None or not self.first_is_reasoning:
            return None
        return self.visible_s - self.first_s

    @property
    def gaps(self) -> dict[int, int]:
        """The number of gaps by their bin of `analysis.quantiles`."""
        self._count_gaps()
        return self._gaps

    @property
    def max_gap_s(self) -> float | None:
        """The largest gap, None without any."""
        self._count_gaps()
        return self._max_gap_s

    def _count_gaps(self) -> None:
        last_s, gaps, largest_s = self._last_s, self._gaps, self._max_gap_s
        if times_s := self._uncounted:
            new_s = list(map(sub, times_s, (last_s, *times_s)))
            last_s, largest_s = times_s[-1], max(largest_s or 0.0, max(new_s))
            for number, count in bins_of(new_s).items():
                gaps[number] = gaps.get(number, 0) + count
            times_s.clear()
        if self._together:
            gaps[LOWEST_BIN] = gaps.get(LOWEST_BIN, 0) + self._together
            largest_s = largest_s or 0.0
            self._together = 0
        self._last_s, self._max_gap_s = last_s, largest_s

    def finished(self, at_s: float) -> None:
        """Note the time of an event without text whose finish reason comes with the last token.

        An end-of-sequence token has no text.
        """
        self.finished_s = at_s

    def tpot_s(
        self, output_tokens: int | None, reasoning_tokens: int | None = None
    ) -> float | None:
        """Return seconds per output token after the first event with text.

        None if no token followed, or if none was seen to follow. The first event counts as one
        token if the engine gave no count; reasoning that was not streamed came before it.
        """
        if self.first_s is None or output_tokens is None:
            return None
        self._count_gaps()
        if self.finished_s is None and self._max_gap_s is None:
            return None
        end_s = self._last_s if self.finished_s is None else max(self._last_s, self.finished_s)
        before = self.first_tokens or 1 + self._hidden(output_tokens, reasoning_tokens or 0)
        return tpot_s(end_s - self.first_s, output_tokens - before + 1)

    def _hidden(self, output_tokens: int, reasoning_tokens: int) -> int:
        """Return how many of the reasoning tokens were not streamed."""
        if self.reasoning_seen:
            return 0
        events = 1 + sum(self._gaps.values())
        # More events than there are other tokens: the reasoning was streamed as visible text.
        return 0 if events > output_tokens - reasoning_tokens else reasoning_tokens


# Parsing blocks the relay; parsing a body of this size takes about 10 ms.
MAX_BODY_BYTES = 1 << 20


class ResponseFindings:
    """What a reader has found in a response so far.

    `missed` is why something could not be read. `response_id` and `model` are those that the
    response has.
    """

    __slots__ = (
        "done",
        "engine_times",
        "error",
        "finish_reasons",
        "missed",
        "model",
        "response_id",
        "timing",
        "usage",
    )

    def __init__(self) -> None:
        self.timing = TokenTiming()
        self.usage = TokenUsage()
        self.engine_times: EngineTimes | None = None
        self.finish_reasons: list[str] = []
        self.error: ResponseError | None = None
        self.done = False
        self.missed: ProxyFailure | None = None
        self.response_id: str | None = None
        self.model: str | None = None

    def identify(self, data: bytes) -> None:
        """Note the response's id and model, from a body or the first event that has an id."""
        if self.response_id is None:
            self.response_id, self.model = read_identity(data) or (None, None)

    def note(self, event: ParsedEvent) -> None:
        """Add everything but the times of an event."""
        if event.usage is not None:
            self.usage = self.usage.updated(event.usage)
        self.finish_reasons += event.finish_reasons
        self.engine_times = event.engine_times or self.engine_times
        self.error = self.error or event.error
        self.done = self.done or event.done

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; different reasons of several choices, sorted and joined by commas."""
        reasons = ",".join(sorted(set(self.finish_reasons)))
        return reasons if 0 < len(reasons) <= MAX_REASON_LENGTH else None


class ResponseReader(Protocol):
    """Reads the body of one response.

    After an exception in `take`, the client must still get `unsent` and then the piece.
    """

    findings: ResponseFindings
    unsent: bytes

    def take(self, data: bytes, at_s: float) -> bytes:
        """Read a piece of the body; return the bytes to send to the client now."""

    def take_all(self, pieces: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Read pieces that the client has already, as `take` reads each."""

    def finish(self, at_s: float) -> bytes:
        """Read the end of the body; return the last bytes for the client."""


class PassThroughReader:
    """Passes on a body without reading it: an error, or a compressed body."""

    __slots__ = ("findings", "unsent")

    def __init__(self, findings: ResponseFindings | None = None) -> None:
        self.findings = findings or ResponseFindings()
        self.unsent = b""

    def take(self, data: bytes, at_s: float) -> bytes:
        """Return the piece."""
        return data

    def take_all(self, pieces: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Do nothing."""

    def finish(self, at_s: float) -> bytes:
        """Return nothing: all bytes were sent."""
        return b""


class WholeBodyReader:
    """Passes on a body of one JSON object, and reads it when it is complete."""

    __slots__ = ("_pieces", "_protocol", "_size_bytes", "findings", "unsent")

    def __init__(self, protocol: ApiProtocol) -> None:
        self.findings = ResponseFindings()
        self.unsent = b""
        self._protocol = protocol
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def take(self, data: bytes, at_s: float) -> bytes:
        """Return the piece."""
        self._size_bytes += len(data)
        if self._size_bytes <= MAX_BODY_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
            self.findings.missed = ProxyFailure.ANSWER_TOO_LARGE
        return data

    def take_all(self, pieces: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Keep the pieces."""
        for data, at_s in zip(pieces, times_s, strict=True):
            self.take(data, at_s)

    def finish(self, at_s: float) -> bytes:
        """Read the body; return nothing: all bytes were sent."""
        if self.findings.missed is None:
            body = b"".join(self._pieces)
            parsed = self._protocol.read_body(body)
            if parsed is None:
                self.findings.missed = ProxyFailure.ANSWER_UNREADABLE
            else:
                self.findings.identify(body)
                self.findings.note(parsed)
        return b""
