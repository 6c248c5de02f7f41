"""Processes of a host sample."""

import pytest

from agent.records.host import EngineProcess, HostSample, ProcessRole


def process(role: ProcessRole, cpu_s: float, *, state: str = "S") -> EngineProcess:
    return EngineProcess(
        pid=1, started_after_boot_s=2.0, role=role, name="x", state=state, cpu_s=cpu_s
    )


def test_the_front_s_cpu_is_the_sum_of_its_processes() -> None:
    fronts = (process(ProcessRole.FRONT, 3.0), process(ProcessRole.FRONT, 4.0))
    sample = HostSample(at=0.0, processes=(*fronts, process(ProcessRole.CORE, 90.0)))
    assert sample.front_cpu_s == 7.0


@pytest.mark.parametrize("processes", [None, (), (process(ProcessRole.CORE, 90.0),)])
def test_the_cpu_of_a_front_without_processes_is_unknown(
    processes: tuple[EngineProcess, ...] | None,
) -> None:
    assert HostSample(at=0.0, processes=processes).front_cpu_s is None


def test_a_process_is_identified_by_its_pid_and_its_start() -> None:
    assert process(ProcessRole.CORE, 1.0).identity == (1, 2.0)


@pytest.mark.parametrize(("state", "stopped"), [("T", True), ("t", True), ("S", False)])
def test_a_process_that_a_signal_or_a_debugger_holds_is_stopped(state: str, stopped: bool) -> None:
    assert process(ProcessRole.CORE, 1.0, state=state).stopped is stopped
