"""Which failures the polls of an engine show: one detector for each, in one ordered table."""

from agent.analysis.failures.detection import FailureDetection
from agent.analysis.failures.poll import DetectionLimits, Poll

__all__ = ["DetectionLimits", "FailureDetection", "Poll"]
