"""Lines of a log as they come, in pieces of any size, and what they say of failures."""

import re
from collections import Counter

from agent.catalog.failure_lines import meaning_of
from agent.records.host import LogFinding, LogSample

# What is read of one line. The texts that matter stand at its beginning.
MAX_LINE_BYTES = 16 * 1024
# What is kept of a line as evidence.
MAX_EVIDENCE_CHARACTERS = 500
# An engine in its death throes can repeat itself.
MAX_FINDINGS = 200

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffd]+")


class LineScanner:
    """Cuts bytes into lines and keeps what they say until it is taken."""

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
        """What came is a whole line, as nothing more will be added to it."""
        if not self._started:
            return
        self._lines += 1
        self._dropped["long_lines"] += self._cut
        self._read(bytes(self._started))
        self._started.clear()
        self._cut = False

    def drop(self, reason: str, count: int) -> None:
        """Count what was not fed; a line that it was part of is given up."""
        self._dropped[reason] += count
        self._started.clear()
        self._cut = False

    def take(self) -> LogSample:
        """What was said since the last time."""
        sighting = LogSample(
            lines=self._lines, findings=tuple(self._findings), dropped=dict(+self._dropped)
        )
        self._lines = 0
        self._findings = []
        self._dropped = Counter()
        return sighting

    def _add(self, part: bytes) -> None:
        # The hole that a writer leaves before its next line when its file is cut.
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
