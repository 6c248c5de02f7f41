"""What the commands print, without what could steer a terminal.

Names of models, engines and users, and texts of errors, are written by others."""

import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.logging import RichHandler
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


class _JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LogLevel(StrEnum):
    """The least level of lines in the log."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How lines of the log are written."""

    TEXT = "text"
    JSON = "json"


def log_to_stderr(level: LogLevel, log_format: LogFormat) -> None:
    """Log to standard error; to a terminal with colours."""
    handler: logging.Handler = logging.StreamHandler()
    if log_format is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter())
    elif sys.stderr.isatty():
        handler = RichHandler(console=TerminalConsole(stderr=True), show_path=False)
        handler.setFormatter(TerminalFormatter("%(message)s"))
    else:
        handler.setFormatter(TerminalFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=level.name, handlers=[handler])
    for library in ("apscheduler", "alembic"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.getLogger().level))


@contextmanager
def progress_bar(does: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal of standard error, nothing elsewhere; yields what ends a step."""
    console = TerminalConsole(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(does, total=steps)
        yield lambda: progress.advance(task)
