"""What the commands print, without what could steer a terminal.

Names of models, engines and users, and texts of errors, are written by others."""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress
from rich.segment import Segment

# Control characters but tab and newline, marks and overrides of direction, other line ends, and
# halves of surrogate pairs, which cannot be printed.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_controls(text: str) -> str:
    """The text without characters that steer a terminal; tabs and newlines stay."""
    return _STEERING.sub("", text)


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print to standard output, or to standard error."""
    typer.echo(without_controls(text), err=err, nl=nl)


class TerminalConsole(Console):
    """A console that takes no text for markup, and prints no control characters of texts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """The segments of a renderable, also of those inside others."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(without_controls(segment.text), segment.style)


class TerminalFormatter(logging.Formatter):
    """Formats lines of the log without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the traceback if there is one."""
        return without_controls(super().format(record))


@contextmanager
def progress_bar(does: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal of standard error, nothing elsewhere; yields what ends a step."""
    console = TerminalConsole(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(does, total=steps)
        yield lambda: progress.advance(task)
