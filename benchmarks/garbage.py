"""The garbage collector as the agent sets it."""

import gc

from agent.app.running import GC_THRESHOLD


def collect_like_the_agent() -> None:
    """Set what `agent.app` sets once everything is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
