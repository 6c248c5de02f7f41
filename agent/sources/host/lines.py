"""Cuts pieces of a log into lines and finds those that matter for failures."""

import re

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
        self._lines = 0
        self._findings: list[LogFinding] = []

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
        self._read(bytes(self._started))
        self._started.clear()

    def drop_line(self) -> None:
        """Drop the current line: the bytes that follow it are not fed."""
        self._started.clear()

    def drain(self) -> LogSample:
        """Everything since the last call."""
        sample = LogSample(lines=self._lines, findings=tuple(self._findings))
        self._lines = 0
        self._findings = []
        return sample

    def _add(self, part: bytes) -> None:
        # A writer leaves zeros before its next line when its file is truncated.
        part = part if self._started else part.lstrip(b"\0")
        self._started += part[: MAX_LINE_BYTES - len(self._started)]

    def _read(self, line: bytes) -> None:
        text = _COLOURS.sub("", line.decode(errors="replace"))
        found = meaning_of(text)
        if found is None or len(self._findings) >= MAX_FINDINGS:
            return
        meaning, exit_code = found
        shown = _UNPRINTABLE.sub(" ", text).strip()[:MAX_EVIDENCE_CHARACTERS]
        self._findings.append(LogFinding(meaning=meaning, line=shown, exit_code=exit_code))
