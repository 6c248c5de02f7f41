"""The class that vLLM loads by the entry point `vllm.stat_logger_plugins`."""

import logging
import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase  # type: ignore[import-not-found]

from goodput_agent_vllm import hooks
from goodput_agent_vllm.middleware import GoodputMiddleware
from goodput_agent_vllm.reporting import Reporter, shared_reporter

_LOG = logging.getLogger("vllm.goodput_agent")

# With `off`, no method of vLLM is wrapped: see hooks.py.
HOOKS_VARIABLE = "GOODPUT_AGENT_HOOKS"

# With `off`, no middleware is added: see middleware.py.
MIDDLEWARE_VARIABLE = "GOODPUT_AGENT_MIDDLEWARE"


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "on") != "off"


def _wrap_methods(reporter: Reporter) -> None:
    """Wrap the methods of vLLM that were not wrapped before."""
    try:
        from vllm.v1.engine.output_processor import OutputProcessor  # type: ignore[import-not-found]
        from vllm.v1.metrics.stats import IterationStats  # type: ignore[import-not-found]

        if not hooks.watch_aborts(OutputProcessor, reporter):
            _LOG.warning("goodput-agent-vllm does not know this vLLM: aborts are not reported")
        if not hooks.watch_first_tokens(IterationStats, reporter):
            _LOG.warning("goodput-agent-vllm does not know this vLLM: TTFT is not reported")
    except Exception:
        reporter.failed()


def _launcher() -> Any:
    """vLLM's module that makes its HTTP application; None in a version without it."""
    try:
        from vllm.entrypoints.launchers import app  # type: ignore[import-not-found]
    except ImportError:
        return None
    return app


def _add_middleware(reporter: Reporter) -> None:
    """Have vLLM add the middleware when it makes its HTTP application, after this."""
    try:
        app = _launcher()
        if app is None or not hooks.add_middleware(app, GoodputMiddleware, reporter):
            _LOG.warning(
                "goodput-agent-vllm does not know this vLLM: for errors, clients that leave and "
                "tenants, start vLLM with --middleware %s.%s",
                GoodputMiddleware.__module__,
                GoodputMiddleware.__qualname__,
            )
    except Exception:
        reporter.failed()


_hooked = False


def _hooked_reporter() -> Reporter:
    global _hooked
    reporter = shared_reporter()
    if not _hooked:
        _hooked = True
        if _is_on(HOOKS_VARIABLE):
            _wrap_methods(reporter)
        if _is_on(MIDDLEWARE_VARIABLE):
            _add_middleware(reporter)
    return reporter


class GoodputStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Reports the steps of one rank. vLLM makes one for each, and calls `record` at each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._rank = engine_index
        self._reporter: Reporter | None = None
        try:
            self._reporter = _hooked_reporter()
            # With several API servers, each gets the counts of some steps only.
            servers = getattr(vllm_config.parallel_config, "_api_process_count", 1)
            self._reporter.whole_steps = servers == 1
        except Exception:
            _LOG.exception("goodput-agent-vllm cannot start, and is off")

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_: Any,
    ) -> None:
        """Report a step."""
        if self._reporter is not None:
            self._reporter.step(scheduler_stats, iteration_stats, self._rank)

    def log(self) -> None:
        """Report that the plugin is there; vLLM calls it every 10 s, also when it is idle."""
        if self._reporter is not None:
            self._reporter.hello()

    def log_engine_initialized(self) -> None:
        """Report that the plugin is there."""
        if self._reporter is not None:
            self._reporter.hello()
