"""What is wrong with a simulated engine: what its scenario scripts, or what it was told."""

from collections.abc import Sequence

from agent.simulator.scenario import Fault, ScriptedFault

_SOUND = Fault()


class Faults:
    """The fault of one engine; of several that are scripted for a time, the first counts."""

    def __init__(self, script: Sequence[ScriptedFault] = ()) -> None:
        self._script = tuple(script)
        self._told: Fault | None = None

    def tell(self, fault: Fault) -> None:
        """From now on this is what is wrong, whatever is scripted."""
        self._told = fault

    def at(self, at_s: float) -> Fault:
        """What is wrong at a time of the engine."""
        if self._told is not None:
            return self._told
        return next((fault for fault in self._script if fault.holds_at(at_s)), _SOUND)
