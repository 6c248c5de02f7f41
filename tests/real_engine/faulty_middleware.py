"""A stat logger of vLLM as the plugin's, with hooks of the middleware that can be made to fail.

The file that GOODPUT_TEST_FAULT names has the hook that raises, `Front.begin`; none without it.
"""

import os
from pathlib import Path
from typing import Any

from goodput_agent_vllm import front, watched_request
from goodput_agent_vllm.front import Front
from goodput_agent_vllm.held_figures import HeldFigures
from goodput_agent_vllm.logger import GoodputStatLogger
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.watched_request import WatchedRequest

__all__ = ["GoodputStatLogger"]

FAULT = Path(os.environ["GOODPUT_TEST_FAULT"])
HOOKS: tuple[tuple[Any, str], ...] = (
    (Front, "serving"),
    (Front, "begin"),
    (Front, "opened"),
    (Front, "ended"),
    (Front, "_take_figures"),
    (WatchedRequest, "__init__"),
    (WatchedRequest, "_received"),
    (WatchedRequest, "_sent"),
    (WatchedRequest, "_end"),
    (watched_request, "kernel_wait_s"),
    (HeldFigures, "take"),
    (HeldFigures, "hold"),
    (front, "record_bytes"),
    (Reporter, "add"),
)


def name_of(owner: Any, hook: str) -> str:
    """The name of a hook in the file."""
    return f"{owner.__name__.rpartition('.')[2]}.{hook}"


def wrap(owner: Any, hook: str) -> None:
    """Let a hook raise when the file names it."""
    original = getattr(owner, hook)

    def faulty(*arguments: Any, **named: Any) -> Any:
        if fault() == name_of(owner, hook):
            raise RuntimeError(f"{name_of(owner, hook)} is broken")
        return original(*arguments, **named)

    setattr(owner, hook, faulty)


def fault() -> str:
    """The hook that raises; empty if none does."""
    return FAULT.read_text() if FAULT.exists() else ""


def forgive(before: str = "") -> None:
    """Let each fault begin without errors."""
    serving = Front.serving

    def forgiving(self: Front, *arguments: Any) -> Any:
        nonlocal before
        if fault() != before:
            before = fault()
            self._errors = 0
        return serving(self, *arguments)

    Front.serving = forgiving  # type: ignore[method-assign, assignment]


for each in HOOKS:
    wrap(*each)
forgive()
