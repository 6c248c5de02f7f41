"""The fault of a simulated engine: scripted by its scenario, or set over HTTP."""

import math
from collections.abc import Sequence

from agent.simulator.scenario import Fault, ScriptedFault

_NO_FAULT = Fault()


class Faults:
    """The fault of one engine; of several scripted faults at one time the first counts."""

    def __init__(self, script: Sequence[ScriptedFault] = ()) -> None:
        self._script = tuple(script)
        self._set: Fault | None = None

    def set(self, fault: Fault) -> None:
        """Set a fault that replaces the script from now on."""
        self._set = fault

    def next_change_s(self, at_s: float) -> float:
        """When the script next changes after `at_s`; infinity if it does not."""
        edges = [
            edge for each in self._script for edge in (each.after_s, each.after_s + each.for_s)
        ]
        return min((edge for edge in edges if edge > at_s), default=math.inf)

    def at(self, at_s: float) -> Fault:
        """The fault at a time of the engine."""
        if self._set is not None:
            return self._set
        return next((fault for fault in self._script if fault.holds_at(at_s)), _NO_FAULT)
