"""The fault of a simulated engine: scripted by its scenario, or set over HTTP."""

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

    def at(self, at_s: float) -> Fault:
        """The fault at a time of the engine."""
        if self._set is not None:
            return self._set
        return next((fault for fault in self._script if fault.holds_at(at_s)), _NO_FAULT)
