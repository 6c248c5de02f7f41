"""Garbage collector settings of the agent."""

import gc

from agent.app.running import GC_THRESHOLDS


def collect_like_the_agent() -> None:
    """Apply the settings that `agent.app` applies after start."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
