"""A machine on paper: folders with the files of /proc and /sys/fs/cgroup."""

import shutil
from pathlib import Path

TICKS_PER_S = 100


class PaperMachine:
    """Writes what the kernel would, without a listener or a kill at first."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.cgroups = folder / "cgroup"
        (self.proc / "net").mkdir(parents=True)
        self.cgroups.mkdir()
        self._sockets: dict[int, int] = {}
        self.listens({})
        self.kills(0)

    def runs(
        self,
        pid: int,
        comm: str = "python3",
        *,
        parent: int = 1,
        title: str = "",
        started_s: float = 10.0,
        state: str = "S",
        cpu_s: float = 0.0,
        sockets: tuple[int, ...] = (),
        cgroup: str | None = None,
        flags: tuple[str, ...] = (),
    ) -> None:
        """A process; one that had this PID before is gone."""
        self.ends(pid)
        folder = self.proc / str(pid)
        (folder / "fd").mkdir(parents=True)
        ticks = round(cpu_s * TICKS_PER_S), round(started_s * TICKS_PER_S)
        (folder / "stat").write_text(
            f"{pid} ({comm}) {state} {parent} 1 1 0 -1 4194560 9 0 0 0 "
            f"{ticks[0]} 0 0 0 20 0 1 0 {ticks[1]} 1000000 500 18446744073709551615 1 1 0\n"
        )
        words = (title or comm, *flags, "--api-key", "secret")
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
        for number, inode in enumerate(sockets):
            (folder / "fd" / str(number)).symlink_to(f"socket:[{inode}]")
        if cgroup is not None:
            (folder / "cgroup").write_text(cgroup)

    def ends(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid), ignore_errors=True)

    def listens(self, ports: dict[int, int]) -> None:
        """Sockets by inode, each listening on a port."""
        head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n"
        rows = [
            f"   {number}: 0100007F:{port:04X} 00000000:0000 0A 00000000:00000000 00:00000000 "
            f"00000000     0        0 {inode} 1 0000000000000000 100 0 0 10 0\n"
            for number, (inode, port) in enumerate(ports.items())
        ]
        (self.proc / "net/tcp").write_text(head + "".join(rows))

    def kills(self, count: int) -> None:
        (self.proc / "vmstat").write_text(f"nr_free_pages 1\noom_kill {count}\n")

    def cgroup_v2(self, path: str, pids: tuple[int, ...], *, kills: int = 0) -> Path:
        """The files of a version 2 cgroup, as Linux 6.8 writes them."""
        folder = self.cgroups / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        events = f"low 0\nhigh 0\nmax 12\noom {kills}\noom_kill {kills}\noom_group_kill 0\n"
        (folder / "memory.events").write_text(events)
        (folder / "memory.current").write_text("900000000\n")
        (folder / "memory.max").write_text("1073741824\n")
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return folder

    def cgroup_v1(self, path: str, pids: tuple[int, ...], *, kills: int = 0) -> Path:
        """The files of a version 1 memory cgroup, as Linux 6.1 writes them."""
        folder = self.cgroups / "memory" / path.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        )
        (folder / "memory.usage_in_bytes").write_text("900000000\n")
        (folder / "memory.limit_in_bytes").write_text("1073741824\n")
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return folder
