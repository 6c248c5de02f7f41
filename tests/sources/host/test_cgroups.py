import os
import shutil
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
from agent.sources.host.procfs import HostUnreadable, Procfs
from tests.sources.host.machine import PaperMachine

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


@pytest.mark.parametrize("text", ["", "x", "-1", "1 2", "9" * 5000])
def test_what_is_no_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of bytes"):
        parse_bytes(text)


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
    assert later.path == "/front"


def test_a_cgroup_that_is_gone_is_unknown_and_named(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V2)
    folder = machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE,))
    reads = reader(machine)
    read(reads, ENGINE)
    machine.ends(ENGINE)
    shutil.rmtree(folder)
    seen, unread = read(reads)
    assert seen.oom_kills is None
    assert "memory.events" in unread


def test_an_engine_in_another_container_has_another_cgroup(machine: PaperMachine) -> None:
    machine.runs(ENGINE, cgroup=V2)
    machine.cgroup_v2("/kubepods/pod1/abc", (ENGINE,), kills=5)
    reads = reader(machine)
    first, _ = read(reads, ENGINE)
    machine.runs(20, cgroup="0::/kubepods/pod1/def\n")
    machine.cgroup_v2("/kubepods/pod1/def", (20,))
    second, _ = read(reads, 20)
    assert first.inode != second.inode
    assert (second.path, second.oom_kills) == ("/kubepods/pod1/def", 0)


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
