"""Cuts pieces of a log into lines and finds those that matter for failures."""

import re
from collections import Counter

from agent.catalog.failure_lines import meaning_of
from agent.records.host import LogFinding, LogSample

# Read of one line. The texts that matter are at its beginning.
MAX_LINE_BYTES = 16 * 1024
# Stored of a line as evidence.
MAX_EVIDENCE_CHARACTERS = 500
# A dying engine can repeat its lines.
MAX_FINDINGS = 200

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]+")


class LineScanner:
    """Cuts bytes into lines and collects findings for the next sample."""

    def __init__(self) -> None:
        self._started = bytearray()
        self._cut = False
        self._lines = 0
        self._findings: list[LogFinding] = []
        self._dropped: Counter[str] = Counter()

    def feed(self, piece: bytes) -> None:
        """The next bytes of the log."""
        *ended, rest = piece.split(b"\n")
        for part in ended:
            self._add(part)
            self.end_line()
        self._add(rest)

    def end_line(self) -> None:
        """End the current line: nothing more will be added to it."""
        if not self._started:
            return
        self._lines += 1
        self._dropped["long_lines"] += self._cut
        self._read(bytes(self._started))
        self._started.clear()
        self._cut = False

    def drop(self, reason: str, count: int) -> None:
        """Count bytes that were not fed, and drop the current line."""
        self._dropped[reason] += count
        self._started.clear()
        self._cut = False

    def drain(self) -> LogSample:
        """Everything since the last call."""
        sample = LogSample(
            lines=self._lines, findings=tuple(self._findings), dropped=dict(+self._dropped)
        )
        self._lines = 0
        self._findings = []
        self._dropped = Counter()
        return sample

    def _add(self, part: bytes) -> None:
        # A writer leaves zeros before its next line when its file is truncated.
        part = part if self._started else part.lstrip(b"\0")
        room = MAX_LINE_BYTES - len(self._started)
        self._started += part[:room]
        self._cut = self._cut or len(part) > room

    def _read(self, line: bytes) -> None:
        text = _COLOURS.sub("", line.decode(errors="replace"))
        said = meaning_of(text)
        if said is None:
            return
        if len(self._findings) >= MAX_FINDINGS:
            self._dropped["findings"] += 1
            return
        meaning, exit_code = said
        shown = _UNPRINTABLE.sub(" ", text).strip()[:MAX_EVIDENCE_CHARACTERS]
        self._findings.append(LogFinding(meaning=meaning, line=shown, exit_code=exit_code))
