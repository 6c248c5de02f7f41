"""The plugin's stat logger, whose middleware has a switch: it measures while a file holds a 1.

An engine loads a copy of this module. The switch is one byte of memory that is mapped.
"""

import mmap
import os
from collections.abc import Awaitable

from goodput_agent_vllm import logger
from goodput_agent_vllm.logger import GoodputStatLogger
from goodput_agent_vllm.middleware import App, GoodputMiddleware, Receive, Scope, Send
from goodput_agent_vllm.reporting import shared_reporter


class SwitchedMiddleware(GoodputMiddleware):
    """Measures requests while it is switched on; else the plugin is as without a middleware."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        opened = os.open(os.environ["GOODPUT_BENCHMARK_SWITCH"], os.O_RDONLY)
        self._switch = switch = mmap.mmap(opened, 1, prot=mmap.PROT_READ)
        reporter = shared_reporter()
        take = reporter.take_figures
        assert take is not None, "the front takes the engine's figures"

        def take_figures(engine_id: str, figures: bytes) -> None:
            if switch[0]:
                take(engine_id, figures)
            else:
                reporter.add(figures)

        reporter.take_figures = take_figures

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve a call, and measure it or not."""
        if self._switch[0]:
            return super().__call__(scope, receive, send)
        return self.app(scope, receive, send)


# The one that the stat logger adds.
logger.GoodputMiddleware = SwitchedMiddleware  # type: ignore[attr-defined]

SwitchedStatLogger = GoodputStatLogger
