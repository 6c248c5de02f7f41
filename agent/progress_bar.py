"""A progress bar of a command, whose standard output is its result."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress

from agent.terminal import TerminalConsole


@contextmanager
def progress_bar(does: str, steps: int) -> Iterator[Callable[[], None]]:
    """A bar on the terminal of standard error, nothing elsewhere; yields what ends a step."""
    console = TerminalConsole(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(does, total=steps)
        yield lambda: progress.advance(task)
