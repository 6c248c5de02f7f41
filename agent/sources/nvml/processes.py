"""Which processes hold memory of a device."""

from typing import Any

from agent.records.gpu import ProcessMemory
from agent.sources.nvml.calls import GpuCalls

_COMPUTE = "nvmlDeviceGetComputeRunningProcesses_v3"
# Clients of the multi-process service stand in a list of their own, where there is one.
_MPS = "nvmlDeviceGetMPSComputeRunningProcesses_v3"


def process_memory(calls: GpuCalls, handle: Any) -> ProcessMemory | None:
    """Bytes by process, or None where some may be missing. Raises GpuLost and NvmlUnavailable.

    Of clients that were never told some may be missing all the same: where there is a process, a
    list that always fails must not hide it.
    """
    compute, clients = calls.ask(_COMPUTE, handle), calls.ask(_MPS, handle)
    if compute is None:
        return None
    if clients is None and calls.in_doubt(_MPS) and (not compute or calls.ever_answered(_MPS)):
        return None
    used: dict[int, int | None] = {}
    for processes in (compute, clients):
        for pid, memory_bytes in _by_pid(processes or ()).items():
            used.setdefault(pid, memory_bytes)
    return used


def _by_pid(processes: Any) -> ProcessMemory:
    used: dict[int, int | None] = {}
    for process in processes:
        before = used.get(process.pid, 0)
        here = process.usedGpuMemory
        # One process may hold memory of several MIG instances.
        used[process.pid] = None if before is None or here is None else before + here
    return used
