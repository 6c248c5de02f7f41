"""Processes of a host sample."""

import pytest

from agent.records.engine import EngineProcess, ProcessRole


def process(role: ProcessRole, cpu_s: float, *, state: str = "S") -> EngineProcess:
    return EngineProcess(
        pid=1, started_after_boot_s=2.0, role=role, name="x", state=state, cpu_s=cpu_s
    )


@pytest.mark.parametrize(("state", "stopped"), [("T", True), ("t", True), ("S", False)])
def test_a_process_that_a_signal_or_a_debugger_holds_is_stopped(state: str, stopped: bool) -> None:
    assert process(ProcessRole.CORE, 1.0, state=state).stopped is stopped
