"""Reads an answer as it passes."""

from typing import Protocol as Seam

from agent.sources.proxy.measuring.payload import parsed
from agent.sources.proxy.measuring.protocols import Protocol, Told
from agent.sources.proxy.measuring.timing import TokenTiming
from agent.sources.proxy.measuring.usage import TokenUsage

# The time to parse it is time in which nothing else is relayed, about 10 ms for such an answer.
MAX_ANSWER_BYTES = 1 << 20


class Findings:
    """What an answer told so far.

    `counted_tokens` are those of the output so far, where a stream counts them as it goes. `missed`
    is a short word for what could not be read.
    """

    __slots__ = ("counted_tokens", "done", "error", "finishes", "missed", "timing", "usage")

    def __init__(self) -> None:
        self.timing = TokenTiming()
        self.usage = TokenUsage()
        self.counted_tokens: int | None = None
        self.finishes: list[str] = []
        self.error: str | None = None
        self.done = False
        self.missed: str | None = None

    def note(self, told: Told) -> None:
        """Add all that is not a matter of time."""
        if told.usage is not None:
            self.usage = self.usage.updated(told.usage)
            self.counted_tokens = None
        self.finishes += told.finishes
        self.error = self.error or told.error
        self.done = self.done or told.done

    @property
    def output_tokens(self) -> int | None:
        """The tokens of the output, as far as the answer came."""
        return self.usage.output_tokens if self.counted_tokens is None else self.counted_tokens

    @property
    def finish_reason(self) -> str | None:
        """Why it ended; different reasons of several choices by comma, in alphabetical order."""
        return ",".join(sorted(set(self.finishes))) or None


class Reader(Seam):
    """Reads one answer. Where it raises, its client has yet to get `unsent` and then the piece.

    What `take` put off `catch_up` does; its client has it already.
    """

    findings: Findings
    unsent: bytes

    def take(self, data: bytes, at_s: float) -> bytes:
        """A piece of the answer came; returns what the client is to get now."""

    def catch_up(self) -> None:
        """Read what was given on unread."""

    def finish(self, at_s: float) -> bytes:
        """No more will come; returns the last bytes for the client."""


class UnreadAnswer:
    """An answer that is not read: an error, or one that is compressed."""

    __slots__ = ("findings", "unsent")

    def __init__(self, findings: Findings | None = None) -> None:
        self.findings = findings or Findings()
        self.unsent = b""

    def take(self, data: bytes, at_s: float) -> bytes:
        """The piece itself."""
        return data

    def catch_up(self) -> None:
        """Nothing is put off."""

    def finish(self, at_s: float) -> bytes:
        """Nothing: all was passed on."""
        return b""


class WholeAnswer:
    """An answer of one JSON object, read when it is complete."""

    __slots__ = ("_pieces", "_protocol", "_size_bytes", "findings", "unsent")

    def __init__(self, protocol: Protocol) -> None:
        self.findings = Findings()
        self.unsent = b""
        self._protocol = protocol
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    def take(self, data: bytes, at_s: float) -> bytes:
        """The piece itself."""
        self._size_bytes += len(data)
        if self._size_bytes <= MAX_ANSWER_BYTES:
            self._pieces.append(data)
        else:
            self._pieces.clear()
            self.findings.missed = "answer_too_large"
        return data

    def catch_up(self) -> None:
        """Nothing is put off."""

    def finish(self, at_s: float) -> bytes:
        """Nothing: all was passed on."""
        if self.findings.missed is None:
            payload = parsed(b"".join(self._pieces))
            if payload is None:
                self.findings.missed = "answer_unreadable"
            else:
                self.findings.note(self._protocol.answer(payload))
        return b""
