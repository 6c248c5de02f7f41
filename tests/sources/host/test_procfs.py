"""Files of /proc and of cgroups."""

import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records.engine import CgroupMemory
from agent.sources.host.cgroups import (
    CgroupPath,
    CgroupReader,
    parse_bytes,
    parse_cgroup_path,
    parse_figures,
)
from agent.sources.host.procfs import (
    HostUnreadable,
    Procfs,
    parse_listening,
    parse_listening_addresses,
    parse_oom_kills,
    parse_stat,
)
from tests.sources.host.machine import PaperMachine

RECORDED = (
    "8859 (VLLM::EngineCor) S 8785 8785 8785 0 -1 1077936448 262434 301 812 1 7215 1033 0 0 20 0 "
    "38 0 412077 9127084032 512345 18446744073709551615 4194304 7018577 140727 0 0 0 0 16781312 "
    "134234634 0 0 0 17 1 0 0 0 0 0 9410000 9700000 35000000 140727 140727 140727 140727 0\n"
)


def test_a_recorded_stat_is_read() -> None:
    stat = parse_stat(RECORDED)
    assert (stat.pid, stat.comm, stat.state, stat.parent) == (8859, "VLLM::EngineCor", "S", 8785)
    assert (stat.cpu_ticks, stat.started_ticks) == (7215 + 1033, 412077)


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y", "(((", ") R 0", "::", ""])
def test_a_name_may_hold_whatever_it_likes(name: str) -> None:
    stat = parse_stat(RECORDED.replace("VLLM::EngineCor", name))
    assert (stat.comm, stat.parent) == (name, 8785)


@pytest.mark.parametrize("text", ["", "8859", "8859 (x) S 1 2", "x (y) S " + "1 " * 30])
def test_what_is_no_stat_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_stat(text)


@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    with suppress(ValueError):
        parse_stat(text)
    parse_listening(text)
    parse_listening_addresses(text, 0)
    parse_oom_kills(text)


def test_only_sockets_that_listen_count_with_their_ports() -> None:
    text = (
        "  sl  local_address rem_address   st\n"
        "   0: 0100007F:1F40 00000000:0000 0A 0:0 00:0 0 0 0 111 1 0 100 0 0 10 0\n"
        "   1: 0100007F:1F40 0100007F:9C40 01 0:0 00:0 0 0 0 222 1 0 100 0 0 10 0\n"
        "   2: 00000000000000000000000000000000:1F41 0:0 0A 0:0 00:0 0 0 0 333 1 0 100 0\n"
        "   3: broken\n"
        "   4: 0100007F:zzzz 00000000:0000 0A 0:0 00:0 0 0 0 444 1 0 100 0 0 10 0\n"
    )
    assert parse_listening(text) == {111: 8000, 333: 8001}
    broken = "head\n 0: 0100007Z:1F40 0:0 0A 0 0 0 0 0 1 0\n 1: 7F:1F40 0:0 0A 0 0 0 0 0 1 0\n"
    assert parse_listening_addresses(broken, 8000) == frozenset()


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.8.7", "0.0.0.0", "::1", "::"])
def test_real_sockets_listen_on_their_addresses(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        assert Procfs(Path("/proc")).listening_addresses(port) == {address}
    assert Procfs(Path("/proc")).listening_addresses(port) == frozenset()


@pytest.mark.parametrize(
    ("text", "kills"),
    [
        ("pgfault 9\noom_kill 12\n", 12),
        ("pgfault 9\n", None),
        ("oom_kill x\n", None),
        ("oom_kill " + "9" * 5000, None),
    ],
)
def test_the_machine_s_kills_are_read_where_they_are_counted(text: str, kills: int | None) -> None:
    assert parse_oom_kills(text) == kills


def test_zombies_and_files_of_garbage_are_passed_over(machine: PaperMachine) -> None:
    machine.runs(6, state="Z")
    machine.runs(7)
    machine.runs(8)
    (machine.proc / "7/stat").write_bytes(b"\xff\x00garbage")
    machine.listens({5: 8000})
    proc = Procfs(machine.proc)
    assert proc.stat(6) is None
    assert list(proc.stats()) == [8]
    # A kernel without IPv6 has one table less.
    assert proc.listening() == {5: 8000}


def test_the_time_that_a_process_ran_and_waited_for_a_processor(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    proc = Procfs(tmp_path)
    assert proc.schedstat(7) is None
    (folder / "schedstat").write_text("669846000 687894000 3\n")
    assert proc.schedstat(7) == pytest.approx((0.669846, 0.687894))
    (folder / "schedstat").write_text("0 0\n")
    assert proc.schedstat(7) is None


# Cgroups

V1 = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
V2 = "0::/kubepods/pod1/abc\n"
ENGINE = 10


def reader(machine: PaperMachine) -> CgroupReader:
    return CgroupReader(Procfs(machine.proc), machine.cgroups)


def read(reads: CgroupReader, *pids: int) -> tuple[CgroupMemory, dict[str, str]]:
    unread: dict[str, str] = {}
    return reads.read(pids, unread), unread


@pytest.mark.parametrize(
    ("text", "at"),
    [
        (V1, CgroupPath(1, "/docker/abc")),
        (V2, CgroupPath(2, "/kubepods/pod1/abc")),
        ("0::/a:b\n", CgroupPath(2, "/a:b")),
        ("3:cpu:/x\n", None),
        ("4:memory:relative\n0::\n", None),
        ("", None),
        ("garbage", None),
    ],
)
def test_the_cgroup_that_counts_is_the_one_with_the_memory_controller(
    text: str, at: CgroupPath | None
) -> None:
    assert parse_cgroup_path(text) == at


def test_figures_stand_beside_garbage() -> None:
    text = "low 0\noom_kill 3\noom x\n\n\x00\xff\nmax\noom_group_kill 1 2\nhigh " + "9" * 5000
    assert parse_figures(text) == {"low": 0, "oom_kill": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1024\n", 1024), ("max\n", None), ("9223372036854771712\n", None), ("0", 0)],
)
def test_bytes_are_read_and_no_limit_is_none(text: str, value: int | None) -> None:
    assert parse_bytes(text) == value
    for wrong in ("", "x", "-1", "1 2", "9" * 5000):
        with pytest.raises(ValueError, match="not a number of bytes"):
            parse_bytes(wrong)


@given(st.text())
def test_any_text_gives_figures_or_none(text: str) -> None:
    parse_figures(text)
    parse_cgroup_path(text)


@pytest.mark.parametrize(("version", "at"), [(1, "/docker/abc"), (2, "/kubepods/pod1/abc")])
def test_a_cgroup_of_either_version_is_read(machine: PaperMachine, version: int, at: str) -> None:
    machine.runs(ENGINE, cgroup={1: V1, 2: V2}[version])
    {1: machine.cgroup_v1, 2: machine.cgroup_v2}[version](at, (ENGINE,), kills=2)
    seen, unread = read(reader(machine), ENGINE)
    assert (seen.version, seen.path, seen.oom_kills) == (version, at, 2)
    assert (seen.usage_bytes, seen.limit_bytes) == (900_000_000, 1_073_741_824)
    assert unread == {}


def test_a_kernel_that_counts_no_kills_is_named(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V1)
    folder = machine.cgroup_v1("/docker/abc", (ENGINE,))
    (folder / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\n")
    seen, unread = read(reader(machine), ENGINE)
    assert seen.oom_kills is None
    assert unread == {"memory.oom_control": "the file has no oom_kill"}


def test_a_file_that_cannot_be_read_hides_no_other(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V2)
    folder = machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE,), kills=2)
    (folder / "memory.current").write_text("lots")
    (folder / "memory.max").unlink()
    seen, unread = read(reader(machine), ENGINE)
    assert (seen.oom_kills, seen.usage_bytes) == (2, None)
    assert set(unread) == {"memory.current", "memory.max"}
    assert "lots" in unread["memory.current"]


def test_a_cgroup_is_held_on_to_when_its_engine_is_gone(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V2)
    machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE,))
    reads = reader(machine)
    before, _ = read(reads, ENGINE)
    machine.ends(ENGINE)
    machine.cgroup_v2("/kubepods/pod1/abc", (), kills=1)
    after, _ = read(reads)
    assert (before.oom_kills, after.oom_kills) == (0, 1)
    assert before.inode == after.inode
    shutil.rmtree(machine.cgroups / "kubepods/pod1/abc")
    gone, unread = read(reads)
    assert gone.oom_kills is None
    assert "memory.events" in unread


def test_a_kill_is_not_lost_when_the_next_process_is_in_another_cgroup(
    machine: PaperMachine,
) -> None:
    machine.runs(ENGINE, cgroup=V2)
    machine.runs(20, cgroup="0::/front\n")
    machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE,))
    machine.cgroup_v2("/front", (20,))
    reads = reader(machine)
    read(reads, ENGINE, 20)
    machine.cgroup_v2("/kubepods/pod1/abc", (), kills=1)
    killed, _ = read(reads, 20)
    later, _ = read(reads, 20)
    assert (killed.path, killed.oom_kills) == ("/kubepods/pod1/abc", 1)
    assert (later.path, later.oom_kills) == ("/front", 0)
    assert later.inode != killed.inode


@pytest.mark.parametrize("path", ["/../def", "/kubepods/pod1/def", "/"])
def test_a_neighbour_s_cgroup_is_read_through_its_own_root(
    machine: PaperMachine, path: str, tmp_path: Path
) -> None:
    """In another cgroup namespace the path may lead nowhere, or to a cgroup of our own."""
    machine.runs(ENGINE, cgroup=f"0::{path}\n")
    machine.cgroup_v2("/", (1,), kills=7)
    theirs = PaperMachine(tmp_path / "theirs")
    theirs.cgroup_v2("/", (ENGINE,), kills=1)
    root = machine.proc / str(ENGINE) / "root/sys/fs"
    root.mkdir(parents=True)
    theirs.cgroups.rename(root / "cgroup")
    seen, _ = read(reader(machine), ENGINE)
    assert seen.oom_kills == 1


def test_a_cgroup_without_the_engine_in_it_is_not_the_engine_s(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V2)
    machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE + 1,), kills=7)
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(HostUnreadable, match="mount the machine's cgroups"):
        read(reader(machine), ENGINE)
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize(
    ("pids", "why"),
    [((), "no process of the engine"), ((ENGINE,), "no cgroup with a memory controller")],
)
def test_without_a_memory_cgroup_there_is_a_reason(
    machine: PaperMachine, pids: tuple[int, ...], why: str
) -> None:
    machine.runs(ENGINE, cgroup="3:cpu:/x\n")
    with pytest.raises(HostUnreadable, match=why):
        read(reader(machine), *pids)


def test_the_held_cgroup_counts_on_while_a_new_one_cannot_be_found(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V2)
    machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE,), kills=1)
    reads = reader(machine)
    read(reads, ENGINE)
    machine.runs(20, cgroup="0::/kubepods/pod1/hidden\n")
    seen, unread = read(reads, 20)
    assert (seen.path, seen.oom_kills) == ("/kubepods/pod1/abc", 1)
    assert "hidden" in unread["cgroup"]
