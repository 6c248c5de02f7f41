import socket
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sources.host.procfs import (
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


@pytest.mark.parametrize("address", ["127.0.0.1", "127.9.8.7", "0.0.0.0", "::1", "::"])
def test_real_sockets_listen_on_their_addresses(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        port = server.getsockname()[1]
        assert Procfs(Path("/proc")).listening_addresses(port) == {address}
    assert Procfs(Path("/proc")).listening_addresses(port) == frozenset()


def test_a_row_with_a_broken_address_is_left_out() -> None:
    rows = "head\n 0: 0100007Z:1F40 0:0 0A 0 0 0 0 0 1 0\n 1: 7F:1F40 0:0 0A 0 0 0 0 0 1 0\n"
    assert parse_listening_addresses(rows, 8000) == frozenset()


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


def test_a_zombie_is_gone(machine: PaperMachine) -> None:
    machine.runs(7, state="Z")
    machine.runs(8)
    proc = Procfs(machine.proc)
    assert proc.stat(7) is None
    assert list(proc.stats()) == [8]


def test_a_process_whose_files_are_garbage_is_passed_over(machine: PaperMachine) -> None:
    machine.runs(7)
    machine.runs(8)
    (machine.proc / "7/stat").write_bytes(b"\xff\x00garbage")
    assert list(Procfs(machine.proc).stats()) == [8]


def test_a_kernel_without_ipv6_has_one_table_less(machine: PaperMachine) -> None:
    machine.listens({5: 8000})
    assert not (machine.proc / "net/tcp6").exists()
    assert Procfs(machine.proc).listening() == {5: 8000}


def test_the_time_that_a_process_ran_and_waited_for_a_processor(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    folder.mkdir()
    proc = Procfs(tmp_path)
    assert proc.schedstat(7) is None
    (folder / "schedstat").write_text("669846000 687894000 3\n")
    assert proc.schedstat(7) == pytest.approx((0.669846, 0.687894))
    (folder / "schedstat").write_text("0 0\n")
    assert proc.schedstat(7) is None
