"""A bar is shown on a terminal, and nothing is written elsewhere."""

import os
import sys
from contextlib import suppress
from io import StringIO

import pytest

from agent.progress_bar import progress_bar


def test_a_terminal_shows_what_is_done_and_how_much_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reading, writing = os.openpty()
    with os.fdopen(writing, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        with progress_bar("comparing", 4) as done:
            done()
    shown = read_to_its_end(reading)
    os.close(reading)
    assert "comparing" in shown
    assert "25%" in shown


def read_to_its_end(terminal: int) -> str:
    """What was written to a terminal that is closed; Linux reports its end as an error."""
    found = b""
    with suppress(OSError):
        while piece := os.read(terminal, 65_536):
            found += piece
    return found.decode()


def test_a_file_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    file = StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with progress_bar("comparing", 4) as done:
        done()
    assert file.getvalue() == ""
