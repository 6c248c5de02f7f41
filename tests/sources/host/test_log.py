"""A log that is followed, rotated, cut, or a pipe, and what its lines mean."""

import errno
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.catalog.failure_lines import LineMeaning
from agent.records.engine import LogSample
from agent.settings.named_files import in_time
from agent.sources.host import log as log_module
from agent.sources.host.log import (
    MAX_EVIDENCE_CHARACTERS,
    MAX_FINDINGS,
    MAX_LINE_BYTES,
    FileLog,
    LineScanner,
    LogFollower,
)
from agent.sources.host.procfs import HostUnreadable
from tests.real_parts.waiting import eventually

OOM = b"torch.OutOfMemoryError: CUDA out of memory.\n"
FATAL = b"EngineCore encountered a fatal error.\n"
WITHIN_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.fixture
def follower(path: Path) -> Iterator[LogFollower]:
    follower = LogFollower(path)
    yield follower
    follower.close()


def write(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_a_file_system_that_hangs_holds_up_no_poll(
    path: Path, follower: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, FATAL)
    answers = threading.Event()
    monkeypatch.setattr(log_module, "in_time", partial(in_time, within_s=0.05))
    monkeypatch.setattr(log_module.FileLog, "read", lambda _: answers.wait())
    for _ in range(3):
        with pytest.raises(TimeoutError, match="no response from its file system"):
            follower.read()
    answers.set()


def meanings(sample: LogSample) -> list[str]:
    return [finding.meaning.value for finding in sample.findings]


def test_what_stood_in_the_log_before_is_old(path: Path, follower: LogFollower) -> None:
    write(path, OOM)
    assert follower.read() == LogSample()
    write(path, FATAL)
    assert meanings(follower.read()) == ["dead"]
    assert follower.read() == LogSample()


def test_a_log_that_comes_later_is_read_from_its_start(path: Path, follower: LogFollower) -> None:
    with pytest.raises(OSError, match=r"engine\.log"):
        follower.read()
    write(path, OOM)
    assert meanings(follower.read()) == ["cuda_oom"]


def test_a_rotated_log_is_read_to_its_end_and_its_successor_from_its_start(
    path: Path, follower: LogFollower
) -> None:
    write(path, b"x\n")
    follower.read()
    moved = path.with_suffix(".1")
    path.rename(moved)
    write(moved, OOM)
    assert meanings(follower.read()) == ["cuda_oom"]
    # Its last line needs no end.
    write(moved, OOM.strip())
    write(path, FATAL)
    assert meanings(follower.read()) == ["cuda_oom", "dead"]
    write(path, OOM)
    assert meanings(follower.read()) == ["cuda_oom"]


def test_what_is_written_while_the_log_is_rotated_is_read(
    path: Path, follower: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the end of the old file was read and before the new one was found."""
    write(path, b"x\n")
    follower.read()
    find = FileLog._replaced

    def rotated(log: FileLog) -> bool:
        monkeypatch.setattr(FileLog, "_replaced", find)
        write(path, OOM)
        path.rename(path.with_suffix(".1"))
        write(path, FATAL)
        return find(log)

    monkeypatch.setattr(FileLog, "_replaced", rotated)
    assert meanings(follower.read()) == ["cuda_oom", "dead"]


def test_a_writer_that_learns_late_of_the_rotation_is_read_until_it_does(
    path: Path, follower: LogFollower
) -> None:
    """As with logrotate, which makes the new file and then notifies the writer."""
    write(path, b"x\n")
    follower.read()
    moved = path.with_suffix(".1")
    path.rename(moved)
    path.touch()
    assert follower.read() == LogSample()
    write(moved, OOM)
    write(path, FATAL)
    assert meanings(follower.read()) == ["cuda_oom", "dead"]


@pytest.mark.parametrize("before", [b"a line\n", b"a line\n" * 100, b"a line\n" * 1000])
def test_a_log_that_was_cut_is_read_from_its_start(
    path: Path, follower: LogFollower, before: bytes
) -> None:
    write(path, before)
    follower.read()
    path.write_bytes(OOM + b"another line\n" * 100)
    assert meanings(follower.read()) == ["cuda_oom"]
    write(path, FATAL)
    assert meanings(follower.read()) == ["dead"]


def test_a_line_after_a_hole_that_was_not_read_yet_is_read(
    path: Path, follower: LogFollower
) -> None:
    with path.open("wb", buffering=0) as writer:
        writer.write(b"x\n")
        follower.read()
        # More than is read of one line.
        writer.write(b"y\n" * 20_000)
        os.truncate(path, 0)
        writer.write(OOM)
        [finding] = follower.read().findings
    assert finding.line == OOM.decode().strip()


def failed_life(minute: int, lines: int) -> bytes:
    """A start that failed, and the last words, longer than any mark and the same in each life."""
    clock = b"INFO 11-21 10:%02d:00 [core.py:1] " % minute
    frame = b'  File "/opt/vllm/v1/engine/utils.py", line 1100, in wait_for_engine_startup\n'
    return (clock + b"loading\n") * lines + OOM + b"Traceback:\n" + frame * 5


@pytest.mark.parametrize("lines", [30, 20, 10, 60])
def test_each_of_several_lives_that_end_with_the_same_words_is_read(
    path: Path, follower: LogFollower, lines: int
) -> None:
    """As with `vllm serve > log` again and again, be the next life as long as the last or not."""
    write(path, b"")
    follower.read()
    write(path, failed_life(1, 30))
    assert meanings(follower.read()) == ["cuda_oom"]
    for minute in (2, 3):
        path.write_bytes(failed_life(minute, lines))
        sample = follower.read()
        assert (meanings(sample), sample.lines) == (["cuda_oom"], lines + 7)
    # Also a life that begins with the same banner, as those of a container that greets.
    banner = b"==========\n== CUDA ==\n==========\n" * 20
    path.write_bytes(banner + b"at work\n")
    follower.read()
    path.write_bytes(banner + OOM)
    assert meanings(follower.read()) == ["cuda_oom"]


def test_a_log_whose_head_was_taken_out_is_read_again(path: Path, follower: LogFollower) -> None:
    """Lines that are reported twice are better than lines that are not read."""
    write(path, b"")
    follower.read()
    write(path, failed_life(1, 30))
    follower.read()
    path.write_bytes(path.read_bytes()[500:] + FATAL)
    assert meanings(follower.read()) == ["cuda_oom", "dead"]


def test_of_a_log_that_grew_too_much_the_end_is_read(
    path: Path, follower: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "MAX_BYTES_AT_ONCE", 1000)
    write(path, b"")
    follower.read()
    write(path, OOM + b"y" * 5000 + b"\n" + FATAL)
    assert meanings(follower.read()) == ["dead"]


def test_a_link_is_followed_to_where_it_leads_now(path: Path, follower: LogFollower) -> None:
    first, second = path.with_name("0.log"), path.with_name("1.log")
    write(first, b"x\n")
    path.symlink_to(first)
    follower.read()
    write(second, OOM)
    path.unlink()
    path.symlink_to(second)
    assert meanings(follower.read()) == ["cuda_oom"]


def test_what_is_no_log_is_named(path: Path, follower: LogFollower) -> None:
    path.mkdir()
    with pytest.raises(HostUnreadable, match="configure a log file or a named pipe"):
        follower.read()


def test_a_pipe_is_read_from_one_writer_to_the_next(path: Path, follower: LogFollower) -> None:
    os.mkfifo(path)
    follower.read()
    for line, meaning in ((OOM, "cuda_oom"), (FATAL, "dead")):
        write(path, line)
        found = eventually(
            lambda: meanings(follower.read()), within_s=WITHIN_S, what="the line of a writer"
        )
        assert found == [meaning]


def test_a_pipe_never_keeps_its_writer_waiting_however_rare_the_polls(
    path: Path, follower: LogFollower
) -> None:
    os.mkfifo(path)
    follower.read()
    writer = threading.Thread(target=write, args=(path, b"z" * 80 * 100_000 + b"\n" + OOM))
    writer.start()
    writer.join(WITHIN_S)
    assert not writer.is_alive()
    found = eventually(
        lambda: meanings(follower.read()), within_s=WITHIN_S, what="the line after a long one"
    )
    assert found == ["cuda_oom"]


def test_a_log_that_cannot_be_read_keeps_no_file_open(
    path: Path, follower: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "the disk fails")

    write(path, OOM)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as failing:
        failing.setattr(os, "pread", fail)
        for _ in range(3):
            with pytest.raises(OSError, match="the disk fails"):
                follower.read()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rotated_log_that_cannot_be_read_keeps_no_successor_open(
    path: Path, follower: LogFollower, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, OOM)
    follower.read()
    before = len(os.listdir("/proc/self/fd"))
    find, read_on = FileLog._replaced, FileLog._read_on

    def fail(_log: FileLog) -> None:
        raise OSError(errno.EIO, "the disk fails")

    def rotated(log: FileLog) -> bool:
        failing.setattr(FileLog, "_read_on", fail)
        return find(log)

    path.rename(path.with_suffix(".1"))
    write(path, FATAL)
    for _ in range(3):
        with monkeypatch.context() as failing:
            failing.setattr(FileLog, "_replaced", rotated)
            with pytest.raises(OSError, match="the disk fails"):
                follower.read()
    assert FileLog._read_on is read_on
    assert len(os.listdir("/proc/self/fd")) == before
    assert meanings(follower.read()) == ["dead"]


OOM_LINE = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_lines_do_not_depend_on_the_pieces_that_they_come_in(pieces: list[bytes]) -> None:
    log = b"x\n" + OOM_LINE + b"\n" + b"".join(pieces) + b"\nEngineCore failed to start.\n"
    whole, torn = LineScanner(), LineScanner()
    whole.feed(log)
    for position in range(0, len(log), 7):
        torn.feed(log[position : position + 7])
    sample = whole.drain()
    assert sample == torn.drain()
    assert sample.findings[0].meaning is LineMeaning.CUDA_OOM


def test_of_a_huge_line_the_beginning_is_read() -> None:
    scanner = LineScanner()
    scanner.feed(OOM_LINE + b"x" * 10_000_000)
    assert scanner.drain().lines == 0
    hidden = b"x" * MAX_LINE_BYTES + OOM_LINE
    for piece in (b"\n\r\n", OOM_LINE, b"\n", hidden):
        scanner.feed(piece)
    sample = scanner.drain()
    assert [finding.meaning.value for finding in sample.findings] == ["cuda_oom", "cuda_oom"]
    assert sample.lines == 3
    assert all(len(finding.line) <= MAX_EVIDENCE_CHARACTERS for finding in sample.findings)


def test_binary_garbage_hides_no_line_and_stays_out_of_the_evidence() -> None:
    scanner = LineScanner()
    scanner.feed(bytes(range(256)) * 50 + b"\n\x00\x00\xff" + OOM_LINE + b"\x00\xfe\n")
    (finding,) = scanner.drain().findings
    assert finding.line == OOM_LINE.decode()


def test_colours_are_no_part_of_a_line() -> None:
    scanner = LineScanner()
    scanner.feed(b"\x1b[1;36m(APIServer pid=1)\x1b[0;0m ERROR EngineCore failed\x1b[0m to start.\n")
    (finding,) = scanner.drain().findings
    assert finding.line == "(APIServer pid=1) ERROR EngineCore failed to start."


def test_a_storm_of_findings_is_bounded() -> None:
    scanner = LineScanner()
    scanner.feed((OOM_LINE + b"\n") * (MAX_FINDINGS + 5))
    assert len(scanner.drain().findings) == MAX_FINDINGS


def test_the_balance_of_experts_counts_each_step_by_its_tokens() -> None:
    scanner = LineScanner()
    line = "INFO [eplb_state.py:634] EPLB step: {} for model m: avg_tokens={}, max_tokens={}, b\n"
    scanner.feed((line.format(1, "1536.00", 2048) + line.format(2, "256.00", 1024)).encode())
    assert scanner.drain().expert_balance == pytest.approx((1536 + 256) / (2048 + 1024))
    scanner.feed(line.format(3, "0.00", 0).encode() + b"another line\n")
    assert scanner.drain().expert_balance is None
