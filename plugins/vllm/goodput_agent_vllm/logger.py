"""The class that vLLM loads by the entry point `vllm.stat_logger_plugins`."""

import logging
import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase  # type: ignore[import-not-found]

from goodput_agent_vllm import hooks
from goodput_agent_vllm.reporting import Reporter
from goodput_agent_vllm.sending import Sender

_LOG = logging.getLogger("vllm.goodput_agent")

# With `off`, no method of vLLM is wrapped: see hooks.py.
HOOKS_VARIABLE = "GOODPUT_AGENT_HOOKS"

# One reporter for all ranks of a process: an abort belongs to no rank.
_reporter: Reporter | None = None


def _shared_reporter() -> Reporter:
    global _reporter
    if _reporter is None:
        _reporter = Reporter(Sender())
        if os.environ.get(HOOKS_VARIABLE, "on") != "off":
            _wrap_methods(_reporter)
    return _reporter


def _wrap_methods(reporter: Reporter) -> None:
    try:
        from vllm.v1.engine.output_processor import OutputProcessor  # type: ignore[import-not-found]
        from vllm.v1.metrics.stats import IterationStats  # type: ignore[import-not-found]

        if not hooks.watch_aborts(OutputProcessor, reporter):
            _LOG.warning("goodput-agent-vllm does not know this vLLM: aborts are not reported")
        if not hooks.watch_first_tokens(IterationStats, reporter):
            _LOG.warning("goodput-agent-vllm does not know this vLLM: TTFT is not reported")
    except Exception:
        reporter.failed()


class GoodputStatLogger(StatLoggerBase):  # type: ignore[misc]
    """Reports the steps of one rank. vLLM makes one for each, and calls `record` at each step."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._rank = engine_index
        self._reporter: Reporter | None = None
        try:
            self._reporter = _shared_reporter()
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
