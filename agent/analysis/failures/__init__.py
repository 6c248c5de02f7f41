"""What happened to an engine, judged poll by poll from all that was seen of it."""

from agent.analysis.failures.classify import classify
from agent.analysis.failures.poll import DetectionLimits, Poll
from agent.analysis.failures.state import Watching

__all__ = ["DetectionLimits", "Poll", "Watching", "classify"]
