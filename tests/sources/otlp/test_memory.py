"""What strangers can make the receiver take of the machine's memory."""

import gzip
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.sources.otlp.doors import OK, PROTOBUF_DOORS, UNAVAILABLE, Door, call, post
from tests.sources.otlp.exports import export, gzip_bomb, in_json, json_bytes, vllm_span

MIB = 1024 * 1024

BOMB = gzip_bomb(64 * MIB + 1)
LONG = export(
    vllm_span({"gen_ai.request.id": "x" * MIB, "gen_ai.prompt": "y" * MIB}),
    resource={"service.name": "z" * MIB},
)
LONG_BODY, LONG_JSON = LONG.SerializeToString(), json_bytes(in_json(LONG))


@dataclass(frozen=True, slots=True)
class Alone:
    """A receiver in a process of its own."""

    grpc_port: int
    http_port: int
    process: psutil.Process

    def resident_mib(self) -> float:
        """The memory that it has now."""
        return float(self.process.memory_info().rss / MIB)

    def peak_mib(self) -> float:
        """The most memory that it ever had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) / 1024


@pytest.fixture
def alone() -> Iterator[Alone]:
    command = [sys.executable, "-m", "tests.sources.otlp.alone"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        grpc_port, http_port = map(int, started.stdout.readline().split())
        yield Alone(grpc_port, http_port, psutil.Process(started.pid))
        assert started.stdin is not None
        started.stdin.close()


def hostile_round(alone: Alone) -> None:
    """Bodies of which each takes megabytes, refused and taken."""
    assert post(alone, BOMB, encoding="gzip").http_status == 413
    for _ in range(5):
        assert post(alone, LONG_BODY).is_full_success
        assert call(alone, LONG_BODY).is_full_success
        assert post(alone, LONG_JSON).http_status == 400
        assert post(alone, gzip.compress(LONG_BODY)[:-9], encoding="gzip").http_status == 400
    assert post(alone, LONG_JSON, content_type="application/json").is_full_success


def test_hostile_bodies_leave_nothing_behind(alone: Alone) -> None:
    for _ in range(3):
        hostile_round(alone)
    early_mib = alone.resident_mib()
    for _ in range(15):
        hostile_round(alone)
    # One bomb that stays would be 64 MiB, the long texts 200 MiB.
    assert alone.resident_mib() < early_mib + 48


@pytest.mark.parametrize("door", PROTOBUF_DOORS[::2], ids=lambda door: door.name)
def test_large_bodies_at_once_are_told_to_come_back(alone: Alone, door: Door) -> None:
    body = export(vllm_span({"prompt": "x" * (60 * MIB)})).SerializeToString()
    with ThreadPoolExecutor(12) as threads:
        replies = list(threads.map(lambda _: door.send_bytes(alone, body), range(12)))
    assert {reply.code for reply in replies} == {OK, UNAVAILABLE}
    print(alone.peak_mib(), [r.code for r in replies])
    assert alone.peak_mib() < 1024


def test_a_small_body_does_not_become_gigabytes(alone: Alone) -> None:
    spans = b"\x12\x00" * (8 * MIB)
    head = b"\x0a" + b"\x85\x80\x80\x08" + b"\x12" + b"\x80\x80\x80\x08"
    before_mib = alone.peak_mib()
    assert post(alone, gzip.compress(head + spans), encoding="gzip").http_status == 413
    assert alone.peak_mib() < before_mib + 256
