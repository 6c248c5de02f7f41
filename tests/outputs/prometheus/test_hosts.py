"""Published metrics of hosts; unknown values are absent."""

from agent.outputs.prometheus.hosts import HostBoard
from agent.records.host import CgroupMemory, EngineProcess, HostSample, ProcessRole

FRONT, CORE = ProcessRole.FRONT, ProcessRole.CORE


def process(pid: int, role: ProcessRole, cpu_s: float) -> EngineProcess:
    return EngineProcess(
        pid=pid, started_after_boot_s=float(pid), role=role, name="p", state="S", cpu_s=cpu_s
    )


def sample(*processes: EngineProcess, cgroup: CgroupMemory | None = None) -> HostSample:
    return HostSample(at=0.0, processes=processes, cgroup=cgroup)


def values(board: HostBoard) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in board.families()
        for sample in family.samples
    }


def test_cpu_time_is_published_by_role() -> None:
    board = HostBoard()
    board.sample("chat", sample(process(1, FRONT, 2.0), process(2, CORE, 30.0)))
    board.sample("chat", sample(process(1, FRONT, 2.5), process(2, CORE, 34.0)))
    assert values(board) == {
        ("llm_engine_cpu_seconds_total", "chat", "front"): 2.5,
        ("llm_engine_cpu_seconds_total", "chat", "core"): 34.0,
    }


def test_cpu_time_never_falls_when_processes_come_and_go() -> None:
    board = HostBoard()
    board.sample("chat", sample(process(1, FRONT, 2.0), process(2, FRONT, 7.0)))
    board.sample("chat", sample(process(1, FRONT, 3.0)))
    board.sample("chat", sample(process(9, FRONT, 0.5)))
    assert values(board)["llm_engine_cpu_seconds_total", "chat", "front"] == 10.5


def test_only_known_memory_values_are_published() -> None:
    board = HostBoard()
    cgroup = CgroupMemory(version=2, path="/e", inode=1, usage_bytes=900, oom_kills=3)
    board.sample("chat", sample(cgroup=cgroup))
    assert values(board) == {
        ("llm_engine_memory_usage_bytes", "chat"): 900.0,
        ("llm_engine_oom_kills_total", "chat"): 3.0,
    }


def test_a_host_without_known_values_publishes_nothing() -> None:
    board = HostBoard()
    board.sample("chat", HostSample(at=0.0, unread={"processes": "elsewhere"}))
    assert values(board) == {}
