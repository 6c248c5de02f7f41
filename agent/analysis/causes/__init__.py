"""Why a request missed its objectives: its excess seconds, charged to causes with evidence."""

from agent.analysis.causes.engine_timeline import EngineTimeline
from agent.analysis.causes.rules import explain

__all__ = ["EngineTimeline", "explain"]
