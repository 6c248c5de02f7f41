"""Files that a person names: what is read, and for how long."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.settings.named_files import in_time, read_named_file


@pytest.fixture
def mount_answers() -> Iterator[threading.Event]:
    """Set when a file system that hangs shall respond again."""
    answers = threading.Event()
    yield answers
    answers.set()


def test_a_regular_file_is_read_whole(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 10)
    (tmp_path / "link").symlink_to(file)
    assert read_named_file(file, max_bytes=10) == b"x" * 10
    assert read_named_file(tmp_path / "link") == b"x" * 10


def test_a_larger_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_named_file(file, max_bytes=10)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("absent", "No such file or directory"),
        ("folder", "Is a directory; name a regular file"),
        ("pipe", "Is a named pipe; name a regular file"),
        ("file/below", "Not a directory"),
        ("a\0b", "no file can have such a name"),
        ("a\ud800", "no file can have such a name"),
        ("x" * 300, "File name too long"),
    ],
)
def test_anything_else_is_refused_with_the_reason_alone(
    tmp_path: Path, name: str, why: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError) as caught:  # noqa: PT011 - compared whole below
        read_named_file(tmp_path / name)
    assert str(caught.value) == why


def test_a_file_system_that_hangs_is_left_in_time_and_not_asked_again_until_it_responds(
    mount_answers: threading.Event,
) -> None:
    reads = []

    def read() -> str:
        reads.append(threading.current_thread())
        mount_answers.wait()
        return "content"

    def open_reads() -> list[threading.Thread]:
        return [each for each in reads if each.is_alive()]

    with pytest.raises(OSError, match=r"no response from its file system within 0\.01 s"):
        in_time(Path("/mnt/file"), read, within_s=0.01)
    with pytest.raises(OSError, match="no response from its file system since"):
        in_time(Path("/mnt/file"), read)
    assert in_time(Path("/elsewhere/file"), lambda: "other") == "other"
    assert len(open_reads()) == 1
    mount_answers.set()
    reads[0].join()
    assert in_time(Path("/mnt/file"), read) == "content"
    assert open_reads() == []


def test_errors_of_a_read_are_raised_where_it_is_awaited() -> None:
    def fails() -> None:
        # ETIMEDOUT of a network file system, which is no end of our own limit.
        raise TimeoutError(110, "Connection timed out")

    with pytest.raises(TimeoutError, match="Connection timed out"):
        in_time(Path("/mnt/file"), fails)
